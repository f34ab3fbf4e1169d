"""The router as an object: chooses workers, sends requests, tracks the load."""

from __future__ import annotations

import asyncio
import logging
import secrets
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple

from kvflash._core import RouterCore
from kvflash.errors import ClosedError, InvalidArgumentError, KvflashError
from kvflash.policy import asked_of
from kvflash.routing.cluster import Cluster
from kvflash.routing.config import KvRouterConfig
from kvflash.routing.line import WaitingLine
from kvflash.routing.request import ROUTING_ONLY, override_options, routing_options
from kvflash.routing.stream import RoutedStream, Sender
from kvflash.routing.workers import Workers
from kvflash.runtime import Endpoint
from kvflash.runtime.arguments import check_float, check_range
from kvflash.transport.receiver import Feed

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 10.0
_U32_MAX, _U64_MAX = 2**32 - 1, 2**64 - 1


def _tokens(field: str, value: int | None) -> int | None:
    """A number of tokens that the core can take, or None."""
    return None if value is None else check_range(field, value, 0, _U64_MAX)


def _number(field: str, value: float | None) -> float | None:
    """A number whose range the core checks, or None."""
    return None if value is None else check_float(field, value)


def _tick(core: RouterCore) -> None:
    expired = core.tick()
    if expired:
        logger.warning("%d bookings expired without activity", expired)


class _Best(NamedTuple):
    worker_id: int
    dp_rank: int
    overlap_blocks: int


class BestWorker(_Best):
    """Worker, rank and overlap (leading blocks that the worker holds), as a tuple of three.

    Its attribute ``seed`` is the seed of the random draw: ``best_worker(..., seed=...)`` with it
    chooses the same worker as long as load and caches are unchanged.
    """

    seed: int


