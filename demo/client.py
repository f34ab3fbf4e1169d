"""The users: they send a workload through a frontend and measure the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from demo.record import ArmRun, Record
from demo.report import stage_tokens
from demo.workload import Conversation, Workload, fingerprint

__all__ = ["REQUEST_TIMEOUT_S", "send_workload"]

REQUEST_TIMEOUT_S = 60.0
# Interval between the arrivals of two users.
ARRIVAL_MS = 200
WORKER_HEADER = "x-kvflash-worker"
# Maximum of an error's text in a record; an engine may answer with a page of HTML.
ERROR_CHARS_MAX = 300

_DATA = b"data: "


@dataclass
class _Answer:
    """The parts of an answer so far."""

    worker: str = ""
    text: str = ""
    first_s: float | None = None
    usage: dict[str, Any] | None = None
    is_complete: bool = False


class _AnswerError(Exception):
    """A malformed answer; the message says why."""


async def send_workload(
    session: aiohttp.ClientSession,
    url: str,
    workload: Workload,
    *,
    model: str,
    mode: str,
    concurrency: int,
    worker_count: int,
    on_record: Callable[[Record], None],
) -> ArmRun:
    """Send every conversation, some in parallel, each turn after the answer to the previous one.

    Args:
        session: HTTP.
        url: The frontend.
        workload: The conversations.
        model: Name of the model.
        mode: The frontend's router mode, for the result.
        concurrency: Concurrent users.
        worker_count: Engines, for the result.
        on_record: Called after every request.

    Returns:
        The measurements. A failed request ends its conversation, and nothing else.
    """
    loop = asyncio.get_running_loop()
    records: list[Record] = []
    waiting = iter(workload.conversations)
    start_s = loop.time()

    async def user(number: int) -> None:
        # Users arrive one after the other.
        await asyncio.sleep(number * ARRIVAL_MS / 1000)
        for conversation in waiting:
            answers: list[str] = []
            for turn in conversation.turns:
                # The user reads and types: a part of the workload.
                await asyncio.sleep(turn.think_ms / 1000)
                record, text = await _ask(
                    session, url, conversation, answers, model=model, arm_start_s=start_s
                )
                records.append(record)
                on_record(record)
                if record.error is not None:
                    break
                answers.append(text)

    users = [asyncio.ensure_future(user(number)) for number in range(concurrency)]
    try:
        await asyncio.gather(*users)
    finally:
        for one in users:
            one.cancel()
    wall_s = loop.time() - start_s
    async with session.get(f"{url}/metrics") as response:
        stages = stage_tokens(await response.text())
    return ArmRun(
        mode=mode,
        seed=workload.options.seed,
        records=records,
        planned_requests=workload.request_count,
        worker_count=worker_count,
        wall_s=wall_s,
        stage_tokens=stages,
    )


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    conversation: Conversation,
    answers: list[str],
    *,
    model: str,
    arm_start_s: float,
) -> tuple[Record, str]:
    """Send one turn. Returns its record, and the text of the answer."""
    loop = asyncio.get_running_loop()
    messages = conversation.messages(answers)
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": conversation.turns[len(answers)].answer_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = _Answer()
    error: str | None = None
    prompt_tokens = cached_tokens = 0
    start_s = loop.time()
    try:
        await _stream(session, f"{url}/v1/chat/completions", body, answer)
        usage = answer.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        prompt_tokens = int(usage.get("prompt_tokens", 0))
        cached_tokens = int(details.get("cached_tokens") or 0)
    except _AnswerError as caught:
        error = str(caught)[:ERROR_CHARS_MAX]
    # All others than the first two: a malformed event.
    except (
        aiohttp.ClientError, asyncio.TimeoutError,
        ValueError, KeyError, AttributeError, TypeError, OverflowError,
    ) as caught:  # fmt: skip
        error = f"{type(caught).__name__}: {caught}"[:ERROR_CHARS_MAX]
    record = Record(
        conversation=conversation.number,
        turn=len(answers),
        request=fingerprint(messages),
        worker=answer.worker,
        start_s=start_s - arm_start_s,
        end_s=loop.time() - arm_start_s,
        ttft_ms=None if error or answer.first_s is None else 1000 * (answer.first_s - start_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        error=error,
    )
    return record, answer.text


async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], answer: _Answer
) -> None:
    """Send a request and read its answer to the end.

    Raises:
        ClientError: The connection failed.
        _AnswerError: The frontend refused, or the answer is broken or lacks its usage.
    """
    loop = asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with session.post(url, json=body, timeout=timeout) as response:
        answer.worker = response.headers.get(WORKER_HEADER, "")
        if response.status != 200:
            raise _AnswerError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == b"[DONE]":
                # Read to the end of the body: otherwise the frontend sees a client that left early.
                answer.is_complete = True
            else:
                _take(json.loads(data), answer, loop.time())
    if not answer.is_complete:
        raise _AnswerError("the stream ended before [DONE]")
    if answer.usage is None or answer.first_s is None:
        raise _AnswerError("the answer has no text or no usage")


def _take(chunk: dict[str, Any], answer: _Answer, now_s: float) -> None:
    if "error" in chunk:
        raise _AnswerError(json.dumps(chunk["error"]))
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            answer.text += text
            answer.first_s = answer.first_s or now_s
