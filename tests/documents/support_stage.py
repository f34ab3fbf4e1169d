"""A place where what a document shows is run: real processes in a discovery of their own."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from support_markdown import Block

from ports import free_ports
from service import DEADLINE_S, Http, Process, until

TINY_LLAMA = Path(__file__).parents[1] / "vectors" / "tiny-llama"
FAKE_ENGINE = Path(__file__).parents[1] / "support" / "fake_engine.py"
# Ports that documents name, in the rows that services count up in.
PORTS = ((8000, 4), (8090, 4), (8100, 3), (5557, 3), (5657, 3))
SERVICES = ("frontend", "indexer", "mocker", "vllm", "sglang")
SCRIPT_S_MAX = 60.0


@dataclass(frozen=True)
class Ran:
    """The result of a command or script."""

    command: str
    output: str
    errors: str

    @property
    def json(self) -> Any:
        return json.loads(self.output)


class Stage:
    """Discovery, ports and processes of one test.

    Args:
        folder: For what it writes.

    Attributes:
        processes: Services that were started, with their first ready lines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = {
            name + at: port for name, count in PORTS for at, port in enumerate(free_ports(count))
        }
        programs = folder / "bin"
        programs.mkdir()
        _engines(programs)
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        self.env = {
            "KVFLASH_DISCOVERY_DIR": str(folder / "discovery"),
            "KVFLASH_HOST": "127.0.0.1",
            "KVFLASH_PORT": str(self.port(8000)),
            "CURL_HOME": str(folder),
            "PATH": os.pathsep.join(
                [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": str(programs),
        }
        self.processes: list[tuple[Process, dict[str, Any]]] = []
        self._clients: list[Http] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.close()
        # A launcher that is killed takes its engine along.
        for process, _ in reversed(self.processes):
            process.close()

    def port(self, printed: int) -> int:
        """The free port that stands for a printed one."""
        return self._ports[printed]

    def http(self, printed_port: int = 8000) -> Http:
        """A client of the service at a printed port."""
        self._clients.append(Http(f"http://127.0.0.1:{self.port(printed_port)}"))
        return self._clients[-1]

    def localized(self, text: str, replaced: Mapping[str, str] | None = None) -> str:
        """The text with free ports, and what else a reader has to fill in."""
        for old, new in (replaced or {}).items():
            assert old in text, f"{old!r} is no longer in: {text}"
            text = text.replace(old, new)
        return re.sub(
            r"(?<![\d.])\d{4}(?!\d)", lambda m: str(self._ports.get(int(m[0]), m[0])), text
        )

    # -- processes

    def start(
        self, module: str, *args: str, workers: int = 1, env: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Start a service; its ready lines."""
        process = Process(module, *args, env={**self.env, **(env or {})})
        self.processes.append((process, {}))
        lines = [process.ready() for _ in range(workers)]
        self.processes[-1] = (process, lines[0])
        return lines

    def mocker(
        self, endpoint: str, *args: str, model: str, workers: int = 2
    ) -> list[dict[str, Any]]:
        """Runtime workers at an endpoint, which answer at once; their ready lines."""
        return self.start(
            "kvflash.mocker", "--endpoint", endpoint, "--model-name", model, "--speedup-ratio",
            "1000", "--block-size", "16", "--tokenizer", str(TINY_LLAMA), "--num-workers",
            str(workers), *args, workers=workers,
        )  # fmt: skip

    def frontend(self, *args: str) -> Http:
        """A frontend at the port that stands for 8000."""
        self.start("kvflash.frontend", "--host", "127.0.0.1", *args)
        return self.http()

    def wait_workers(self, count: int, http: Http | None = None) -> None:
        """Wait until a frontend has so many healthy workers, and listens to those with events."""
        client = http or self.http()

        def are_there() -> bool:
            workers = client.get("/workers")
            return sum(
                worker["healthy"] and all(one["status"] == "active" for one in worker["listeners"])
                for worker in workers
            ) >= count  # fmt: skip

        until(are_there, f"{count} healthy workers")

    # -- blocks

    def console(self, text: str) -> list[Ran]:
        """Run the commands of a block: services stay, everything else has to succeed."""
        done = []
        for command in commands(text):
            words = shlex.split(command.replace("\\\n", " "), comments=True)
            through: list[str] = []
            if words[:2] == ["python", "-m"]:
                package, _, module = words[2].partition(".")
                assert package in ("kvflash", "dynamo"), words
                # Another project's name for a command.
                through = ["-m", words[2]] if package == "dynamo" else []
                words = ["kvflash", module, *words[3:]]
            env = {}
            while words and (set_here := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", words[0])):
                env[set_here[1]] = set_here[2]
                words = words[1:]
            name = words[1] if words[0] == "kvflash" and len(words) > 1 else ""
            if words[:2] == ["vllm", "serve"]:
                lines = self.start(str(FAKE_ENGINE), *words[1:], env=env)
                done.append(Ran(command, json.dumps(lines), ""))
            elif name in SERVICES:
                at = words.index("--num-workers") + 1 if "--num-workers" in words else 0
                count = int(words[at]) if at else 1
                module = "kvflash.compat.dynamo" if through else f"kvflash.{name}"
                lines = self.start(module, *through, *words[2:], workers=count, env=env)
                while name in ("vllm", "sglang") and lines[0].get("engine") != name:
                    # The engine's double has a ready line of its own.
                    lines = [self.processes[-1][0].ready()]
                done.append(Ran(command, json.dumps(lines), ""))
            else:
                done.append(self._run(["bash", "-c", command], command))
        return done

    def script(self, text: str, name: str = "script.py", through: str = "") -> Ran:
        """Run a whole Python program to its end, with a module that runs programs if named."""
        path = self.folder / name
        path.write_text(text)
        return self._run([sys.executable, *(["-m", through] if through else []), str(path)], name)

    def _run(self, words: list[str], name: str) -> Ran:
        ran = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True,
            timeout=SCRIPT_S_MAX, check=False, cwd=self.folder,
        )  # fmt: skip
        assert ran.returncode == 0, f"{name}: status {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        assert "Traceback" not in ran.stderr, f"{name}:\n{ran.stderr}"
        return Ran(name, ran.stdout, ran.stderr)

    def serve(self, text: str, name: str, *args: str, through: str = "") -> Process:
        """Run a Python program that serves until the test ends; see :meth:`script`."""
        path = self.folder / f"{name}.py"
        path.write_text(text)
        words = [*([through] if through else []), str(path), *args]
        self.processes.append((Process(*words, env=self.env), {}))
        return self.processes[-1][0]


async def run_fragment(block: Block, names: dict[str, Any], text: str | None = None) -> None:
    """Run lines of Python, with await at top level, in a namespace that keeps what they leave."""
    code = "\n" * (block.line - 1) + (block.text if text is None else text)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compiled = compile(code, str(block.path), "exec", flags=flags, dont_inherit=True)
    running = eval(compiled, names)  # The document is what is tested.
    if running is not None:
        await asyncio.wait_for(running, SCRIPT_S_MAX)


def commands(text: str) -> list[str]:
    """The commands of a shell block: joined over open quotes and escaped line ends."""
    found, open_lines = [], ""
    for line in text.splitlines():
        open_lines += line + "\n"
        try:
            words = shlex.split(open_lines, comments=True)
        except ValueError:
            continue
        if line.rstrip().endswith("\\"):
            continue
        if words:
            found.append(open_lines)
        open_lines = ""
    assert not open_lines.strip(), f"a command without an end: {open_lines}"
    return found


def _engines(folder: Path) -> None:
    """Doubles of the engines, found where the real ones would be."""
    vllm = folder / "vllm"
    vllm.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE_ENGINE))} "$@"\n'
    )
    vllm.chmod(0o755)
    # The command of this source tree, be the package installed with it or not.
    command = folder / "kvflash"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvflash "$@"\n')
    command.chmod(0o755)
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(
        f"import runpy\n\nrunpy.run_path({str(FAKE_ENGINE)!r}, run_name='__main__')\n"
    )


def items(stream: Iterable[Any]) -> list[int]:
    """The tokens of an answer's items."""
    return [token for item in stream for token in item["token_ids"]]


__all__ = ["DEADLINE_S", "TINY_LLAMA", "Ran", "Stage", "commands", "items", "run_fragment"]
