"""Combines the figures of all seeds to means, a table and a verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from demo.record import ArmRun
from demo.report import AUTO, BASELINE, MODES, ArmFigures, figures

__all__ = [
    "HEADLINES",
    "Headline",
    "ModeFigures",
    "Spread",
    "Verdict",
    "judge",
    "markdown",
    "notes",
    "summarize",
    "to_json",
]


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds.

    Attributes:
        mean: Mean over the seeds.
        off: Distance of the farthest seed from the mean; None for one seed.
    """

    mean: float
    off: float | None

    def text(self, digits: int = 0) -> str:
        """``mean ± off``, each with ``digits`` decimal places."""
        mean = f"{self.mean:,.{digits}f}"
        return mean if self.off is None else f"{mean} ± {self.off:,.{digits}f}"


@dataclass(frozen=True)
class ModeFigures:
    """Figures of one mode, seed by seed.

    Attributes:
        mode: The router mode.
        by_seed: Figures of each seed, in the order of the seeds; at least one.
    """

    mode: str
    by_seed: tuple[ArmFigures, ...]

    def over_seeds(self, figure: Callable[[ArmFigures], float | None]) -> Spread | None:
        """Mean and spread of a figure; None where a seed lacks it."""
        values = [value for one in self.by_seed if (value := figure(one)) is not None]
        if len(values) < len(self.by_seed):
            return None
        mean = sum(values) / len(values)
        off = max(abs(value - mean) for value in values) if len(values) > 1 else None
        return Spread(mean, off)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A column of the short table.

    Attributes:
        title: Its title, with the unit.
        figure: The figure of a run.
        digits: Decimal places.
        is_more_better: Whether the highest mean is best.
    """

    title: str
    figure: Callable[[ArmFigures], float | None]
    digits: int = 0
    is_more_better: bool = False


# The verdict uses the first one.
HEADLINES = (
    Headline(
        title="prompt tokens reused (%)",
        figure=lambda one: one.reuse_percent,
        digits=1,
        is_more_better=True,
    ),
    Headline(title="time to first token p50 (ms)", figure=lambda one: one.ttft_ms_p50),
    Headline(title="time to first token p99 (ms)", figure=lambda one: one.ttft_ms_p99),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion from the figures.

    Attributes:
        is_good: No request failed, all modes got the same requests, and auto reused more than
            round-robin.
        sentences: The reasons.
    """

    is_good: bool
    sentences: tuple[str, ...]


def summarize(runs: Sequence[ArmRun]) -> dict[str, ModeFigures]:
    """The figures of each mode, in the order of the table."""
    columns = [figures(run) for run in sorted(runs, key=lambda run: run.seed)]
    by_mode = {mode: tuple(one for one in columns if one.mode == mode) for mode in MODES}
    return {mode: ModeFigures(mode, found) for mode, found in by_mode.items() if found}


def judge(runs: Sequence[ArmRun]) -> Verdict:
    """Compare the modes, each of which ran with every seed."""
    modes = summarize(runs)
    bad = [
        f"{failures} requests failed or could not be sent in {mode}."
        for mode, found in modes.items()
        if (failures := sum(one.failures for one in found.by_seed))
    ]
    if not bad and not _are_requests_identical(runs):
        bad.append("The modes did not get the same requests; the figures don't compare.")
    before, after = modes[BASELINE], modes[AUTO]
    reused = {mode: sum(one.reused_tokens for one in modes[mode].by_seed) for mode in modes}
    if reused[AUTO] <= reused[BASELINE]:
        bad.append(
            f"auto did NOT reuse more than round-robin: {reused[AUTO]:,} against "
            f"{reused[BASELINE]:,} prompt tokens."
        )
    if bad:
        return Verdict(is_good=False, sentences=tuple(bad))
    computed = [sum(one.computed_tokens for one in found.by_seed) for found in (before, after)]
    sentences = [
        f"auto reused {_mean(after, HEADLINES[0])} % of the prompt tokens, round-robin "
        f"{_mean(before, HEADLINES[0])} %: the engines computed "
        f"{100 * (1 - computed[1] / computed[0]):.0f} % fewer of them."
    ]
    for headline in HEADLINES[1:]:
        pair = [found.over_seeds(headline.figure) for found in (before, after)]
        if pair[0] is not None and pair[1] is not None:
            sentences.append(
                f"{headline.title.capitalize()}: {pair[0].text()} -> {pair[1].text()} "
                f"({pair[0].mean / pair[1].mean:.1f}x)."
            )
    return Verdict(is_good=True, sentences=(*sentences, *_losses(modes)))


