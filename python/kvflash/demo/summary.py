"""The figures of all runs to a verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvflash.demo.record import ArmRun
from kvflash.demo.report import figures

__all__ = ["Verdict", "judge", "notes", "to_json"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the figures say.

    Attributes:
        is_good: No request failed, both arms saw the same requests, and kv reused more.
        sentences: Why, or why not, plainly.
    """

    is_good: bool
    sentences: tuple[str, ...]


def judge(baseline: ArmRun, kv: ArmRun) -> Verdict:
    """Compare the two arms."""
    before, after = figures(baseline), figures(kv)
    bad: list[str] = []
    for column in (before, after):
        if column.failures:
            bad.append(f"{column.failures} requests failed or could not be sent in {column.mode}.")
    if not bad and _asked(baseline) != _asked(kv):
        bad.append("The two modes did not get the same requests; the figures don't compare.")
    if after.reused_tokens <= before.reused_tokens:
        bad.append(
            f"kv did NOT reuse more than round-robin: {after.reused_tokens:,} against "
            f"{before.reused_tokens:,} prompt tokens."
        )
    if bad:
        return Verdict(is_good=False, sentences=tuple(bad))
    less = 100 * (1 - after.computed_tokens / before.computed_tokens)
    sentences = [
        f"Same {after.requests:,} requests, {before.reuse_percent:.0f} % -> "
        f"{after.reuse_percent:.0f} % of the prompt tokens reused: the engines computed "
        f"{less:.0f} % fewer of them."
    ]
    if before.ttft_ms_p50 is not None and after.ttft_ms_p50 is not None:
        sentences.append(
            "Median time to first token "
            + _change(before.ttft_ms_p50, after.ttft_ms_p50)
            + (
                f", p99 {_change(before.ttft_ms_p99, after.ttft_ms_p99)}."
                if before.ttft_ms_p99 is not None and after.ttft_ms_p99 is not None
                else "."
            )
        )
    return Verdict(is_good=True, sentences=tuple(sentences))


def notes(*, shared_tokens: int, cache_tokens: int, speedup_ratio: float) -> tuple[str, ...]:
    """What a reader must know before they believe the figures.

    Args:
        shared_tokens: Of all different system prompts together.
        cache_tokens: Of one engine.
        speedup_ratio: Modelled time / real time.
    """
    pace = "in real time" if speedup_ratio == 1 else f"{speedup_ratio:g} times as fast as modelled"
    return (
        "The engines are mocks: no model, no GPU. Prefill and decode times follow curves fitted to "
        f"one GPU, played {pace}; block manager, LRU eviction, events, HTTP and routing are real.",
        "The workload is of the kind that can gain: histories grow and system prompts are shared, "
        f"{shared_tokens:,} tokens of them, where one engine's cache holds {cache_tokens:,}. "
        "Prompts that share nothing gain nothing.",
        "Times are what the client saw; engines, router and client share this machine's CPU. Users "
        "wait for their answers, so the faster mode also gets its requests faster. One run each.",
        "A token is a byte here. Not shown: answer quality, several frontends, a real network, "
        "failing workers, the router's own limits.",
    )


def to_json(runs: Sequence[ArmRun], verdict: Verdict, settings: Mapping[str, Any]) -> Any:
    """The machine-readable result."""
    return {
        "settings": dict(settings),
        "modes": {run.mode: asdict(figures(run)) for run in runs},
        "are_requests_identical": len({frozenset(_asked(run)) for run in runs}) == 1,
        "is_good": verdict.is_good,
        "verdict": list(verdict.sentences),
    }


def _asked(run: ArmRun) -> set[tuple[int, int, str]]:
    return {(record.conversation, record.turn, record.request) for record in run.records}


def _change(before_ms: float, after_ms: float) -> str:
    return f"{before_ms:,.0f} -> {after_ms:,.0f} ms ({before_ms / after_ms:.1f}x)"
