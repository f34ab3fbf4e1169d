"""Queries a running engine: its model and cache, and how many requests it still has.

vLLM aborts requests that run when it gets SIGTERM.
"""

import asyncio
import logging
import math
import re
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvflash.ask import samples
from kvflash.errors import ConfigError, DeadlineError
from kvflash.launcher.child import Child
from kvflash.launcher.command import EngineCommand
from kvflash.outage import REMIND_S

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_ANSWER_S_MAX = 5.0
# Requests that run and that wait, in vLLM's words and in SGLang's; a sample for each rank.
_REQUESTS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
)
_FAILURES = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
_IDLE_POLL_S = 0.1
# Routers learn within this time that the engine has left discovery; until then they may send more.
SETTLE_S = 1.0


@dataclass(kw_only=True)
class Found:
    """What an engine reports about itself; None is unknown."""

    model_name: str  # The base model.
    lora_names: list[str] = field(default_factory=list)  # Its adapters.
    context_length: int | None = None  # Tokens of the longest prompt with its answer.
    block_size: int | None = None  # Tokens in a block.
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None  # Requests in a batch.


async def wait_until_ready(
    url: str, command: EngineCommand, child: Child, timeout_s: float
) -> Found | None:
    """Wait until an engine is healthy, then query what it serves.

    Returns None if the engine ended, or a signal came, before it was healthy.

    Raises DeadlineError if it was not healthy in time, and ConfigError if it serves no model, or
    refuses the command's API key.
    """
    clock = asyncio.get_running_loop().time
    started_s = reminded_s = clock()
    limit = aiohttp.ClientTimeout(total=_ANSWER_S_MAX)
    headers = _headers(command.api_key)
    async with aiohttp.ClientSession(url, timeout=limit, headers=headers) as session:
        while reason := await _why_unhealthy(session):
            if not child.is_running or child.stopping.is_set():
                return None
            now_s = clock()
            why = f"GET {url}/health: {reason}"
            if now_s - started_s > timeout_s:
                raise DeadlineError(
                    f"the engine was not healthy within {timeout_s:g} s (--ready-timeout): {why}"
                )
            if now_s - reminded_s >= REMIND_S:
                reminded_s = now_s
                waited_s = now_s - started_s
                logger.info("the engine is not healthy after %.0f s: %s", waited_s, why)
            await asyncio.sleep(_POLL_S)
        found = await _models(session)
        _add_details(found, command.details, await _text(session, command.details))
    return found


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _why_unhealthy(session: aiohttp.ClientSession) -> str:
    try:
        async with session.get("/health") as response:
            return "" if response.status == 200 else f"status {response.status}"
    except _FAILURES as error:
        return str(error) or type(error).__name__


async def _models(session: aiohttp.ClientSession) -> Found:
    """The base model and the adapters that name it as their parent."""
    try:
        async with session.get("/v1/models") as response:
            status = response.status
            answer: Any = await response.json(content_type=None) if status == 200 else None
    except (*_FAILURES, ValueError) as error:
        raise ConfigError(f"the engine does not answer /v1/models: {error!r}") from error
    if status != 200:
        is_refused = status in (401, 403)
        hint = ": set KVFLASH_WORKER_API_KEY to the engine's API key" if is_refused else ""
        raise ConfigError(f"the engine's /v1/models answered {status}{hint}")
    try:
        cards = list(answer["data"])
        base = next((card for card in cards if not card.get("parent")), None)
        if base is None:
            raise ConfigError("the engine serves no model")
        names = [str(card["id"]) for card in cards if card.get("parent")]
        length = base.get("max_model_len")
        return Found(model_name=str(base["id"]), lora_names=names, context_length=length)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the engine's /v1/models can't be read: {error!r}") from error


async def _text(session: aiohttp.ClientSession, path: str) -> str:
    try:
        async with session.get(path) as response:
            return await response.text() if response.status == 200 else ""
    except _FAILURES as error:
        logger.warning("the engine does not answer %s: %r", path, error)
        return ""


def _add_details(found: Found, path: str, text: str) -> None:
    if path == "/metrics":
        labels, _ = next(iter(samples(text, "vllm:cache_config_info")), ({}, 0))
        found.block_size = _count(labels.get("block_size"))
        found.total_kv_blocks = _count(labels.get("num_gpu_blocks"))
        return
    fields = {
        name: _count(value)
        for name, value in re.findall(r'"(\w+)"\s*:\s*(\d+)\s*[,}]', text)
        if name in ("page_size", "max_total_num_tokens", "max_running_requests")
    }
    found.block_size = fields.get("page_size")
    found.max_num_seqs = fields.get("max_running_requests")
    tokens = fields.get("max_total_num_tokens")
    if tokens and found.block_size:
        found.total_kv_blocks = tokens // found.block_size


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


async def wait_until_idle(
    url: str, child: Child, timeout_s: float, api_key: str | None = None
) -> None:
    """Wait, at most ``timeout_s``, until an engine has had no request for a second.

    Returns at once if the engine has ended, nothing listens, or it does not report its requests.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + timeout_s
    idle_since_s: float | None = None
    has_counted = False
    async with aiohttp.ClientSession(url, headers=_headers(api_key)) as session:
        while child.is_running and (left_s := end_s - clock()) > 0:
            try:
                count = await _requests(session, min(left_s, _ANSWER_S_MAX))
            except _FAILURES as error:
                cause = getattr(error, "os_error", None)
                if isinstance(cause, ConnectionRefusedError):
                    logger.info(
                        "the engine's HTTP server has stopped; not waiting for its requests"
                    )
                    return
                # A busy engine may answer late, and it is the one to wait for.
                logger.debug("the engine does not answer /metrics: %r; asking again", error)
                count = math.inf
            if count is None:
                logger.info(
                    "the engine does not report how many requests it has; not waiting for them"
                )
                return
            has_counted = has_counted or count < math.inf
            if count:
                idle_since_s = None
            elif idle_since_s is None:
                idle_since_s = clock()
            elif clock() - idle_since_s >= SETTLE_S:
                return
            await asyncio.sleep(_IDLE_POLL_S)
    if child.is_running and idle_since_s is None and timeout_s > 0:
        did = "still had requests after" if has_counted else "did not report its requests for"
        logger.warning("the engine %s %g s (--drain-timeout); stopping it", did, timeout_s)


async def _requests(session: aiohttp.ClientSession, timeout_s: float) -> float | None:
    """How many requests the engine has, or None if it does not tell."""
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with session.get("/metrics", timeout=limit) as response:
        if response.status >= 500:
            response.raise_for_status()
        return requests_in(await response.text()) if response.status == 200 else None


def requests_in(text: str) -> float | None:
    """How many requests an engine's metrics count, or None if they do not tell."""
    counts = [count for name in _REQUESTS for _, count in samples(text, name)]
    return sum(counts) if counts else None
