"""Sends requests at their times, whatever becomes of those before, and notes what came back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvflash.replay.trace import Call

__all__ = ["Result", "send"]

_ERROR_CHARS_MAX = 200
_DATA = b"data:"


@dataclass(kw_only=True)
class Result:
    """What became of one request.

    Attributes:
        late_s: How long after its time it was sent.
        first_s: Seconds until the first chunk of the answer; None if none came.
        total_s: Seconds until the end of the answer.
        prompt_tokens: Its prompt tokens, as the engine counts.
        cached_tokens: Those of them that the engine reused; None if it does not report it.
        worker: Who answered, where the service names it.
        error: Why it failed; None if it did not.
    """

    late_s: float = 0.0
    first_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    worker: str = ""
    error: str | None = None


async def send(
    url: str,
    calls: Sequence[Call],
    *,
    model: str | None,
    speed: float,
    timeout_s: float,
    in_flight_max: int,
    api_key: str | None = None,
) -> list[Result]:
    """Send all calls; the results are in their order.

    Args:
        url: The service.
        calls: Requests in the order of their times.
        model: The model of all of them; None leaves it to each.
        speed: Recorded time divided by real time.
        timeout_s: Longest time of one request.
        in_flight_max: Requests at a time; one more waits, and is late.
        api_key: The key of a client; None sends none.
    """
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(in_flight_max)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else None
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        start_s = loop.time()

        async def one(call: Call) -> Result:
            due_s = start_s + call.at_s / speed
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            async with room:
                result = Result(late_s=loop.time() - due_s)
                await _ask(session, url, call, model, result)
            return result

        return list(await asyncio.gather(*map(one, calls)))


async def _ask(
    session: aiohttp.ClientSession, url: str, call: Call, model: str | None, result: Result
) -> None:
    """Send one call and read its answer to the end."""
    loop = asyncio.get_running_loop()
    body = {**call.body, "stream": True, "stream_options": {"include_usage": True}}
    if model is not None:
        body["model"] = model
    sent_s = loop.time()
    is_complete = False
    try:
        async with session.post(url + call.path, json=body) as response:
            result.worker = response.headers.get("x-kvflash-worker", "")
            if response.status != 200:
                text = " ".join((await response.text()).split())
                result.error = f"status {response.status}: {text}"[:_ERROR_CHARS_MAX]
                return
            async for line in response.content:
                data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
                if data == b"[DONE]":
                    is_complete = True
                elif data:
                    _take(json.loads(data), result, loop.time() - sent_s)
        if not is_complete and result.error is None:
            result.error = "the answer ended before [DONE]"
    # ValueError and AttributeError: an event that is not what it should be.
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, AttributeError) as error:
        result.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS_MAX]
    finally:
        result.total_s = loop.time() - sent_s


def _take(chunk: dict[str, Any], result: Result, since_s: float) -> None:
    """Note what one event of the answer says."""
    if chunk.get("error"):
        result.error = json.dumps(chunk["error"])[:_ERROR_CHARS_MAX]
    if chunk.get("choices") and result.first_s is None:
        result.first_s = since_s
    usage = chunk.get("usage")
    if usage:
        result.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            result.cached_tokens = int(details["cached_tokens"])
