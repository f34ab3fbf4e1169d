"""Flags of the demo."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["DemoArgs", "parse_args"]

T = TypeVar("T", int, float)

# Values of --quick instead of the defaults: enough to see the effect, in a few seconds.
_QUICK = {"applications": 6, "conversations": 18, "turns": 3, "speedup_ratio": 2.0, "seeds": 1}
_FULL = {"applications": 12, "conversations": 36, "turns": 5, "speedup_ratio": 1.0, "seeds": 3}


@dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """The demo's settings; see ``--help``."""

    workers: int
    block_size: int
    cache_blocks: int
    speedup_ratio: float
    applications: int
    conversations: int
    turns: int
    concurrency: int
    seed: int
    seeds: int
    out: Path
    no_plot: bool
    keep: bool
    quick: bool


def parse_args(argv: Sequence[str] | None = None) -> DemoArgs:
    """Parse the command line."""
    parser = ArgumentParser(
        prog="python -m demo",
        description="Send the same conversations through round-robin, kv and auto, the default "
        "policy, each with a fresh fleet of mock engines on this machine, and compare what engines "
        "could reuse.",
        allow_abbrev=False,
    )
    for name, parse, default, summary in (
        # With one engine there is no choice.
        ("workers", _within(int, 2, 64), 4, "mock engines (default: 4)"),
        ("block-size", _within(int, 1, 1_024), 16, "tokens in a KV block (default: 16)"),
        (
            "cache-blocks",
            _within(int, 1, 10**7),
            None,
            "KV blocks of one engine (default: room for 48,000 tokens)",
        ),
        (
            "speedup-ratio",
            _within(float, 0.01, 1_000),
            None,
            "modelled time of the engines / real time (default: 1, with --quick 2)",
        ),
        (
            "applications",
            _within(int, 1, 10_000),
            None,
            "different system prompts (default: 12, with --quick 6)",
        ),
        (
            "conversations",
            _within(int, 1, 10_000),
            None,
            "conversations of all applications (default: 36, with --quick 18)",
        ),
        (
            "turns",
            _within(int, 1, 10_000),
            None,
            "requests in a conversation (default: 5, with --quick 3)",
        ),
        (
            "concurrency",
            _within(int, 1, 1_000),
            16,
            "users at a time; each waits for an answer before the next turn (default: 16)",
        ),
        ("seed", _within(int, 0, 2**32), 1, "seed of the first workload (default: 1)"),
        (
            "seeds",
            _within(int, 1, 100),
            None,
            "workloads, each with cold engines (default: 3, with --quick 1)",
        ),
        ("out", Path, Path("demo-out"), "folder for results, plots and logs (default: demo-out)"),
    ):
        parser.add_argument(f"--{name}", type=parse, default=default, help=summary)
    for name, summary in (
        ("no-plot", "draw nothing; matplotlib is then not needed"),
        ("keep", "leave the auto fleet running for your own requests, until Ctrl-C"),
        ("quick", "a few seconds of it: smaller workload, faster engines"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=summary)
    values = vars(parser.parse_args(argv))
    for name, value in (_QUICK if values["quick"] else _FULL).items():
        if values[name] is None:
            values[name] = value
    if values["cache_blocks"] is None:
        values["cache_blocks"] = max(1, 48_000 // values["block_size"])
    return DemoArgs(**values)


def _within(kind: Callable[[str], T], low: float, high: float) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value = kind(text)
        if not low <= value <= high:
            raise ArgumentTypeError(f"must be between {low:,} and {high:,}, got {text}")
        return value

    parse.__name__ = getattr(kind, "__name__", "value")
    return parse
