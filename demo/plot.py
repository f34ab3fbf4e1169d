"""Figures to PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from demo.record import ArmRun
from demo.report import MODES, REUSE_WINDOW_REQUESTS, reuse_over_time
from kvflash.percentile import percentile

__all__ = ["draw"]

# Distinguishable for everyone, also in print: by colour and line style.
STYLES = {"round-robin": ("#b35806", "--"), "kv": ("#2166ac", ":"), "auto": ("#1a7837", "-")}


def draw(runs: Sequence[ArmRun], folder: Path, *, caption: str) -> tuple[Path, ...]:
    """Draw time to first token and reuse over time.

    Times of all seeds of a mode are one line; each seed's reuse is a separate line.

    Args:
        runs: Runs of all modes and seeds.
        folder: Folder of the files.
        caption: The measured system.

    Returns:
        Paths of the files.
    """
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        for mode in MODES:
            of_mode = [run for run in runs if run.mode == mode]
            _draw_ttft(left, mode, of_mode)
            _draw_reuse(right, mode, of_mode)
        _finish_ttft(left)
        _finish_reuse(right)
        figure.suptitle("kvflash demo: same requests, three ways to choose a worker")
        figure.supxlabel(caption, fontsize=9, color="#444444")
        paths = (folder / "demo.png", folder / "demo.svg")
        for path in paths:
            figure.savefig(path, dpi=150)
        plt.close(figure)
    return paths


def _draw_ttft(axes: Axes, mode: str, runs: Sequence[ArmRun]) -> None:
    samples = sorted(r.ttft_ms for run in runs for r in run.records if r.ttft_ms is not None)
    median = percentile(samples, 50)
    if median is None:
        return
    color, style = STYLES[mode]
    shares = [100 * (rank + 1) / len(samples) for rank in range(len(samples))]
    label = f"{mode} (median of all seeds {median:,.0f} ms)"
    axes.step(samples, shares, where="post", color=color, linestyle=style, linewidth=2, label=label)
    axes.plot(median, 50, "o", color=color)


def _finish_ttft(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("Time to first token")
    axes.set_xlabel("time to first token (ms, log scale)")
    axes.set_ylabel("requests at or below (%)")
    axes.set_ylim(0, 101)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower right", frameon=False)


def _draw_reuse(axes: Axes, mode: str, runs: Sequence[ArmRun]) -> None:
    color, style = STYLES[mode]
    for run in runs:
        times_s, percents = reuse_over_time(run.records)
        label = mode if run is runs[0] else None
        axes.plot(times_s, percents, color=color, linestyle=style, linewidth=1.5, label=label)


def _finish_reuse(axes: Axes) -> None:
    axes.set_title("Prompt tokens that the engines reused")
    axes.set_xlabel("time since the first request (s)")
    axes.set_ylabel(f"reused (%), last {REUSE_WINDOW_REQUESTS} answers")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