def _losses(modes: Mapping[str, ModeFigures]) -> list[str]:
    """A sentence for each headline in which auto is not the best."""
    sentences = []
    for headline in HEADLINES:
        means = {
            mode: spread.mean * (1 if headline.is_more_better else -1)
            for mode, found in modes.items()
            if (spread := found.over_seeds(headline.figure)) is not None
        }
        best = max(means, key=means.__getitem__, default=AUTO)
        if AUTO in means and means[best] > means[AUTO]:
            sentences.append(
                f"auto is not the best in {headline.title}: {best} has "
                f"{_mean(modes[best], headline)}, auto {_mean(modes[AUTO], headline)}."
            )
    return sentences


def markdown(modes: Mapping[str, ModeFigures]) -> str:
    """The short table, one row per mode, in Markdown; ends with a newline."""
    rows = [["", *(headline.title for headline in HEADLINES)], ["---"] * (1 + len(HEADLINES))]
    for mode, found in modes.items():
        rows.append([mode, *(_mean(found, headline) for headline in HEADLINES)])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows).replace("|  |", "| |")


def notes(
    *, seeds: int, shared_tokens: int, cache_tokens: int, speedup_ratio: float
) -> tuple[str, ...]:
    """The limits of the figures, for readers.

    Args:
        seeds: Workloads that every mode ran.
        shared_tokens: Tokens of all different system prompts of one workload together.
        cache_tokens: Size of one engine's cache.
        speedup_ratio: Modelled time / real time.
    """
    pace = "in real time" if speedup_ratio == 1 else f"{speedup_ratio:g} times as fast as modelled"
    spread = (
        "One seed, so no spread."
        if seeds == 1
        else f"Figures are means of {seeds} seeds; ± is the distance of the farthest one."
    )
    return (
        spread,
        "The engines are mocks: no model, no GPU. Prefill and decode times follow curves fitted to "
        f"one GPU, played {pace}; block manager, LRU eviction, events, HTTP and routing are real.",
        "The workload is of the kind that can gain: histories grow and system prompts are shared, "
        f"{shared_tokens:,} tokens of them, where one engine's cache holds {cache_tokens:,}. "
        "Prompts that share nothing gain nothing.",
        "Times are what the client saw. All modes run side by side; their engines, routers and "
        "clients share this machine's CPU. Users wait for their answers, so a faster mode also "
        "gets its requests faster.",
        "A token is a byte here. Not shown: answer quality, several frontends, a real network, "
        "failing workers, the router's own limits.",
    )


def to_json(runs: Sequence[ArmRun], verdict: Verdict, settings: Mapping[str, Any]) -> Any:
    """The machine-readable result."""
    modes = {}
    for mode, found in summarize(runs).items():
        spreads = {h.title: found.over_seeds(h.figure) for h in HEADLINES}
        modes[mode] = {
            "seeds": [asdict(one) for one in found.by_seed],
            "mean": {title: spread and asdict(spread) for title, spread in spreads.items()},
        }
    return {
        "settings": dict(settings),
        "modes": modes,
        "are_requests_identical": _are_requests_identical(runs),
        "is_good": verdict.is_good,
        "verdict": list(verdict.sentences),
    }


def _mean(found: ModeFigures, headline: Headline) -> str:
    spread = found.over_seeds(headline.figure)
    return "-" if spread is None else spread.text(headline.digits)


def _are_requests_identical(runs: Sequence[ArmRun]) -> bool:
    """Whether all modes got the same requests."""
    asked: dict[str, set[tuple[int, int, int, str]]] = {run.mode: set() for run in runs}
    for run in runs:
        asked[run.mode] |= {
            (run.seed, record.conversation, record.turn, record.request) for record in run.records
        }
    return len(set(map(frozenset, asked.values()))) == 1
