"""Queries a running engine: its model and cache, and how many requests it still has.

vLLM aborts requests that run when it gets SIGTERM.
"""

import asyncio
import logging
import math
import re
from dataclasses import dataclass, field

from kvflash.ask import Answer, ask, samples
from kvflash.errors import ConfigError, DeadlineError
from kvflash.launcher.child import Child
from kvflash.launcher.command import EngineCommand

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_ANSWER_S_MAX = 5.0
# Requests that run and that wait, in vLLM's words and in SGLang's; a sample for each rank.
_REQUESTS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
)
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
    deadline = asyncio.get_running_loop().time() + timeout_s
    while (await _get(url, "/health", command.api_key)).status != 200:
        if not child.is_running or child.stopping.is_set():
            return None
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineError(f"the engine was not healthy within {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)
    found = _models(await _get(url, "/v1/models", command.api_key))
    details = await _get(url, command.details, command.api_key)
    if details.status == 200:
        _add_details(found, command.details, details.text)
    elif details.error:
        logger.warning("the engine does not answer %s: %s", command.details, details.error)
    return found


async def _get(
    url: str, path: str, api_key: str | None, timeout_s: float = _ANSWER_S_MAX
) -> Answer:
    return await asyncio.to_thread(ask, url, path, timeout_s=timeout_s, api_key=api_key)


def _models(answer: Answer) -> Found:
    """The base model and the adapters that name it as their parent."""
    if answer.error:
        raise ConfigError(f"the engine does not answer /v1/models: {answer.error}")
    if answer.status != 200:
        is_refused = answer.status in (401, 403)
        hint = ": set KVFLASH_WORKER_API_KEY to the engine's API key" if is_refused else ""
        raise ConfigError(f"the engine's /v1/models answered {answer.status}{hint}")
    try:
        cards = list(answer.json["data"])
        base = next((card for card in cards if not card.get("parent")), None)
        if base is None:
            raise ConfigError("the engine serves no model")
        names = [str(card["id"]) for card in cards if card.get("parent")]
        length = base.get("max_model_len")
        return Found(model_name=str(base["id"]), lora_names=names, context_length=length)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the engine's /v1/models can't be read: {error!r}") from error


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
    while child.is_running and (left_s := end_s - clock()) > 0:
        answer = await _get(url, "/metrics", api_key, min(left_s, _ANSWER_S_MAX))
        if isinstance(answer.failure, ConnectionRefusedError):
            logger.info("the engine's HTTP server has stopped; not waiting for its requests")
            return
        # A busy engine may answer late, and it is the one to wait for.
        is_late = not answer.status or answer.status >= 500
        count = math.inf if is_late else requests_in(answer.text)
        if count is None:
            logger.info("the engine does not report how many requests it has; not waiting for them")
            return
        has_counted = has_counted or not is_late
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


def requests_in(text: str) -> float | None:
    """How many requests an engine's metrics count, or None if they do not tell."""
    counts = [count for name in _REQUESTS for _, count in samples(text, name)]
    return sum(counts) if counts else None
