"""A worker of the runtime: tokens in and out, found through discovery instead of by URL."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kvflash.errors import ClosedError, ConfigError, InvalidArgumentError, TransportError
from kvflash.llm import ModelInput, ModelRuntimeConfig, ModelType, register_llm
from kvflash.mocker.answer import usage_of
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine, Waiter
from kvflash.mocker.fields import mapping
from kvflash.mocker.generation import Generator
from kvflash.mocker.handover import Handover, parse_room
from kvflash.mocker.protocol import parse_tokens
from kvflash.mocker.publisher import TICK_MS, open_stream
from kvflash.mocker.scheduler import Scheduler
from kvflash.mocker.tokenizer import Tokenizer
from kvflash.outage import Outage
from kvflash.publisher import WorkerMetricsPublisher
from kvflash.publisher.announce import events_key, events_value
from kvflash.publisher.brokered import BrokerOutlet, BrokerStream, Served
from kvflash.publisher.stream import EventOutbox, Sender
from kvflash.runtime import Context, DistributedRuntime, RuntimeLimits

logger = logging.getLogger(__name__)

# Pause between two attempts to announce the worker.
RETRY_S = 1.0


class RuntimeWorker:
    """One instance of an endpoint, with one engine for each data parallel rank."""

    def __init__(self, index: int, config: MockerConfig, tokenizer: Tokenizer) -> None:
        assert config.endpoint is not None, "without an endpoint it is a Worker"
        self.index = index
        self._config = config
        self._runtime = DistributedRuntime(
            limits=RuntimeLimits(drain_timeout_s=config.drain_timeout_s)
        )
        self.instance_id = self._runtime.instance_id
        try:
            self._endpoint = self._runtime.endpoint(config.endpoint)
        except InvalidArgumentError as error:
            raise ConfigError(f"--endpoint: {error}") from error
        self._streams: list[Sender] = []
        if config.kv_events and config.enable_prefix_caching:
            with contextlib.ExitStack() as opened:
                for rank in config.ranks:
                    self._streams.append(self._stream(rank))
                    opened.callback(self._streams[-1].close)
                # All are open: none is closed here.
                opened.pop_all()
        outboxes: list[EventOutbox | None] = [stream.outbox for stream in self._streams]
        outboxes = outboxes or [None] * config.data_parallel_size
        self.engines = [Engine(config, outbox) for outbox in outboxes]
        self._handover = Handover(config.role, self._runtime.host, config.block_size)
        self._generator = Generator(self.engines, config, tokenizer, self._handover)
        self._metrics = WorkerMetricsPublisher()
        self._tasks: list[asyncio.Task[None]] = []

    def _stream(self, rank: int) -> Sender:
        config = self._config
        if config.event_plane == "nats":
            served = Served(config.model_name, config.role == "prefill")
            outlet = BrokerOutlet(
                self._endpoint.component,
                instance_id=self.instance_id,
                dp_rank=rank,
                block_size=config.block_size,
                served=lambda: served,
                has_local_index=config.enable_local_indexer,
            )
            return BrokerStream(outlet, tick_ms=TICK_MS, shape=config.event_era)
        offset = self.index * config.data_parallel_size + config.ranks.index(rank)
        return open_stream(config, self._runtime.host, offset=offset, dp_rank=rank)

    async def start(self) -> None:
        """Wait for the startup time, and for discovery if it is down; then serve."""
        config = self._config
        if config.bootstrap_ports:
            await self._handover.open(config.bootstrap_ports[self.index])
        await asyncio.sleep(config.startup_time_s)
        for rank, engine in zip(config.ranks, self.engines, strict=True):
            self._tasks.append(asyncio.create_task(engine.run()))
            self._report(rank, engine.scheduler)
            engine.on_pass = lambda scheduler, rank=rank: self._report(rank, scheduler)
        if config.tokenizer is None:
            logger.warning(
                "worker %s has no --tokenizer folder: Python routers can use it; frontends "
                "refuse it, because they tokenize with that folder",
                self.instance_id,
            )
        await self._patiently(self._announce_events)
        await self._patiently(lambda: self._metrics.create_endpoint(self._endpoint.component))
        await self._patiently(self._register)
        await self._patiently(self._serve)

    async def close(self) -> None:
        """Leave discovery, wait for running requests up to the drain timeout, then close all."""
        await self._runtime.close()
        await self._handover.close(self._config.drain_timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            # It waits for its thread, so it must not run in the event loop.
            await asyncio.to_thread(stream.close)

    def where(self) -> dict[str, Any]:
        """Its endpoint and addresses, for the ready line."""
        return {
            "endpoint": self._endpoint.path.replace("/", "."),
            "instance_id": self.instance_id,
            "events": [stream.endpoint for stream in self._streams],
            "replay": [stream.replay_endpoint for stream in self._streams],
        }

    async def _patiently(self, step: Callable[[], Awaitable[None]]) -> None:
        """Retry a step of the start while discovery can't be reached, as launchers do."""
        outage = Outage(logger, f"worker {self.instance_id}: discovery answers")
        while True:
            try:
                await step()
            except (TransportError, asyncio.TimeoutError) as error:
                outage.lasts(
                    f"worker {self.instance_id} can't be announced: {str(error) or 'no answer'}; "
                    "trying again"
                )
            else:
                return outage.ends()
            await asyncio.sleep(RETRY_S)

    async def _announce_events(self) -> None:
        config, component = self._config, self._endpoint.component
        for stream, rank in zip(self._streams, config.ranks, strict=False):
            place = (stream.kind, stream.endpoint, stream.replay_endpoint)
            where = events_value(*place, config.block_size)
            await self._runtime.announce(events_key(component, self.instance_id, rank), where)

    async def _register(self) -> None:
        config = self._config
        port = self._handover.bootstrap_port
        is_prefill = self._handover.is_prefill
        await register_llm(
            ModelInput.Tokens,
            ModelType.Prefill if is_prefill else ModelType.Chat | ModelType.Completions,
            self._endpoint,
            model_path=config.tokenizer,
            model_name=config.model_name,
            context_length=config.model_len,
            kv_cache_block_size=config.block_size,
            runtime_config=ModelRuntimeConfig(
                total_kv_blocks=config.num_gpu_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                data_parallel_size=config.data_parallel_size,
                bootstrap_host=self._runtime.host if port else None,
                bootstrap_port=port,
            ),
            lora_names=list(config.lora_adapters),
        )

    async def _serve(self) -> None:
        limit = self._config.max_waiting
        await self._runtime.start_serving(self._endpoint, self.generate, requests_max=limit)

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, Any]]:
        if isinstance(request, list):
            # Clients without other fields send the prompt's tokens alone.
            request = {"token_ids": request}
        if not isinstance(request, dict):
            raise InvalidArgumentError(f"the request must be a map, got {type(request).__name__}")
        # Read first: if anything else is wrong, the waiting decode worker must be informed.
        room = parse_room(mapping(request, "bootstrap_info"))
        try:
            params = parse_tokens(request, self._config)
        except InvalidArgumentError:
            self._handover.finish(room, is_done=False)
            raise
        async with self._generator.generation(params, room) as generation:
            watching = asyncio.create_task(_stop_with(context, generation))
            try:
                async for choice, step in generation.steps():
                    item: dict[str, Any] = {
                        "token_ids": step.token_ids,
                        "finish_reason": choice.plan.finish_reason if step.is_last else None,
                    }
                    if step.is_last:
                        item["completion_usage"] = usage_of([choice])
                        if (handed := self._handover.params(len(params.prompt_ids))) is not None:
                            item["disaggregated_params"] = {"kv_transfer_params": handed}
                    yield item
            finally:
                watching.cancel()

    def _report(self, rank: int, scheduler: Scheduler) -> None:
        used = scheduler.blocks.used_blocks
        self._metrics.publish(
            rank,
            used,
            active_prefill_tokens=scheduler.prefill_tokens,
            kv_used_blocks=used,
            kv_total_blocks=scheduler.blocks.capacity_blocks,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )


async def _stop_with(context: Context, waiter: Waiter) -> None:
    """End a request as soon as its client is gone, not at its next token."""
    await context.async_killed_or_stopped()
    waiter.fail(ClosedError("the request was cancelled"))
