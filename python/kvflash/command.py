"""The command ``kvflash``: dispatches to the named command, and imports nothing else."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kvflash.output import ended

#: Every command with a one-line summary; ``kvflash X`` is ``python -m kvflash.X``.
COMMANDS = {
    "frontend": "Route and forward requests: an OpenAI-compatible HTTP server",
    "router": "Choose a worker for each request, for gateways that forward requests themselves",
    "indexer": "Answer queries about how much of a prompt each worker has cached",
    "mocker": "Run mock engines without a model or a GPU",
    "vllm": "Start vLLM with KV events on, and register it",
    "sglang": "Start SGLang with KV events on, and register it",
    "workers": "List, drain and resume the workers of a running service",
    "explain": "Show which worker would get a prompt, or got a past request, and why",
    "replay": "Send a recorded trace of prompts, and measure cache reuse and latency",
    "keys": "Add, list or remove the keys of a service",
    "doctor": "Check running services and engines, and show how to fix problems",
}

_HELP = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 for bad usage, 1 for failures."""
    return ended(lambda: _run(list(sys.argv[1:] if argv is None else argv) or ["--help"]))


def _run(words: list[str]) -> int:
    name, *words = words
    if name in _HELP and words and words[0] in COMMANDS:
        name, words = words[0], ["--help"]
    if name in _HELP:
        print(_overview(), end="")
        return 0
    if name == "--version":
        from kvflash.version import __version__  # noqa: PLC0415

        print(f"kvflash {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"kvflash: error: {_unknown(name)} (see kvflash --help)", file=sys.stderr)
        return 2
    return main_of(name)(words)


def main_of(name: str) -> Callable[[Sequence[str]], int]:
    """The function that runs a command; a command of several files has it in __main__.py."""
    module: Any = import_module(f"kvflash.{name}")
    if not hasattr(module, "main"):
        module = import_module(f"kvflash.{name}.__main__")
    return module.main  # type: ignore[no-any-return]


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "".join(f"  {name:<{width}}  {line}\n" for name, line in COMMANDS.items())
    return (
        "usage: kvflash COMMAND [--flag VALUE ...]\n\n"
        "A KV-cache-aware router for LLM engines.\n\n"
        f"Commands:\n{lines}\n"
        "kvflash COMMAND --help lists the flags of a command; kvflash --version prints the "
        "version.\n"
    )


def _unknown(name: str) -> str:
    from kvflash.spelling import did_you_mean  # noqa: PLC0415

    if name.startswith("-"):
        return f"a command comes before flags, got {name!r}"
    return f"unknown command {name!r}{did_you_mean(name, COMMANDS)}"
