"""The client's measurements of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ArmRun", "Record"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request and its answer.

    Attributes:
        conversation: Its conversation's number.
        turn: Its place in the conversation, from 0.
        request: Fingerprint of its messages.
        worker: Worker that answered, as the frontend names it; empty without an answer.
        start_s: Send time, after the start of the arm.
        end_s: End of the answer, after the start of the arm.
        ttft_ms: Time from sending to the first text; None if it failed.
        prompt_tokens: Count of the engine.
        cached_tokens: Prompt tokens reused from its cache, as the engine reports.
        error: Why it failed; None on success.
    """

    conversation: int
    turn: int
    request: str
    worker: str
    start_s: float
    end_s: float
    ttft_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """All measurements of one router mode.

    Attributes:
        mode: The frontend's --router-mode.
        seed: Seed of the workload.
        records: Records in order of their ends.
        planned_requests: Requests of the workload; more than records after a failure, because the
            rest of that conversation can't be sent.
        worker_count: Number of workers, including those without a request.
        wall_s: Time from the first request to the end of the last answer.
        stage_tokens: The frontend's kvflash_tokens_total by stage, after the run.
    """

    mode: str
    seed: int
    records: list[Record]
    planned_requests: int
    worker_count: int
    wall_s: float
    stage_tokens: Mapping[str, float] = field(default_factory=dict)