class KvPushRouter(AbstractAsyncContextManager["KvPushRouter"]):
    """Sends each request to the worker that can serve it at the lowest cost.

    Workers, ranks and event sockets come from the runtime's discovery, from the first call on; that
    call waits up to a second until the workers have replayed their earlier events. With
    KVFLASH_EVENT_PLANE=nats events come from the workers' stream, or from their local indexes.
    Several routers may live in one process; each has its own index and bookings. A call takes
    microseconds of the event loop, and some more for long prompts.

    Args:
        endpoint: Endpoint that the workers serve.
        block_size: Tokens in a block of the workers.
        kv_router_config: Routing settings.

    Raises:
        InvalidArgumentError: The block size is not in 1..=4294967295, or the settings are not a
            KvRouterConfig.
    """

    #: The settings of a router that is given none.
    _default_config: type[KvRouterConfig] = KvRouterConfig

    def __init__(
        self, endpoint: Endpoint, block_size: int, kv_router_config: KvRouterConfig | None = None
    ) -> None:
        self.endpoint = endpoint
        self.block_size = check_range("block_size", block_size, 1, _U32_MAX)
        if not isinstance(kv_router_config, KvRouterConfig | None):
            raise InvalidArgumentError(
                f"kv_router_config must be a KvRouterConfig or None, got {kv_router_config!r}"
            )
        self.config = kv_router_config or self._default_config()
        self._policy = asked_of(self.config.router_mode, "router_mode")
        self._client = endpoint.client()
        self._flags = self.config.cluster_flags()
        self._use(self.config.make_core(block_size, policy=self._policy))
        if self._policy is not None:
            self._policy.start()
        self._workers = Workers(
            self._core,
            endpoint.runtime.discovery,
            endpoint.path,
            self._cluster,
            serve=self._serve,
            min_workers=self.config.workers_to_wait_for(),
        )
        self._feed: Feed | None = None
        self._starting: asyncio.Task[None] | None = None
        # Completed once the latest call may book.
        self._arrival: asyncio.Future[None] | None = None
        self._thresholds: dict[str, Any] | None = None
        self._is_closed = False

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close: running streams go on, queued requests end with an error."""
        self._is_closed = True
        self._line.close()
        if self._policy is not None:
            # It may wait for a call to the policy.
            await asyncio.to_thread(self._policy.close)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._workers.close()
        if self._feed is not None:
            self._feed.stop()
        await asyncio.to_thread(self._cluster.stop)

    # -- requests

    async def generate(  # noqa: PLR0917 - the order that callers know
        self,
        token_ids: Sequence[int],
        model: str = "unknown",
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        allowed_worker_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        user: str | None = None,
        session_key: str | None = None,
        priority: float | None = None,
        strict_priority: int | None = None,
        expected_output_tokens: int | None = None,
        lora_path: str | None = None,
        mm: Sequence[Mapping[str, Any]] | None = None,
        embeds: Sequence[str | bytes] | None = None,
    ) -> RoutedStream:
        """Choose a worker, book the request there, send it.

        With ``router_queue_threshold`` it first waits until a worker has room to prefill. A request
        that is cancelled in the queue leaves it, and nothing is booked.

        Args:
            token_ids: The prompt.
            model: The model's name, passed on; all workers of the endpoint must serve it.
            stop_conditions: Passed on: max_tokens, stop, stop_token_ids, min_tokens, ignore_eos.
            sampling_options: Passed on: temperature, top_p, ...
            output_options: Passed on.
            router_config_override: For this request only: overlap_score_weight,
                overlap_score_credit, prefill_load_scale, router_temperature, assume_kv_reuse. All
                but the temperature are of kv's formula, which decides this request under auto.
            worker_id: The worker that must take the request; its load is booked all the same.
            dp_rank: The rank that must take it.
            extra_args: Passed on.
            lora_name: Adapter of the prompt.
            cache_salt: Salt of the prompt.
            allowed_worker_ids: Only these workers may take the request.
            request_id: Its name at the worker and for :meth:`why`; default: random.
            user: User that the request belongs to, for policies that need it.
            session_key: Key shared by the requests of a session, for policies that need it.
            priority: Higher values go first in the queue; negative values count as 0.
            strict_priority: Goes before all queued requests with a lower value; default 0.
            expected_output_tokens: Expected length of the answer, where generated blocks count;
                default: max_tokens.
            lora_path: Path of the adapter as passed to the engines; needed if blocks are matched
                by the engine's own names.
            mm: Multimodal items, mappings with ``identifier`` (string, 1 to 1,024 bytes),
                ``offset`` and ``length`` (tokens of the prompt, u32); shape [items], 65,536 at
                most.
            embeds: Digests of the prompt's embeddings, as bytes or in hexadecimal digits, 1 to
                1,024 bytes each; shape [blocks], 65,536 at most. lora_path, mm and embeds are for
                routing only; workers do not receive them.

        Returns:
            The items that the worker yields, as they arrive.

        Raises:
            InvalidArgumentError: An empty prompt, or an argument out of range; the message names
                it.
            NoWorkerError: No worker is registered or allowed, or the pinned one is gone.
            AllBusyError: All of these are busy, or had no room for router_queue_timeout.
            OverloadedError: The queue is full, or max_requests are running.
            TransportError: None of the workers that were tried can be reached.
        """
        return await self.generate_from_request(
            {
                "model": model,
                "token_ids": list(token_ids),
                "stop_conditions": dict(stop_conditions or {}),
                "sampling_options": dict(sampling_options or {}),
                "output_options": dict(output_options or {}),
                "eos_token_ids": [],
                "annotations": [],
                "lora_name": lora_name,
                "cache_salt": cache_salt,
                "extra_args": None if extra_args is None else dict(extra_args),
                "router_config_override": router_config_override,
                "worker_id": worker_id,
                "dp_rank": dp_rank,
                "allowed_worker_ids": allowed_worker_ids,
                "request_id": request_id,
                "user": user,
                "session_key": session_key,
                "priority": priority,
                "strict_priority": strict_priority,
                "expected_output_tokens": expected_output_tokens,
                "lora_path": lora_path,
                "mm": mm,
                "embeds": embeds,
            }
        )

    async def generate_from_request(self, request: Mapping[str, Any]) -> RoutedStream:
        """As :meth:`generate`, with a whole request.

        The request is what workers receive, plus the fields for routing:
        ``router_config_override``, ``worker_id`` (or ``backend_instance_id``), ``dp_rank``,
        ``allowed_worker_ids``, ``user``, ``session_key``, ``priority``, ``strict_priority``,
        ``expected_output_tokens``, ``lora_path``, ``mm``, ``embeds`` and ``request_id``.

        Raises:
            InvalidArgumentError: token_ids are missing.
        """
        if not isinstance(request.get("token_ids"), list | tuple):
            raise InvalidArgumentError(
                f"token_ids must be a list, got {request.get('token_ids')!r}"
            )
        options = routing_options(request)
        body = {name: value for name, value in request.items() if name not in ROUTING_ONLY}
        body.setdefault("model", "unknown")
        name = request.get("request_id") or secrets.token_hex(16)
        await self._opened()
        return await self._sender.send(body, options, name)

    # -- queries, and bookings that the caller manages

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        allowed_worker_ids: Sequence[int] | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        user: str | None = None,
        session_key: str | None = None,
        seed: int | None = None,
        lora_path: str | None = None,
        mm: Sequence[Mapping[str, Any]] | None = None,
        embeds: Sequence[str | bytes] | None = None,
    ) -> BestWorker:
        """Choose the worker for a prompt.

        Without ``request_id`` nothing is booked, and each call makes a new draw where chance
        decides: at a temperature above 0, and between equal costs. With ``request_id`` the same
        step also books the request, and the caller must call :meth:`mark_prefill_complete` and
        :meth:`free`.

        Args:
            token_ids: The prompt.
            router_config_override: Settings for this request only.
            request_id: Name of the booking.
            worker_id: The worker that must take the request.
            dp_rank: The rank that must take it.
            allowed_worker_ids: Only these workers may take the request.
            lora_name: Adapter of the prompt.
            cache_salt: Salt of the prompt.
            user: User that the request belongs to, for policies that need it.
            session_key: Key shared by the requests of a session.
            seed: Seed of the random draw, in 0..2**64; default: a new one. The seed of an earlier
                answer repeats that choice as long as load and caches are unchanged.
            lora_path: Path of the adapter, as for :meth:`generate`.
            mm: Multimodal items, likewise; shape [items].
            embeds: Digests of the prompt's embeddings, likewise; shape [blocks].

        Returns:
            Worker, rank, and leading blocks of the prompt that the worker holds, as a tuple of
            three; its attribute ``seed`` is the seed of the random draw.

        Raises:
            InvalidArgumentError: An empty prompt, or an argument out of range; the message names
                it.
            NoWorkerError: No worker is registered or allowed.
            AllBusyError: All of these are busy.
            ConflictError: A request of that name is active.
        """
        await self._opened()
        options = override_options(router_config_override) | {
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "allowed_worker_ids": allowed_worker_ids,
            "lora_name": lora_name,
            "cache_salt": cache_salt,
            "user": user,
            "session_key": session_key,
            "seed": seed,
            "lora_path": lora_path,
            "mm": mm,
            "embeds": embeds,
        }
        if request_id is None:
            *found, seed = self._core.query(token_ids, options)
        else:
            *found, seed = self._core.reserve(token_ids, request_id, options)
        best = BestWorker(*found)
        best.seed = seed
        return best

    async def best_worker_id(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> tuple[int, int]:
        """Deprecated: :meth:`best_worker` without the rank."""
        warnings.warn(
            "best_worker_id() is deprecated: use best_worker(), which also returns the rank",
            DeprecationWarning,
            stacklevel=2,
        )
        worker, _, overlap = await self.best_worker(token_ids, router_config_override, request_id)
        return worker, overlap

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        lora_path: str | None = None,
        mm: Sequence[Mapping[str, Any]] | None = None,
        embeds: Sequence[str | bytes] | None = None,
    ) -> list[dict[str, int]]:
        """Each worker's load if it took a prompt; nothing is booked.

        Args:
            token_ids: The prompt.
            lora_name: Adapter of the prompt.
            cache_salt: Salt of the prompt.
            lora_path: Path of the adapter as passed to the engines.
            mm: Multimodal items of the prompt, as for :meth:`generate`; shape [items].
            embeds: Digests of the prompt's embeddings, likewise; shape [blocks].

        Returns:
            For each worker and rank: worker_id, dp_rank, potential_prefill_tokens,
            potential_decode_blocks, active_requests, overlap_blocks. Empty without workers.
        """
        await self._started()
        options = {
            "lora_name": lora_name,
            "cache_salt": cache_salt,
            "lora_path": lora_path,
            "mm": mm,
            "embeds": embeds,
        }
        return self._core.potential_loads(token_ids, options)

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Report the first token of a request booked by :meth:`best_worker`.

        Raises:
            NotFoundError: No request of that name is active.
        """
        self._core.mark_prefill_complete(request_id)

    async def free(
        self,
        request_id: str,
        *,
        input_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """End a request booked by :meth:`best_worker`. Further calls do nothing.

        Args:
            request_id: Name of the request.
            input_tokens: Tokens of its prompt as the engine counted them, for policies.
            cached_tokens: Of these, tokens that the engine reused.
            output_tokens: Generated tokens.

        Raises:
            InvalidArgumentError: A number of tokens is out of range; the request stays booked.
        """
        self._core.free(
            request_id,
            input_tokens=_tokens("input_tokens", input_tokens),
            cached_tokens=_tokens("cached_tokens", cached_tokens),
            output_tokens=_tokens("output_tokens", output_tokens),
        )

    @property
    def policy(self) -> str:
        """Name of the routing policy."""
        return self._core.policy

    def policy_samples(self) -> list[tuple[str, str, str, float]]:
        """Counters of policies and shadow policies: name, label, label value, value."""
        return self._core.policy_samples()

    def report_metrics(self, worker_id: int, dp_rank: int = 0, **figures: float) -> bool:
        """Pass on what an engine reports of itself, for policies that use it.

        Args:
            worker_id: The worker.
            dp_rank: Its data parallel rank.
            **figures: running_requests, gpu_kv_usage, cpu_kv_usage, queue_s, mean_prefill_s,
                mean_decode_s, avg_prompt_tokens, avg_generation_tokens, busy_ratio, utilization.
                Omitted figures keep their value.

        Returns:
            Whether the worker is known.

        Raises:
            InvalidArgumentError: An unknown figure, or a number out of range.
        """
        check_range("worker_id", worker_id, 0, _U64_MAX)
        check_range("dp_rank", dp_rank, 0, _U32_MAX)
        metrics = {field: check_float(field, value) for field, value in figures.items()}
        return self._core.report_metrics(worker_id, dp_rank, metrics)

    async def dump_events(self) -> str:
        """Everything that the workers' caches are known to hold, as a JSON list of events."""
        await self._started()
        return self._core.dump_events()

    async def why(self, request_id: str) -> str:
        """The decisions made for a request, and its outcome; a JSON list.

        Raises:
            NotFoundError: No decision of that request is kept.
        """
        return self._core.why(request_id)

    def totals(self) -> dict[str, int]:
        """Load of all workers together: requests, prefill_tokens, blocks and more."""
        return self._core.totals()

    def queue_stats(self) -> dict[str, int]:
        """Requests that wait for a worker with room to prefill, and outcomes of earlier ones.

        Returns:
            pending, pending_isl_tokens (tokens of their prompts), and placed_total, refused_total
            (queue full), expired_total, failed_total, left_total. All 0 without a threshold.
        """
        return self._core.queue_stats()

    def set_busy_thresholds(
        self,
        *,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
    ) -> None:
        """Replace the busy thresholds; omitted ones are removed.

        Raises:
            InvalidArgumentError: A threshold is out of range.
        """
        thresholds: dict[str, Any] = {
            "active_decode_blocks_threshold": _number(
                "active_decode_blocks_threshold", active_decode_blocks_threshold
            ),
            "active_prefill_tokens_threshold": _tokens(
                "active_prefill_tokens_threshold", active_prefill_tokens_threshold
            ),
            "active_prefill_tokens_threshold_frac": _number(
                "active_prefill_tokens_threshold_frac", active_prefill_tokens_threshold_frac
            ),
        }
        self._core.set_busy_thresholds(**thresholds)
        self._thresholds = thresholds

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of the state received over NATS, by namespace.component."""
        return self._cluster.stats()

    def _use(self, core: RouterCore) -> None:
        """Decide with this core from now on."""
        self._core = core
        self._line = WaitingLine(core.decider, self.config.router_queue_timeout)
        self._sender = Sender(self._line, self._client, lambda: self._workers.ids)
        self._cluster = Cluster(
            core,
            self._flags,
            open_discovery=self.endpoint.runtime.discovery.twin,
            setting="KVFLASH_EVENT_PLANE=nats",
            is_strict=True,
        )

    def _serve(self, model: tuple[str, str] | None) -> tuple[RouterCore, Cluster]:
        """Start. Events over NATS are per model, so the core is created once the model is known."""
        if model is not None:
            self._use(self.config.make_core(self.block_size, model[0], self._policy, model[1]))
            if self._thresholds is not None:
                self._core.set_busy_thresholds(**self._thresholds)
        feed = self._feed = Feed(
            self._core.catalog,
            has_broker=self._cluster.is_nats,
            tick=partial(_tick, self._core),
        )
        try:
            feed.start()
            self._cluster.start()
        except BaseException:
            # The next attempt makes another one, and only the last is stopped at the end.
            feed.stop()
            raise
        return self._core, self._cluster

    async def _started(self) -> None:
        if self._is_closed:
            raise ClosedError("the router is closed")
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise ClosedError("the router was closed while it started") from None
            raise
        except KvflashError:
            # The next call tries again.
            if self._starting is starting:
                self._starting = None
            raise
        await self._workers.synced(SYNC_TIMEOUT_S)

    async def _opened(self) -> None:
        """As :meth:`_started`, and wait for the workers that must be there before any request.

        Calls that wait go on in the order of their arrival.
        """
        before, passed = self._arrival, asyncio.get_running_loop().create_future()
        self._arrival = passed
        try:
            await self._started()
            # The core refuses the request if they did not come in time.
            await self._workers.enough(self.config.router_queue_timeout)
            if before is not None and not before.done():
                await asyncio.wait([before])
            if self._is_closed:
                raise ClosedError("the router was closed while a request waited for workers")
        finally:
            if before is None or before.done():
                passed.set_result(None)
            else:
                # This call was given up: those behind it wait for those before it.
                before.add_done_callback(lambda _: passed.set_result(None))

    async def _start(self) -> None:
        await asyncio.to_thread(self._cluster.check)
        self._workers.start()
