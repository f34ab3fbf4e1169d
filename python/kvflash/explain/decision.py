"""A decision as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvflash.table import table

#: Candidates that are printed, the cheapest ones; ``--json`` has all.
CANDIDATES_MAX = 20


def lines_of(answer: Mapping[str, Any]) -> Iterator[str]:
    """The lines of an answer of ``POST /explain`` or ``GET /why``."""
    decisions = answer.get("decisions")
    if isinstance(decisions, list):
        yield f"request {answer.get('request_id')}"
        for number, decision in enumerate(decisions, 1):
            yield ""
            if len(decisions) > 1:
                yield f"attempt {number} of {len(decisions)}"
            yield from _decision(decision)
            yield _outcome(decision)
        return
    prefill = answer.get("prefill")
    if isinstance(prefill, dict):
        yield "prefill:"
        yield from _decision(prefill)
        yield ""
        yield "decode:"
    yield from _decision(answer)


def _decision(decision: Mapping[str, Any]) -> Iterator[str]:
    model = decision.get("model") or decision.get("model_name")
    about = f"{decision.get('isl_tokens')} prompt tokens"
    if decision.get("block_size"):
        about += f" ({decision.get('request_blocks')} blocks of {decision['block_size']})"
    if decision.get("prompt_source") == "taught":
        about += ", blocks as an engine told them with an earlier answer"
    yield f"{model}: {about}, policy {decision.get('policy')}"
    worker = decision.get("worker")
    reason = str(decision.get("reason")).replace("_", " ")
    because = decision.get("because")
    yield f"worker {worker}: {reason}" + (f" ({because})" if because else "")
    if decision.get("expected_cached_tokens") is not None:
        yield f"{decision['expected_cached_tokens']} tokens are expected to come from its cache"
    yield ""
    yield from _candidates(decision.get("candidates") or [], worker)


def _candidates(candidates: Sequence[Mapping[str, Any]], chosen: Any) -> Iterator[str]:
    """A table of them, cheapest first and busy ones last."""
    ordered = sorted(candidates, key=lambda one: (bool(one.get("is_busy")), _cost(one)))
    # The one that was chosen is shown, wherever it stands.
    ordered.sort(key=lambda one: one.get("worker") != chosen)
    shown = ordered[:CANDIDATES_MAX]
    parts = list(dict.fromkeys(part for one in shown for part in one.get("price") or {}))
    titles = ["", "WORKER", "COST", *(part.upper() for part in parts)]
    rows: list[list[object]] = [[*titles, "CACHED", "TO PREFILL", "RUNNING", "NOTE"]]
    for one in shown:
        price = one.get("price") or {}
        rows.append(
            [
                "*" if one.get("worker") == chosen else "",
                one.get("worker"),
                _number(one.get("cost")),
                *(_number(price.get(part)) for part in parts),
                one.get("overlap_blocks"),
                one.get("prefill_tokens"),
                one.get("active_requests"),
                _note(one),
            ]
        )
    yield from table(rows)
    if len(ordered) > len(shown):
        yield f"... and {len(ordered) - len(shown)} more; --json has all"
    # What the cost is made of, where it has no parts with a column of their own.
    formulas = [str(one["formula"]) for one in shown if not one.get("price") and one.get("formula")]
    yield from ["", *formulas] if formulas else []
    unit = "COST and its parts are tokens of prefill; " if parts else ""
    yield ""
    yield f"{unit}CACHED is in blocks, TO PREFILL in tokens"


def _cost(candidate: Mapping[str, Any]) -> float:
    cost = candidate.get("cost")
    return float(cost) if isinstance(cost, int | float) else float("inf")


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else ""


def _note(candidate: Mapping[str, Any]) -> str:
    """Why it is not like the others."""
    notes = ["busy"] if candidate.get("is_busy") else []
    trust = candidate.get("trust") or {}
    if isinstance(trust, str):
        # A router says only how far the worker's events can be believed, a frontend also why.
        notes += [f"events {trust}"] if trust != "exact" else []
    else:
        notes += [str(one["code"]).replace("_", " ") for one in trust.get("reasons") or []]
    credit = candidate.get("reuse_credit")
    notes += [f"its overlap is weighted by {credit:.2f}"] if isinstance(credit, int | float) else []
    return ", ".join(notes)


def _outcome(decision: Mapping[str, Any]) -> str:
    """The outcome of a request."""
    parts = [f"outcome: {str(decision.get('outcome')).replace('_', ' ')}"]
    for name, words in (("first_token_ms", "first token after"), ("ended_ms", "ended after")):
        if decision.get(name) is not None:
            parts.append(f"{words} {decision[name]} ms")
    if decision.get("cached_tokens") is not None:
        parts.append(f"{decision['cached_tokens']} tokens came from the cache")
    return ", ".join(parts)
