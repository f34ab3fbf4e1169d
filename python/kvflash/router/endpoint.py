"""The router on the request plane: requests go to the workers of an endpoint, items come back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvflash.errors import (
    ClosedError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    TransportError,
)
from kvflash.router.workers import DiscoveredWorkers, Registrar
from kvflash.routing.cluster import Cluster
from kvflash.routing.stream import RETRIED, untried
from kvflash.runtime import Client, Context, DistributedRuntime
from kvflash.runtime.serving import Handler

__all__ = ["EndpointRouter", "EndpointThread"]

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 5
SYNC_TIMEOUT_S = 10.0
# Between two attempts to serve.
PAUSE_S = 2.0
# A stream that goes on says so this often, long before its reservation expires.
TOUCH_INTERVAL_S = 1.0
# What of a request is about routing.
_ROUTING = (
    *("token_ids", "lora_name", "lora_path", "cache_salt", "mm", "embeds"),
    *("router_config_override", "dp_rank"),
    *("user", "session_key", "priority", "strict_priority", "expected_output_tokens"),
)


class Decider(Registrar, Protocol):
    """What decides, and keeps account of load."""

    #: Whether a call may take longer than an event loop should stand still.
    may_wait: bool
    #: Reservations that may wait at once.
    waiting_max: int

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask a route of the HTTP service."""


