"""An engine's load, for routers that watch it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvflash.errors import OverloadedError
from kvflash.runtime import Component
from kvflash.runtime.arguments import check_range

# Name of the endpoint that reports the load.
ENDPOINT = "load_metrics"
_COUNT_MAX = (1 << 63) - 1
_RANKS_MAX = 1_024


# The order of the fields is that of Dynamo, where engines pass them by position, too.
@dataclass(frozen=True)
class WorkerStats:
    """Requests of one rank.

    Attributes:
        request_active_slots: Running requests.
        request_total_slots: Requests that can run at once.
        num_requests_waiting: Requests in the queue.
        data_parallel_rank: The rank; None means 0.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    num_requests_waiting: int = 0
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class KvStats:
    """The KV cache of one rank.

    Attributes:
        kv_active_blocks: Blocks that requests hold.
        kv_total_blocks: Blocks of the cache.
        gpu_cache_usage_perc: kv_active_blocks / kv_total_blocks, 0..1.
        gpu_prefix_cache_hit_rate: Share of prompt tokens found in the cache, 0..1.
    """

    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    gpu_cache_usage_perc: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0


@dataclass(frozen=True)
class SpecDecodeStats:
    """Speculative decoding; forwarded, and ignored by routers."""

    num_spec_tokens: int | None = None
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_accepted_tokens_per_pos: Sequence[int] | None = None


@dataclass(frozen=True)
class ForwardPassMetrics:
    """Metrics that older engines publish after each pass."""

    worker_stats: WorkerStats = WorkerStats()
    kv_stats: KvStats = KvStats()
    spec_decode_stats: SpecDecodeStats | None = None


class WorkerMetricsPublisher:
    """Reports an engine's load at the endpoint `load_metrics` of its component.

    The response is a stream: each rank's current load, then each change. A slow reader misses
    intermediate loads, never the latest one.

    `publish` may be called from any thread. Only changes are sent.
    """

    def __init__(self) -> None:
        # Known fields of each rank, as they are sent; replaced with each change.
        self._loads: dict[int, dict[str, int]] = {}
        self._waiting: set[asyncio.Event] = set()
        # That of the readers.
        self._loop: asyncio.AbstractEventLoop | None = None

    async def create_endpoint(self, component: Component) -> None:
        """Serve `load_metrics` until the runtime is shut down; returns once it is announced.

        Raises:
            ConflictError: The endpoint is already served.
            TransportError: Discovery or the broker can't be reached.
        """
        endpoint = component.endpoint(ENDPOINT)
        await component.runtime.start_serving(endpoint, self.watch, is_graceful=False)

    def publish(
        self,
        dp_rank: int | ForwardPassMetrics | None = 0,
        active_decode_blocks: int | None = None,
        *,
        active_prefill_tokens: int | None = None,
        kv_used_blocks: int | None = None,
        kv_total_blocks: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        """Report a rank's current load; omitted fields keep their last value.

        Args:
            dp_rank: Data parallel rank, None means 0; or an older engine's metrics.
            active_decode_blocks: Blocks that running requests hold.
            active_prefill_tokens: Prompt tokens that are yet to be computed.
            kv_used_blocks: Blocks of the cache in use, as the engine counts them.
            kv_total_blocks: Blocks of the cache.
            max_num_batched_tokens: Tokens of one forward pass.

        Raises:
            InvalidArgumentError: A value is negative or not a number; the message names it.
            OverloadedError: More than 1,024 ranks.
        """
        counts = {
            "active_decode_blocks": active_decode_blocks,
            "active_prefill_tokens": active_prefill_tokens,
            "kv_used_blocks": kv_used_blocks,
            "kv_total_blocks": kv_total_blocks,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        if isinstance(dp_rank, ForwardPassMetrics):
            cache = dp_rank.kv_stats
            counts["kv_used_blocks"] = cache.kv_active_blocks
            counts["kv_total_blocks"] = cache.kv_total_blocks or None
            dp_rank = dp_rank.worker_stats.data_parallel_rank
        rank = check_range("dp_rank", dp_rank or 0, 0, (1 << 32) - 1)
        known = {
            name: check_range(name, value, 0, _COUNT_MAX)
            for name, value in counts.items()
            if value is not None
        }
        before = self._loads.get(rank)
        if before is None and len(self._loads) >= _RANKS_MAX:
            raise OverloadedError(f"loads of {_RANKS_MAX} ranks are already published, the limit")
        now = {"dp_rank": rank, **(before or {}), **known}
        if now == before:
            return
        self._loads[rank] = now
        if self._loop is not None and self._waiting:
            # A loop that has ended took all its readers along.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    async def watch(self, request: Any) -> AsyncIterator[dict[str, int]]:
        """Yield the load of each rank, then each change; ``{"once": true}`` ends before changes."""
        self._loop = asyncio.get_running_loop()
        news = asyncio.Event()
        self._waiting.add(news)
        seen: dict[int, dict[str, int]] = {}
        try:
            while True:
                news.clear()
                for rank, load in list(self._loads.items()):
                    if seen.get(rank) is not load:
                        seen[rank] = load
                        yield load
                if isinstance(request, dict) and request.get("once"):
                    return
                await news.wait()
        finally:
            self._waiting.discard(news)

    def _wake(self) -> None:
        for news in self._waiting:
            news.set()
