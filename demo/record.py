"""What the client saw of a request."""

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
        worker: Worker that answered, as the frontend names it; empty when none did.
        start_s: When it was sent, after the start of the arm.
        end_s: When its answer was complete, after the start of the arm.
        ttft_ms: From sending to the first text; None when it failed.
        prompt_tokens: As the engine counts.
        cached_tokens: Of these, reused from its cache, as the engine says.
        error: Why it failed; None when it did not.
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
    """Everything measured of one router mode.

    Attributes:
        mode: The frontend's --router-mode.
        seed: Of the workload.
        records: In order of their ends.
        planned_requests: Requests of the workload; more than records when one failed, because the
            rest of its conversation can't be asked.
        worker_count: Workers there were, whether they got a request or not.
        wall_s: From the first request to the end of the last answer.
        stage_tokens: The frontend's kvflash_tokens_total by stage, after the run.
    """

    mode: str
    seed: int
    records: list[Record]
    planned_requests: int
    worker_count: int
    wall_s: float
    stage_tokens: Mapping[str, float] = field(default_factory=dict)
