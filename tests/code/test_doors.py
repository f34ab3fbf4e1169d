"""The table of doors of the Python side: who may import whom, and who may start things.

Read with ``ast``, nothing is imported. Before anything is judged it is asserted how much was
looked at.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "kvflash"
ROOT = Path(__file__).parents[2] / "python" / PACKAGE

MAP = (ROOT.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The cells of the table of ARCHITECTURE.md that begins with this cell."""
    _, found, text = MAP.partition(f"| {title} |")
    assert found, f"ARCHITECTURE.md must have a table that begins with {title!r}"
    lines = text.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rooms_of(cell: str) -> list[str]:
    """A cell's rooms; the lobby is kvflash/__init__.py."""
    return [name.removeprefix("the lobby") for name in cell.split(", ")]


# A room is a file or folder right below the package. It imports from lower floors only; rooms of
# one floor never see each other (but for floor 0).
FLOORS = {room: int(floor) for floor, cell in rows("floor") for room in rooms_of(cell)}
# Allowed imports of rooms whose floor would allow more.
NARROW = {room: set(rooms_of(allowed)) for cell, allowed in rows("room") for room in rooms_of(cell)}

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
SIGNAL_OWNERS = {
    "process.py",
    "launcher/child.py",
    "mocker/app.py",
    "runtime/signals.py",
    "signals.py",
}


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


@functools.cache
def sources() -> list[Source]:
    paths = sorted(ROOT.rglob("*.py"))
    return [parse(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in paths]


def faults(source: Source) -> list[str]:
    """Wrong imports of one file."""
    own = source.room
    allowed = NARROW.get(own)
    wrong = []
    # Every lobby may have the table of names that are imported later.
    free = {own, "lazy"} if source.path.endswith("__init__.py") else {own}
    for room in sorted(source.rooms() - free):
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
    assert len(sources()) >= 20
    rooms = {source.room for source in sources()} | {"_core"}
    assert rooms <= set(FLOORS), "a new room needs a floor"
    assert set(FLOORS) <= rooms, "a room that is gone needs none"
    assert (ROOT / "_core.pyi").is_file()


def test_the_map_is_a_page_and_names_who_starts_processes_and_takes_signals() -> None:
    assert len(MAP.splitlines()) <= 80
    assert len(FLOORS) > 40
    assert len(NARROW) >= 8
    assert set(NARROW) <= set(FLOORS)
    assert set().union(*NARROW.values()) <= set(FLOORS)
    assert f"Only {' and '.join(sorted(PROCESS_STARTERS))} start processes" in MAP
    assert f"only {', '.join(f'`{path}`' for path in sorted(SIGNAL_OWNERS))} take signals" in MAP


def test_files_import_from_lower_floors_only() -> None:
    imports = sum(len(source.rooms()) for source in sources())
    assert imports >= 30, "the scan must see the imports that it judges"
    wrong = [fault for source in sources() for fault in faults(source)]
    assert not wrong, "\n".join(wrong)


def test_lobbies_hold_no_logic() -> None:
    lobbies = [source for source in sources() if source.path.endswith("__init__.py")]
    assert len(lobbies) >= 4
    for lobby in lobbies:
        assert ast.get_docstring(lobby.tree), lobby.path
        for node in lobby.tree.body[1:]:
            assert is_for_a_lobby(node), (lobby.path, ast.unparse(node))


def is_for_a_lobby(node: ast.stmt) -> bool:
    """Imports, names, and the table of names that are imported later."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "(__getattr__, __dir__)")
    if isinstance(node, ast.If):
        is_for_types = ast.unparse(node.test) == "TYPE_CHECKING"
        return is_for_types and all(map(is_for_a_lobby, (*node.body, *node.orelse)))
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("errors.py", "from kvflash.transport.zmq import ZmqReceiver", "imports transport"),
        ("transport/zmq.py", "from kvflash.frontend.args import parse_args", "imports frontend"),
        ("transport/zmq.py", "import kvflash.indexer.args", "imports indexer"),
        ("transport/zmq.py", "from ..process import Service", "imports process"),
        ("state/replica.py", "from kvflash.process import FedService", "imports process"),
        ("frontend/app.py", "from kvflash.indexer.args import main", "imports indexer"),
        ("indexer/app.py", "from kvflash import frontend", "imports frontend"),
        ("mocker/app.py", "from kvflash.process import start_logging", "imports process"),
        ("config.py", "from kvflash import RadixTree", "imports the lobby"),
        ("frontend/app.py", "import subprocess", "starts processes: subprocess"),
        ("mocker/engine.py", "import os\nos.fork()", "starts processes: os.fork"),
        ("indexer/app.py", "import signal", "takes signals"),
        ("runtime/tcp.py", "from kvflash._core import Catalog", "imports _core"),
        ("runtime/tcp.py", "from kvflash.llm import ModelType", "imports llm"),
        ("discovery/etcd.py", "from kvflash.runtime import Client", "imports runtime"),
        ("discovery/base.py", "from kvflash.lazy import lazy_names", "imports lazy"),
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
        ("discovery/__init__.py", "from kvflash.lazy import lazy_names"),
        ("launcher/child.py", "import subprocess\nimport signal"),
        ("process.py", "import signal\nfrom kvflash._core import Catalog"),
    ],
)
def test_the_scan_lets_pass_what_is_right(path: str, text: str) -> None:
    assert faults(parse(path, text)) == []
