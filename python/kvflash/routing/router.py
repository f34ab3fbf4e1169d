"""A router as an object: chooses workers, sends requests there, keeps account of the load."""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from kvflash._core import RouterCore
from kvflash.errors import ClosedError, InvalidArgumentError, KvflashError
from kvflash.routing.choice import BestWorker
from kvflash.routing.cluster import Cluster
from kvflash.routing.config import KvRouterConfig, override_options
from kvflash.routing.feed import Feed
from kvflash.routing.line import WaitingLine
from kvflash.routing.stream import RoutedStream, Sender
from kvflash.routing.workers import Workers
from kvflash.runtime import Endpoint

__all__ = ["KvPushRouter"]

SYNC_TIMEOUT_S = 10.0
# What of a whole request is the router's business alone.
_ROUTING = (
    *("allowed_worker_ids", "user", "session_key", "lora_path", "mm", "embeds"),
    *("priority", "strict_priority", "expected_output_tokens"),
)


class KvPushRouter:
    """Sends each request to the worker for which it is cheapest.

    Workers, ranks and event sockets come from the runtime's discovery, from the first call on; with
    KVFLASH_EVENT_PLANE=nats events come from the workers' stream, or from indexes of their own.
    Several may live in one process; each has its own index and books for itself. A call costs
    microseconds of the event loop, and some more for long prompts.

    Args:
        endpoint: What the workers serve.
        block_size: Tokens in a block of theirs.
        kv_router_config: How to decide.

    Raises:
        InvalidArgumentError: The block size is 0 or too large.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.block_size = block_size
        self.config = kv_router_config or KvRouterConfig()
        self._policy = self.config.make_policy()
        self._core = self.config.make_core(block_size, policy=self._policy)
        self._client = endpoint.client()
        self._discovery = endpoint.runtime.discovery
        self._flags = self.config.cluster_flags()
        self._cluster = self._make_cluster()
        self._workers = Workers(
            self._core, self._discovery, endpoint.path, self._cluster, serve=self._serve
        )
        self._line, self._sender = self._make_sender()
        self._feed: Feed | None = None
        self._starting: asyncio.Task[None] | None = None
        self._thresholds: dict[str, Any] | None = None
        self._is_started = False
        self._is_closed = False

    async def __aenter__(self) -> KvPushRouter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Listen and follow no more; streams that run go on, requests that wait for room don't."""
        self._is_closed = True
        self._line.close()
        if self._policy is not None:
            self._policy.close()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._is_started:
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

        With ``router_queue_threshold`` it waits before that until a worker has room to prefill.
        Whoever is cancelled then has left the line, and nothing is booked.

        Args:
            token_ids: The prompt.
            model: Its name, handed on.
            stop_conditions: Handed on: max_tokens, stop, stop_token_ids, min_tokens, ignore_eos.
            sampling_options: Handed on: temperature, top_p, ...
            output_options: Handed on.
            router_config_override: For this request: overlap_score_weight, overlap_score_credit,
                prefill_load_scale, router_temperature, assume_kv_reuse.
            worker_id: The worker that must take it; its load is booked all the same.
            dp_rank: The rank of it.
            extra_args: Handed on.
            lora_name: Adapter of the prompt.
            cache_salt: Salt of the prompt.
            allowed_worker_ids: Workers that may take it.
            request_id: Its name for the worker and for :meth:`why`; random if not given.
            user: Whose request it is, for policies that ask.
            session_key: What its session's requests carry, for policies that ask.
            priority: The higher, the earlier among those that wait for room; below 0 is 0.
            strict_priority: Before all of a lower one that wait; 0 if not given.
            expected_output_tokens: Tokens that the answer is expected to have, where generated
                blocks count; max_tokens if not given.
            lora_path: Path of the adapter as engines were given it; needed where blocks are found
                by the engine's own names.
            mm: Multimodal items, mappings with ``identifier`` (text, 1 to 1,024 bytes), ``offset``
                and ``length`` (tokens of the prompt, u32); shape [items], 65,536 at most.
            embeds: Digests of the prompt's embeddings, as bytes or in hexadecimal digits, 1 to
                1,024 bytes each; shape [blocks], 65,536 at most. These three
                are for routing; workers do not get them.

        Returns:
            The items that the worker yields, as they come.

        Raises:
            InvalidArgumentError: An empty prompt, or an argument out of range, by name.
            NoWorkerError: No worker is there or allowed, or the pinned one is not there.
            AllBusyError: All of these are busy, or had no room for router_queue_timeout.
            OverloadedError: As many wait for room as may, or max_requests run.
            TransportError: None of those that were tried can be reached.
        """
        request = {
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
        }
        options = override_options(router_config_override)
        options |= {"worker_id": worker_id, "dp_rank": dp_rank}
        options["allowed_worker_ids"] = (
            None if allowed_worker_ids is None else [*allowed_worker_ids]
        )
        options |= {
            "user": user,
            "session_key": session_key,
            "priority": priority,
            "strict_priority": strict_priority,
            "expected_output_tokens": expected_output_tokens,
            "lora_path": lora_path,
            "mm": mm,
            "embeds": embeds,
        }
        return await self._send(request, options, request_id)

    async def generate_from_request(self, request: Mapping[str, Any]) -> RoutedStream:
        """As :meth:`generate`, with a whole request.

        It is what workers are given, and for routing ``router_config_override``, ``worker_id`` (or
        ``backend_instance_id``), ``dp_rank``, ``allowed_worker_ids``, ``user``, ``session_key``,
        ``priority``, ``strict_priority``, ``expected_output_tokens``, ``lora_path``, ``mm``,
        ``embeds`` and ``request_id``.

        Raises:
            InvalidArgumentError: There are no token_ids.
        """
        body = dict(request)
        if not isinstance(body.get("token_ids"), list | tuple):
            raise InvalidArgumentError(f"token_ids must be a list, got {body.get('token_ids')!r}")
        body.setdefault("model", "unknown")
        options = override_options(body.pop("router_config_override", None))
        pinned = [body.pop(name, None) for name in ("worker_id", "backend_instance_id")]
        options["worker_id"] = next((one for one in pinned if one is not None), None)
        options["dp_rank"] = body.get("dp_rank")
        for name in _ROUTING:
            options[name] = body.pop(name, None)
        return await self._send(body, options, body.pop("request_id", None))

    async def _send(
        self, request: dict[str, Any], options: dict[str, Any], request_id: str | None
    ) -> RoutedStream:
        await self._started()
        name = request_id or secrets.token_hex(16)
        options |= {"lora_name": request.get("lora_name"), "cache_salt": request.get("cache_salt")}
        if not options["expected_output_tokens"]:
            limit = (request.get("stop_conditions") or {}).get("max_tokens")
            is_limit = isinstance(limit, int) and limit > 0
            options["expected_output_tokens"] = limit if is_limit else None
        return await self._sender.send(request, options, name)

    def _make_sender(self) -> tuple[WaitingLine, Sender]:
        line = WaitingLine(self._core.decider, self.config.router_queue_timeout)
        return line, Sender(line, self._client, lambda: self._workers.ids)

    # -- questions, and accounts that the caller keeps

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
        """Which worker a prompt would go to.

        Without ``request_id`` nothing changes, and each call draws anew where chance decides: at a
        temperature above 0, between equal costs. With it the request is booked in the same step,
        and the caller says :meth:`mark_prefill_complete` and :meth:`free`.

        Args:
            token_ids: The prompt.
            router_config_override: What this request wants otherwise than the configuration.
            request_id: The name under which it is booked.
            worker_id: The worker that must take it.
            dp_rank: The rank of it that must.
            allowed_worker_ids: Only these may take it.
            lora_name: Adapter of the prompt.
            cache_salt: Salt of the prompt.
            user: Whose request it is, for policies that ask.
            session_key: A key that all requests of a session carry.
            seed: The number to draw from, in 0..2**64, instead of a new one: an earlier answer's
                repeats that choice while load and caches are the same.
            lora_path: Path of the adapter as engines were given it; needed where blocks are found
                by the engine's own names.
            mm: Multimodal items, mappings with ``identifier`` (text, 1 to 1,024 bytes), ``offset``
                and ``length`` (tokens of the prompt, u32); shape [items], 65,536 at most.
            embeds: Digests of the prompt's embeddings, as bytes or in hexadecimal digits, 1 to
                1,024 bytes each; shape [blocks], 65,536 at most.

        Returns:
            Worker, rank, and leading blocks of the prompt that it holds, as a tuple of three; its
            attribute ``seed`` is the number that chance was drawn from.

        Raises:
            InvalidArgumentError: An empty prompt, or an argument out of range, by name.
            NoWorkerError: No worker is there or allowed.
            AllBusyError: All of these are busy.
            ConflictError: A request of that name is active.
        """
        await self._started()
        options = override_options(router_config_override)
        options |= {
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
            return BestWorker(*self._core.query(token_ids, options))
        return BestWorker(*self._core.reserve(token_ids, request_id, options))

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
        """What a prompt would make of each worker's load; nothing changes.

        Args:
            token_ids: The prompt.
            lora_name: Adapter of the prompt.
            cache_salt: Salt of the prompt.
            lora_path: Path of the adapter as engines were given it.
            mm: Multimodal items of the prompt, as for :meth:`best_worker`; shape [items].
            embeds: Digests of the prompt's embeddings, as there; shape [blocks].

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
        """The first token of a request booked by :meth:`best_worker` has come.

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
        """A request booked by :meth:`best_worker` has ended. Again it does nothing.

        Args:
            request_id: Its name.
            input_tokens: Tokens of its prompt as the engine counted them, for policies.
            cached_tokens: Of these, tokens that the engine reused.
            output_tokens: Tokens that were generated.
        """
        self._core.free(
            request_id,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
        )

    @property
    def policy(self) -> str:
        """The name of the policy that chooses."""
        return self._core.policy

    def policy_samples(self) -> list[tuple[str, str, str, float]]:
        """What policies and shadows count: name, label and its value, and the figure."""
        return self._core.policy_samples()

    def report_metrics(self, worker_id: int, dp_rank: int = 0, **figures: float) -> bool:
        """Tell what an engine reports of itself, for policies that go by it.

        Args:
            worker_id: The worker.
            dp_rank: Its rank.
            **figures: running_requests, gpu_kv_usage, cpu_kv_usage, queue_s, mean_prefill_s,
                mean_decode_s, avg_prompt_tokens, avg_generation_tokens, busy_ratio, utilization.
                What is left out stays as it was.

        Returns:
            Whether the worker is there.

        Raises:
            InvalidArgumentError: An unknown figure, or one out of range.
        """
        return self._core.report_metrics(worker_id, dp_rank, figures)

    async def dump_events(self) -> str:
        """All that the workers' caches are known to hold, as a JSON list of events."""
        await self._started()
        return self._core.dump_events()

    async def why(self, request_id: str) -> str:
        """The decisions that were made for a request, and what became of it; a JSON list.

        Raises:
            NotFoundError: None is kept.
        """
        return self._core.why(request_id)

    def totals(self) -> dict[str, int]:
        """Load of all workers together: requests, prefill_tokens, blocks and more."""
        return self._core.totals()

    def queue_stats(self) -> dict[str, int]:
        """Requests that wait for a worker with room to prefill, and what became of others.

        Returns:
            pending, pending_isl_tokens (tokens of their prompts), and placed_total, refused_total
            (too many waited), expired_total, failed_total, left_total. All 0 without a threshold.
        """
        return self._core.queue_stats()

    def set_busy_thresholds(
        self,
        *,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
    ) -> None:
        """Put these thresholds in force and no others.

        Raises:
            InvalidArgumentError: One is out of range.
        """
        self._thresholds = {
            "active_decode_blocks_threshold": active_decode_blocks_threshold,
            "active_prefill_tokens_threshold": active_prefill_tokens_threshold,
            "active_prefill_tokens_threshold_frac": active_prefill_tokens_threshold_frac,
        }
        self._core.set_busy_thresholds(**self._thresholds)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of the state that comes over NATS, by namespace.component."""
        return self._cluster.stats()

    def _make_cluster(self) -> Cluster:
        return Cluster(
            self._core.catalog,
            self._core.bookings,
            self._flags,
            open_discovery=self._discovery.twin,
            setting="KVFLASH_EVENT_PLANE=nats",
            is_strict=True,
        )

    def _serve(self, model: tuple[str, str] | None) -> tuple[RouterCore, Cluster]:
        """Begin. What comes over NATS is told by model: the core is made when that is known."""
        if model is not None:
            self._core = self.config.make_core(self.block_size, model[0], self._policy, model[1])
            self._line, self._sender = self._make_sender()
            self._cluster = self._make_cluster()
            if self._thresholds is not None:
                self._core.set_busy_thresholds(**self._thresholds)
        self._feed = Feed(self._core, self._cluster.make_receiver)
        self._feed.start()
        self._cluster.start()
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
            self._starting = None
            raise
        await self._workers.synced(SYNC_TIMEOUT_S)

    async def _start(self) -> None:
        # Without events nothing of a server is needed.
        if self._workers.is_brokered or not self._cluster.is_nats:
            await asyncio.to_thread(self._cluster.check)
        self._is_started = True
        self._workers.start()
