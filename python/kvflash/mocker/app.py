"""Starts and stops workers in one process."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvflash.address import reachable, unbindable
from kvflash.console import announce, counted
from kvflash.mocker.api import build_app
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine
from kvflash.mocker.handover import Handover
from kvflash.mocker.tokenizer import Tokenizer, load
from kvflash.signals import ending_signals

if TYPE_CHECKING:
    from kvflash.mocker.worker import RuntimeWorker
    from kvflash.publisher.stream import EventStream

logger = logging.getLogger(__name__)

# Backlog of connections; the default of 128 refuses bursts that benchmarks send.
BACKLOG = 1024
DRAIN_S_MIN = 0.001


class Worker:
    """One engine with its HTTP server and its event sockets, which bind at once."""

    def __init__(self, index: int, config: MockerConfig, tokenizer: Tokenizer) -> None:
        self.index = index
        self.url = ""
        self._config = config
        self._stream: EventStream | None = None
        if config.zmq_events_port != 0:
            # Without events ZMQ need not be loaded.
            from kvflash.mocker.publisher import open_stream  # noqa: PLC0415

            rank = config.data_parallel_rank
            self._stream = open_stream(config, config.host, offset=index, dp_rank=rank)
        self.events_url = self._stream.endpoint if self._stream else None
        self.replay_url = self._stream.replay_endpoint if self._stream else None
        self.engine = Engine(config, self._stream.outbox if self._stream else None)
        self._handover = Handover(config.role, config.host, config.block_size)
        self._runner = web.AppRunner(
            build_app(self.engine, config, tokenizer, self._handover),
            handler_cancellation=True,
            access_log=None,
            # For aiohttp 0 means no timeout.
            shutdown_timeout=max(config.drain_timeout_s, DRAIN_S_MIN),
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the startup time, then serve; raises ConfigError if a port is taken."""
        if self._config.bootstrap_ports:
            await self._handover.open(self._config.bootstrap_ports[self.index])
        await asyncio.sleep(self._config.startup_time_s)
        self._running = asyncio.create_task(self.engine.run())
        await self._runner.setup()
        host, first = self._config.host, self._config.port
        port = first + self.index if first else 0
        try:
            await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            raise unbindable(("--host", "--port"), host, port, error) from error
        self.url = f"http://{reachable(host)}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop accepting, wait for running requests up to the drain timeout, then close all."""
        await self._runner.cleanup()
        await self._handover.close(self._config.drain_timeout_s)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._stream is not None:
            # It waits for its thread, so it must not run in the event loop.
            await asyncio.to_thread(self._stream.close)

    def where(self) -> dict[str, Any]:
        """Its addresses, for the ready line."""
        return {"url": self.url, "events": self.events_url, "replay": self.replay_url}


class Mocker(AbstractAsyncContextManager["Mocker"]):
    """The running workers of one `serve`; an async context manager that closes them."""

    def __init__(self, workers: list[Worker | RuntimeWorker]) -> None:
        self.workers = workers

    async def close(self) -> None:
        """Stop all workers; running requests may use the drain timeout."""
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _make_worker(index: int, config: MockerConfig, tokenizer: Tokenizer) -> Worker | RuntimeWorker:
    if config.endpoint is None:
        return Worker(index, config, tokenizer)
    # Here, so that workers without an endpoint need not wait for the runtime.
    from kvflash.mocker.worker import RuntimeWorker  # noqa: PLC0415

    return RuntimeWorker(index, config, tokenizer)


async def serve(config: MockerConfig) -> Mocker:
    """Start the workers; raises ConfigError for an unusable tokenizer or a taken port."""
    if config.enable_local_indexer and config.event_plane != "nats":
        from kvflash.publisher.brokered import UNUSED_LOCAL_INDEXER  # noqa: PLC0415

        logger.warning("%s", UNUSED_LOCAL_INDEXER)
    tokenizer = load(config.tokenizer)
    workers: list[Worker | RuntimeWorker] = []
    starts: list[asyncio.Task[None]] = []
    try:
        for index in range(config.num_workers):
            # One by one: if one can't bind, those before it are known and get closed.
            workers.append(_make_worker(index, config, tokenizer))
        starts += [asyncio.create_task(worker.start()) for worker in workers]
        await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await Mocker(workers).close()
        raise
    return Mocker(workers)


async def run(config: MockerConfig) -> None:
    """Serve until a signal; prints one line of JSON on stdout per worker once ready."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    ours = ending_signals()
    for number in ours:
        loop.add_signal_handler(number, stop.set)
    logger.info("starting %s", counted(config.num_workers, "worker", "workers"))
    starting = asyncio.create_task(serve(config))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # A signal during the startup time: there is nothing to drain.
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    async with await starting as mocker:
        for worker in mocker.workers:
            announce({"event": "ready", "worker": worker.index, **worker.where()})
        await stopping
        for number in ours:
            loop.remove_signal_handler(number)
            # The default action ends the process at once; asyncio would wait after a
            # KeyboardInterrupt.
            signal.signal(number, signal.SIG_DFL)
        logger.info("draining for up to %g s; a second signal ends it now", config.drain_timeout_s)
    logger.info("stopped")
