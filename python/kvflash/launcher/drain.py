"""Wait for an engine's requests before SIGTERM ends it: vLLM aborts those that still run."""

from __future__ import annotations

import asyncio
import logging
import re

import aiohttp

from kvflash.launcher.child import Child

logger = logging.getLogger(__name__)

# Requests that run and that wait, in vLLM's words and in SGLang's; a line for each rank.
_REQUESTS = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)"
    r"(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
_POLL_S = 0.1
_ANSWER_S_MAX = 5.0
# Routers learn within this time that the engine has left discovery; until then they may send more.
SETTLE_S = 1.0


async def wait_until_idle(url: str, child: Child, timeout_s: float) -> None:
    """Wait until an engine has had no request for a second, ``timeout_s`` at most.

    Returns at once when it has ended, or does not tell how many requests it has.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + timeout_s
    idle_since_s: float | None = None
    limit = aiohttp.ClientTimeout(total=min(timeout_s, _ANSWER_S_MAX) or None)
    async with aiohttp.ClientSession(url, timeout=limit) as session:
        while child.is_running and clock() < end_s:
            count = await _requests(session)
            if count is None:
                logger.info("the engine does not tell how many requests it has: not waiting")
                return
            if count:
                idle_since_s = None
            elif idle_since_s is None:
                idle_since_s = clock()
            elif clock() - idle_since_s >= SETTLE_S:
                return
            await asyncio.sleep(_POLL_S)
    if child.is_running and idle_since_s is None and timeout_s > 0:
        logger.warning(
            "the engine still had requests after %g s (--drain-timeout); stopping it", timeout_s
        )


async def _requests(session: aiohttp.ClientSession) -> float | None:
    try:
        async with session.get("/metrics") as response:
            return requests_in(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return None


def requests_in(text: str) -> float | None:
    """How many requests an engine's metrics count, or None if they do not tell."""
    counts = [float(count) for count in _REQUESTS.findall(text)]
    return sum(counts) if counts else None
