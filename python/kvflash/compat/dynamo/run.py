"""Runs a script, or a module that imports Dynamo, in this process."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kvflash import command
from kvflash.compat.dynamo.flags import translate
from kvflash.errors import ConfigError

_USAGE = """\
usage: python -m kvflash.compat.dynamo SCRIPT [ARG ...]
       python -m kvflash.compat.dynamo -m dynamo.COMMAND [--flag VALUE ...]

Run a Python script that imports dynamo.llm, dynamo.runtime or dynamo._core, with kvflash's
classes under these names; or run dynamo.COMMAND as kvflash COMMAND.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns its exit status, or 2 for bad usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    _choose_event_plane()
    if words[0] == "-m":
        return _run_command(words[1:])
    script = Path(words[0])
    if not script.is_file():
        return _refuse(f"SCRIPT must be a Python file, and {words[0]} is not there")
    # Imported here, so that the command does not load what only scripts need.
    from kvflash.compat.dynamo.modules import install  # noqa: PLC0415

    install()
    sys.argv[:] = words
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _run_command(words: Sequence[str]) -> int:
    package, _, name = (words[0] if words else "").partition(".")
    if package != "dynamo" or name not in command.COMMANDS:
        known = ", ".join(f"dynamo.{name}" for name in command.COMMANDS)
        return _refuse(f"-m takes one of {known}; got {' '.join(words[:1]) or 'nothing'}")
    if name in ("frontend", "router"):
        # Dynamo's routers log each worker's cost, too.
        os.environ.setdefault("KVFLASH_LOG_DECISIONS", "1")
    try:
        return command.main([name, *translate(name, words[1:])])
    except ConfigError as error:
        return _refuse(f"dynamo.{name}: {error}")


def _choose_event_plane() -> None:
    """As in Dynamo, events go over NATS where its server is named; another choice stays."""
    if os.environ.get("NATS_SERVER") and not os.environ.get("DYN_EVENT_PLANE"):
        os.environ.setdefault("KVFLASH_EVENT_PLANE", "nats")


def _refuse(problem: str) -> int:
    print(f"python -m kvflash.compat.dynamo: error: {problem}", file=sys.stderr)
    return 2
