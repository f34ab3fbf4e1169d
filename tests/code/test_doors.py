"""The table of doors of the Python side: who may import whom, and who may start things.

Read with ``ast``, nothing is imported. Before anything is judged it is asserted how much was
looked at.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "kvflash"
ROOT = Path(__file__).parents[2] / "python" / PACKAGE

# A room is a file or folder right below the package. It imports from lower floors only; rooms of
# one floor never see each other (but for floor 0). "" is the lobby, kvflash/__init__.py.
FLOORS = {
    "_core": 0,
    "ask": 0,
    "background": 0,
    "errors": 0,
    "config": 0,
    "config_file": 0,
    "dynamo_policy": 0,
    "flags": 0,
    "router_flags": 0,
    "cluster_flags": 0,
    "console": 0,
    "lazy": 0,
    "outage": 0,
    "percentile": 0,
    "spelling": 0,
    "table": 0,
    "variables": 0,
    "servers": 0,
    "nats_login": 0,
    "version": 0,
    "policy": 1,
    "transport": 1,
    "discovery": 1,
    "process": 2,
    "runtime": 2,
    "state": 2,
    "llm": 3,
    "publisher": 3,
    "roster": 3,
    "routing": 4,
    "frontend": 5,
    "indexer": 5,
    "doctor": 5,
    "mocker": 5,
    "launcher": 5,
    "router": 5,
    "workers": 5,
    "explain": 5,
    "replay": 5,
    "vllm": 6,
    "sglang": 6,
    "command": 6,
    "__main__": 7,
    # It names everything; nothing inside is named through it.
    "": 7,
}
# What a room below may import of the package, where its floor would allow more.
NARROW = {
    "transport": {"_core", "errors", "nats_login", "outage", "servers"},
    # What they carry is opaque to them: the core has no part in it.
    "discovery": {"errors", "outage", "servers"},
    "runtime": {"errors", "discovery", "nats_login", "outage", "servers"},
    # Discovery is a protocol to it, so that its protocols run in a simulated world.
    "state": {"_core", "background", "errors", "servers", "transport"},
    "roster": {"_core", "background", "config", "discovery", "errors", "flags", "outage", "runtime"},
    "routing": {
        "_core",
        "background",
        "cluster_flags",
        "discovery",
        "errors",
        "policy",
        "roster",
        "runtime",
        "servers",
        "spelling",
        "state",
        "transport",
        "variables",
    },
    # It looks from outside: what it says must not come from what it checks.
    "doctor": {"ask", "config", "console", "doctor", "errors", "flags", "table"},
    # They know services by what these answer.
    "workers": {"ask", "config", "console", "errors", "flags", "table"},
    "explain": {"ask", "config", "console", "errors", "flags", "table"},
    "replay": {"ask", "config", "console", "errors", "flags", "percentile", "table"},
    # It lives in the engine's process, beside whatever the engine brings.
    "publisher": {"_core", "errors", "outage", "runtime", "servers", "state", "transport"},
    # The engine's double knows nothing of the router that it is to test, but how it is found.
    "mocker": {
        "config",
        "config_file",
        "console",
        "errors",
        "flags",
        "llm",
        "mocker",
        "publisher",
        "runtime",
        "variables",
    },
}

PROCESS_STARTERS = {"process", "launcher"}
PROCESS_CALLS = {
    "subprocess",
    "multiprocessing",
    "concurrent.futures.process",
    "os.fork",
    "os.system",
    "os.popen",
    "os.posix_spawn",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
}
SIGNAL_OWNERS = {"process.py", "launcher/child.py", "mocker/app.py", "runtime/signals.py"}


@dataclass(frozen=True)
class Source:
    """A parsed file of the package."""

    path: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The room that the file is in."""
        room = self.path.split("/")[0].removesuffix(".py")
        return "" if room == "__init__" else room

    @property
    def module(self) -> tuple[str, ...]:
        """The package that relative imports start from."""
        parts = tuple(self.path.removesuffix(".py").split("/"))
        return (PACKAGE, *parts[:-1])

    def imported(self) -> set[str]:
        """Absolute names of everything imported, anywhere in the file."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.module[: len(self.module) - node.level + 1]
                    base = ".".join((*above, *([base] if base else [])))
                names |= {f"{base}.{alias.name}" for alias in node.names}
        return names

    def rooms(self) -> set[str]:
        """Rooms of the package that the file imports, its own included."""
        inside = {name for name in self.imported() if name.split(".")[0] == PACKAGE}
        found = set()
        for name in inside:
            room = (*name.split("."), "")[1]
            found.add(room if room in FLOORS else "")
        return found

    def called(self) -> set[str]:
        """Dotted names that the file uses, such as ``os.fork``."""
        return {ast.unparse(n) for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}


def parse(path: str, text: str) -> Source:
    return Source(path, ast.parse(text, path))


def load() -> list[Source]:
    paths = sorted(ROOT.rglob("*.py"))
    return [parse(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in paths]


SOURCES = load()


def faults(source: Source) -> list[str]:
    """What is wrong with the imports of one file."""
    own = source.room
    allowed = NARROW.get(own)
    wrong = []
    for room in sorted(source.rooms() - {own}):
        is_lower = FLOORS[room] < FLOORS[own] or FLOORS[room] == FLOORS[own] == 0
        if not is_lower or (allowed is not None and room not in allowed):
            wrong.append(f"{source.path} (floor {FLOORS[own]}) imports {room or 'the lobby'}")
    uses = source.imported() | source.called()
    starts = {call for call in PROCESS_CALLS if any(_is_or_in(use, call) for use in uses)}
    if starts and own not in PROCESS_STARTERS:
        wrong.append(f"{source.path} starts processes: {', '.join(sorted(starts))}")
    has_signals = any(_is_or_in(use, "signal") for use in source.imported())
    if has_signals and source.path not in SIGNAL_OWNERS:
        wrong.append(f"{source.path} takes signals: only {', '.join(sorted(SIGNAL_OWNERS))} do")
    return wrong


def _is_or_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_every_file_is_visited_and_every_room_has_a_floor() -> None:
    assert len(SOURCES) >= 20
    rooms = {source.room for source in SOURCES} | {"_core"}
    assert rooms <= set(FLOORS), "a new room needs a floor"
    assert set(FLOORS) <= rooms, "a room that is gone needs none"
    assert (ROOT / "_core.pyi").is_file()


def test_files_import_from_lower_floors_only() -> None:
    imports = sum(len(source.rooms()) for source in SOURCES)
    assert imports >= 30, "the scan must see the imports that it judges"
    wrong = [fault for source in SOURCES for fault in faults(source)]
    assert not wrong, "\n".join(wrong)


def test_lobbies_hold_no_logic() -> None:
    lobbies = [source for source in SOURCES if source.path.endswith("__init__.py")]
    assert len(lobbies) >= 4
    for lobby in lobbies:
        assert ast.get_docstring(lobby.tree), lobby.path
        for node in lobby.tree.body[1:]:
            assert is_for_a_lobby(node), (lobby.path, ast.unparse(node))


def is_for_a_lobby(node: ast.stmt) -> bool:
    """Imports, names, and the table of names that are imported later."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__dir__", "__getattr__")
    if isinstance(node, ast.If):
        is_for_types = ast.unparse(node.test) == "TYPE_CHECKING"
        return is_for_types and all(is_for_a_lobby(inner) for inner in node.body)
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("errors.py", "from kvflash.transport import ZmqReceiver", "imports transport"),
        ("transport/zmq.py", "from kvflash.frontend.args import parse_args", "imports frontend"),
        ("transport/zmq.py", "import kvflash.indexer.app", "imports indexer"),
        ("transport/zmq.py", "from ..process import Service", "imports process"),
        ("state/replica.py", "from kvflash.process import FedService", "imports process"),
        ("frontend/app.py", "from kvflash.indexer.app import main", "imports indexer"),
        ("indexer/app.py", "from kvflash import frontend", "imports frontend"),
        ("mocker/app.py", "from kvflash.process import start_logging", "imports process"),
        ("config.py", "from kvflash import RadixTree", "imports the lobby"),
        ("frontend/app.py", "import subprocess", "starts processes: subprocess"),
        ("mocker/engine.py", "import os\nos.fork()", "starts processes: os.fork"),
        ("indexer/app.py", "import signal", "takes signals"),
        ("runtime/tcp.py", "from kvflash._core import Catalog", "imports _core"),
        ("runtime/tcp.py", "from kvflash.llm import ModelType", "imports llm"),
        ("discovery/etcd.py", "from kvflash.runtime import Client", "imports runtime"),
    ],
)
def test_the_scan_finds_what_it_is_for(path: str, text: str, wanted: str) -> None:
    assert wanted in "\n".join(faults(parse(path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("frontend/app.py", "from kvflash.process import run_until_stopped"),
        ("frontend/app.py", "from .args import parse_args"),
        ("mocker/api.py", "from kvflash.mocker import metrics"),
        ("launcher/child.py", "import subprocess\nimport signal"),
        ("process.py", "import signal\nfrom kvflash._core import Catalog"),
    ],
)
def test_the_scan_lets_pass_what_is_right(path: str, text: str) -> None:
    assert faults(parse(path, text)) == []
