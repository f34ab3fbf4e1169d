"""Block indexes of routers, side by side: ``python benches/peers/index.py [--trials N] [--quick]``.

KVFLASH_TRACE names a trace in Mooncake's form; without it a generated one is replayed. Prints one
Markdown table per load: every figure is the median of trials in fresh processes that take turns,
the last two columns say how many times better ours is than the best of each other router's. A whole
run (not a quick one) is written down in ``benches/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))
from results import Section

from replay import Harness, Rows, build

OURS = "kvflash"
DYNAMO = ["dynamo-crtc-1", "dynamo-crtc-2", "dynamo-positional-1", "dynamo-positional-2"]
SMG = ["smg-chain"]
BACKENDS = [OURS, "plain", *DYNAMO, *SMG]

# Mode, figure, whether more is better.
EVENTS = [
    ("events", "million_blocks_per_s", True),
    ("events", "million_events_per_s", True),
    ("events", "cpu_ns_per_event", False),
    ("removals", "million_blocks_per_s", True),
]
READS = [
    ("reads", "native_ns", False),
    ("reads", "map_ns", False),
    ("reads", "native_p50_ns", False),
    ("reads", "native_p99_ns", False),
]
BESIDE = [
    (mode, figure, False)
    for mode in ("beside_full", "beside_paced")
    for figure in ("native_p50_ns", "native_p99_ns", "map_p50_ns", "map_p99_ns")
]
BYTES = [
    ("bytes", "bytes_per_membership", False),
    ("bytes", "bytes_per_membership_end", False),
    ("bytes", "swept_bytes_per_membership", False),
    ("bytes", "mb_peak", False),
    ("bytes", "mb_after_removal", False),
]
MADE_UP = [
    ("appends", "million_events_per_s", True),
    ("matched", "native_ns", False),
    ("matched", "map_ns", False),
    ("visible", "visible_p50_us", False),
    ("visible", "visible_p99_us", False),
    ("sharer", "bytes_per_block_2_to_16", False),
    ("clear", "clear_median_us", False),
    ("growth", "million_blocks_per_s", True),
    ("growth", "call_p999_us", False),
]
# Engines that name blocks each in its own way: only whether the answers are right.
CHECK = [("check", figure, False) for figure in ("wrong_queries", "over_depths", "under_depths")]

Line = tuple[str, str, bool]


def shown(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def advantage(row: dict[str, float], more_is_better: bool, others: list[str]) -> str:
    """How many times better ours is than the best of `others`."""
    known = [row[other] for other in others if other in row]
    if not known or OURS not in row:
        return "-"
    best = max(known) if more_is_better else min(known)
    better, worse = (row[OURS], best) if more_is_better else (best, row[OURS])
    return f"{better / worse:.2f}x" if worse else "-"


def table(title: str, lines: list[Line], measured: dict[str, Rows]) -> str:
    rows = [
        f"\n#### {title}\n",
        f"| | {' | '.join(BACKENDS)} | beside Dynamo | beside SMG |",
        "|---" * (len(BACKENDS) + 3) + "|",
    ]
    for mode, figure, more_is_better in lines:
        row = {
            backend: figures[figure]
            for backend, figures in measured[mode].items()
            if figure in figures
        }
        if figure.startswith("swept_"):
            # Who does not put cleaning off is always swept.
            plain = figure.removeprefix("swept_")
            row = {name: figures[plain] for name, figures in measured[mode].items()} | row
        cells = [shown(row.get(backend)) for backend in BACKENDS]
        ratios = [advantage(row, more_is_better, others) for others in (DYNAMO, SMG)]
        rows.append(f"| {mode}: {figure} | {' | '.join(cells + ratios)} |")
    text = "\n".join(rows) + "\n"
    print(text, flush=True)
    return text


def measure(
    harness: Harness, lines: list[Line], corpus: Path | None, options: argparse.Namespace
) -> dict[str, Rows]:
    blocks = 2_000_000 if options.quick else 10_000_000
    modes = list(dict.fromkeys(mode for mode, _, _ in lines))
    once = ("bytes", "sharer", "check", "clear", "growth")
    return {
        mode: harness.compare(
            BACKENDS, mode, corpus, trials=1 if mode in once else options.trials, blocks=blocks
        )
        for mode in modes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one corpus, smaller large loads")
    options = parser.parse_args()
    section = None if options.quick else Section("index")
    trace = os.environ.get("KVFLASH_TRACE")
    harness = Harness(build(Path(__file__).parent / "index", "replay-peers"))
    loads = [({"workers": 16}, EVENTS + READS + BESIDE + BYTES)]
    if not options.quick:
        loads += [
            ({"workers": 16, "capacity": 4_096}, EVENTS + READS + BYTES),
            ({"workers": 16, "factor": 4}, EVENTS + READS + BESIDE + BYTES),
            ({"workers": 128, "factor": 4}, EVENTS + READS + BYTES),
        ]
    tables = []
    for recipe, lines in loads:
        title = ", ".join(f"{name} {value}" for name, value in recipe.items())
        corpus = harness.corpus(trace, **recipe)
        tables.append(table(f"Trace: {title}", lines, measure(harness, lines, corpus, options)))
    tables.append(table("Made-up loads", MADE_UP, measure(harness, MADE_UP, None, options)))
    corpus = harness.corpus(trace, workers=16, names="differ")
    measured = measure(harness, CHECK, corpus, options)
    tables.append(table("Engines that name blocks differently", CHECK, measured))
    if section is not None:
        source = "a recorded trace" if trace else "a generated trace"
        section.write(f"Replayed: {source}; {options.trials} trials.\n" + "".join(tables))


if __name__ == "__main__":
    main()
