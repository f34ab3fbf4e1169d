"""Flags of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvflash.config import bounded_float, bounded_int
from kvflash.flags import Flags

__all__ = ["DemoArgs", "parse_args"]

# What --quick runs instead of the defaults: enough to see the effect, in a few seconds.
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
    """Parse the command line and the environment."""
    flags = Flags(
        "demo",
        "Send the same conversations through round-robin, kv and auto, the default policy, each "
        "with a fresh fleet of mock engines on this machine, and compare what engines could reuse.",
    )
    # With one engine there is nothing to choose.
    flags.add("--workers", parse=bounded_int(2, 64), default=4, summary="Mock engines")
    flags.add(
        "--block-size", parse=bounded_int(1, 1_024), default=16, summary="Tokens in a KV block"
    )
    flags.add(
        "--cache-blocks",
        parse=bounded_int(1, 10**7),
        default=None,
        summary="KV blocks of one engine (default: room for 48,000 tokens)",
    )
    flags.add(
        "--speedup-ratio",
        parse=bounded_float(0.01, 1_000),
        default=None,
        summary="Modelled time of the engines / real time (default: 1, with --quick 2)",
    )
    for name, summary in (
        ("applications", "Different system prompts (default: 12, with --quick 6)"),
        ("conversations", "Conversations of all applications (default: 36, with --quick 18)"),
        ("turns", "Requests in a conversation (default: 5, with --quick 3)"),
    ):
        flags.add(f"--{name}", parse=bounded_int(1, 10_000), default=None, summary=summary)
    flags.add(
        "--concurrency",
        parse=bounded_int(1, 1_000),
        default=16,
        summary="Users at a time; each waits for an answer before the next turn",
    )
    flags.add(
        "--seed", parse=bounded_int(0, 2**32), default=1, summary="Seed of the first workload"
    )
    flags.add(
        "--seeds",
        parse=bounded_int(1, 100),
        default=None,
        summary="Workloads, each with cold engines (default: 3, with --quick 1)",
    )
    flags.add(
        "--out",
        parse=Path,
        default=Path("demo-out"),
        metavar="FOLDER",
        summary="Where results, plots and the processes' logs go",
    )
    for name, dest, summary in (
        ("--no-plot", "no_plot", "Draw nothing; matplotlib is then not needed"),
        ("--keep", "keep", "Leave the auto fleet running for your own requests, until Ctrl-C"),
        ("--quick", "quick", "A few seconds of it: smaller workload, faster engines"),
    ):
        flags.add_switch(name, dest=dest, value=True, summary=summary)
    values = vars(flags.parse(argv))
    for name, value in (_QUICK if values["quick"] else _FULL).items():
        if values[name] is None:
            values[name] = value
    if values["cache_blocks"] is None:
        values["cache_blocks"] = max(1, 48_000 // values["block_size"])
    return DemoArgs(**values)
