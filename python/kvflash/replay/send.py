"""Sends requests at their times, independent of earlier ones, and records the answers."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvflash.replay.trace import Call

_ERROR_CHARS_MAX = 200
# Longest line of an answer: an event may have the tokens of a whole prompt.
_LINE_BYTES_MAX = 16 * 1024 * 1024
_DATA = b"data:"


@dataclass(kw_only=True)
class Result:
    """The outcome of one request."""

    late_s: float = 0.0  # Delay of the send after its scheduled time.
    first_s: float | None = None  # Seconds until the first chunk of the answer.
    total_s: float = 0.0  # Seconds until its end.
    prompt_tokens: int = 0  # As counted by the engine.
    cached_tokens: int | None = None  # Reused by the engine; None if it does not report them.
    worker: str = ""  # The worker that answered, if the service names it.
    error: str | None = None  # Why it failed; None on success.


async def send(
    url: str,
    calls: Sequence[Call],
    *,
    model: str | None,
    speed: float,
    timeout_s: float,
    in_flight_max: int,
    api_key: str | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Send all calls at their times divided by ``speed``; the results have the same order.

    ``on_result`` takes each as soon as it is there. Further requests than ``in_flight_max`` wait
    and are late; ``model`` replaces that of each call.
    """
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(in_flight_max)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else None
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=headers,
        # A line may have twice as many bytes.
        read_bufsize=_LINE_BYTES_MAX // 2,
    ) as session:
        start_s = loop.time()

        async def one(call: Call) -> Result:
            due_s = start_s + call.at_s / speed
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            async with room:
                result = Result(late_s=loop.time() - due_s)
                await _ask(session, url, call, model, result)
            if on_result is not None:
                on_result(result)
            return result

        return list(await asyncio.gather(*map(one, calls)))


async def _ask(
    session: aiohttp.ClientSession, url: str, call: Call, model: str | None, result: Result
) -> None:
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
    # All others than the first two: a malformed event.
    except (
        aiohttp.ClientError, asyncio.TimeoutError,
        ValueError, AttributeError, TypeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        result.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS_MAX]
    finally:
        result.total_s = loop.time() - sent_s


def _take(chunk: dict[str, Any], result: Result, since_s: float) -> None:
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