class EndpointRouter:
    """Serves ``namespace.router.generate`` and ``namespace.router.best_worker_id``.

    Args:
        router: What decides, and keeps account of load; also that of its HTTP service.
        runtime: Where workers are found, and where it is found.
        endpoint: ``namespace.component.endpoint`` of the workers.
        cluster: What is shared with other routers of the component.
        model_name: Model of workers that announce no card.
    """

    def __init__(
        self,
        router: Decider,
        runtime: DistributedRuntime,
        endpoint: str,
        *,
        cluster: Cluster,
        model_name: str = "default",
    ) -> None:
        self._router = router
        self._runtime = runtime
        self._waiting = ThreadPoolExecutor(router.waiting_max, "kvflash-reserve")
        workers = runtime.endpoint(endpoint)
        self._namespace = workers.component.namespace.name
        self._client: Client = workers.client()
        self._workers = DiscoveredWorkers(
            router, runtime.discovery, workers.path, model_name=model_name, cluster=cluster
        )

    async def serve(self) -> None:
        """Serve until the runtime is shut down; discovery that is away is waited for."""
        loop = asyncio.get_running_loop()
        serving = loop.create_task(self._serve())
        shutdown = loop.create_task(self._runtime.wait_for_shutdown())
        try:
            await asyncio.wait({serving, shutdown}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        finally:
            for task in (serving, shutdown):
                task.cancel()
            await asyncio.gather(serving, shutdown, return_exceptions=True)
            self._waiting.shutdown(wait=False, cancel_futures=True)
            await self._workers.close()

    async def _serve(self) -> None:
        await self._workers.start()
        await self._patiently(lambda: self._workers.synced(SYNC_TIMEOUT_S), "the workers")
        router = self._runtime.namespace(self._namespace).component("router")

        async def offer(name: str, handler: Handler) -> None:
            offered = router.endpoint(name)
            await self._patiently(lambda: offered.serve_endpoint(handler), f"a place at {name}")

        await asyncio.gather(
            offer("generate", self.generate), offer("best_worker_id", self.best_worker_id)
        )

    @staticmethod
    async def _patiently(work: Callable[[], Awaitable[None]], what: str) -> None:
        """Try until it works."""
        while True:
            try:
                return await work()
            except (TransportError, OSError) as error:
                logger.warning("waiting for %s: %s", what, error)
            await asyncio.sleep(PAUSE_S)

    async def best_worker_id(self, request: Any) -> AsyncIterator[int]:
        """The worker that a prompt would go to now; nothing is booked.

        Args:
            request: Token ids, or a request as :meth:`generate` takes.
        """
        fields = request if isinstance(request, dict) else {"token_ids": request}
        answer = await self._call("/select", self._choice(fields))
        yield answer["worker_id"]

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """Pass a request on to the best worker, and its items back.

        Before the first item another worker is tried when one can't be reached; afterwards never.
        The load is given back however the stream ends.
        """
        if not isinstance(request, dict):
            raise InvalidArgumentError(f"a request is an object with token_ids, got {request!r}")
        tried: list[int] = []
        failed: KvflashError | None = None
        while True:
            choice = self._choice(request)
            suspects = self._client.suspects()
            if (tried or suspects) and "worker_id" not in choice:
                choice["allowed_worker_ids"] = untried(self._workers.ids, tried, suspects)
            name = f"{context.id()}-{len(tried)}" if tried else context.id()
            try:
                answer = await self._reserve(name, choice)
            except (NoWorkerError, NotFoundError):
                if failed is None:
                    raise
                # There is nobody else: what went wrong is the reason.
                raise failed from None
            worker = answer["worker_id"]
            has_begun, generated = False, 0
            try:
                async for item in self._stream(request, answer, context):
                    has_begun = True
                    generated = max(generated + _tokens_in(item), _generated(item))
                    yield item
                return
            except RETRIED as error:
                tried.append(worker)
                if has_begun or len(tried) >= ATTEMPTS_MAX or "worker_id" in choice:
                    raise
                failed = error
                logger.warning("worker %d: %s; trying another one", worker, error)
            finally:
                self._tell("/free", name, output_tokens=generated)

    async def _stream(
        self, request: dict[str, Any], answer: dict[str, Any], context: Context
    ) -> AsyncIterator[Any]:
        name, is_prefilled = answer["request_id"], False
        sent = {
            "model": "unknown",
            **request,
            "dp_rank": answer["dp_rank"],
            "estimated_prefix_hit_num_blocks": answer["overlap_blocks"],
        }
        told = time.monotonic()
        stream = await self._client.direct(sent, answer["worker_id"], request_id=context.id())
        async with stream:
            async for item in stream:
                now = time.monotonic()
                if not is_prefilled and _has_answer(item):
                    is_prefilled, told = True, now
                    self._tell("/prefill_complete", name)
                elif now - told > TOUCH_INTERVAL_S:
                    told = now
                    self._tell("/touch", name)
                yield item

    def _choice(self, request: dict[str, Any]) -> dict[str, Any]:
        """What of a request is the router's business."""
        choice = {field: request[field] for field in _ROUTING if request.get(field) is not None}
        if "token_ids" not in choice:
            raise InvalidArgumentError("missing field token_ids")
        pinned = request.get("backend_instance_id", request.get("worker_id"))
        if pinned is not None:
            choice["worker_id"] = pinned
        elif "dp_rank" in choice:
            del choice["dp_rank"]
        # Where there is one model, requests may call it what they like.
        if len(self._workers.models) > 1:
            choice["model_name"] = request.get("model")
        return choice

    async def _reserve(self, name: str, choice: dict[str, Any]) -> Any:
        """Book a request, in a thread of its own where it may have to wait."""
        body = {**choice, "request_id": name}
        if not self._router.may_wait:
            return self._router.call("POST", "/reserve", body)
        work = self._waiting.submit(self._router.call, "POST", "/reserve", body)
        call = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not work.cancel():
                # The thread goes on: what it books is nobody's.
                call.add_done_callback(lambda done: self._give_back(done, name))
            raise

    def _give_back(self, call: asyncio.Future[Any], name: str) -> None:
        if not call.cancelled() and call.exception() is None:
            self._tell("/free", name)

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        if self._router.may_wait:
            return await asyncio.to_thread(self._router.call, "POST", path, body)
        return self._router.call("POST", path, body)

    def _tell(self, path: str, name: str, **fields: int) -> None:
        try:
            self._router.call("POST", path, {"request_id": name, **fields})
        except KvflashError as error:
            # It expired, or its worker left: the stream goes on without load.
            logger.debug("%s: %s", path, error)


def _tokens_in(item: Any) -> int:
    """Tokens that a worker's item brings."""
    tokens = item.get("token_ids") if isinstance(item, dict) else None
    return len(tokens) if isinstance(tokens, list | tuple) else 0


def _has_answer(item: Any) -> bool:
    """Whether an item brings something of the answer; some engines tell text alone."""
    return _tokens_in(item) > 0 or (isinstance(item, dict) and bool(item.get("text")))


def _generated(item: Any) -> int:
    """Tokens of the whole answer, where the engine says so."""
    usage = item.get("completion_usage") if isinstance(item, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0


class EndpointThread:
    """An :class:`EndpointRouter` in a thread and an event loop of its own.

    Args:
        router: What decides.
        endpoint: ``namespace.component.endpoint`` of the workers.
        model_name: Model of workers that announce no card.
        cluster: What is shared with other routers of the component.
    """

    def __init__(
        self, router: Decider, endpoint: str, *, model_name: str, cluster: Cluster
    ) -> None:
        self._router, self._cluster = router, cluster
        self._endpoint = endpoint
        self._model_name = model_name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runtime: DistributedRuntime | None = None
        self._failure: BaseException | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvflash-endpoint", daemon=True)

    def start(self) -> None:
        """Begin to follow discovery and to serve.

        Raises:
            ConfigError: The environment names a discovery or plane that can't be.
        """
        self._thread.start()
        self._has_begun.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Leave discovery, let streams end, and end. Blocks until done."""
        if self._loop is not None and self._runtime is not None:
            try:
                self._loop.call_soon_threadsafe(self._runtime.shutdown)
            except RuntimeError:
                # It has ended by itself.
                logger.debug("the endpoint's thread has ended before")
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except ClosedError:
            pass
        except Exception as error:
            self._failure = error
            logger.exception("the router serves its endpoints no more")
        finally:
            self._has_begun.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runtime = DistributedRuntime.detached()
        served = EndpointRouter(
            self._router,
            self._runtime,
            self._endpoint,
            model_name=self._model_name,
            cluster=self._cluster,
        )
        self._has_begun.set()
        async with self._runtime:
            await served.serve()
