"""The router on the request plane: forwards requests to an endpoint's workers, and items back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from kvflash.background import Background
from kvflash.errors import ClosedError, InvalidArgumentError, KvflashError, TransportError
from kvflash.router.workers import DiscoveredWorkers
from kvflash.routing.cluster import Cluster
from kvflash.routing.line import WaitingLine
from kvflash.routing.request import routing_options
from kvflash.routing.stream import Sender
from kvflash.runtime import Context, DistributedRuntime
from kvflash.runtime.serving import Handler

if TYPE_CHECKING:
    from kvflash._core import Router
    from kvflash.router.args import RouterArgs
    from kvflash.router.service import RouterService

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 10.0
# Pause between two attempts to serve.
PAUSE_S = 2.0


class EndpointRouter(Background):
    """Serves ``namespace.router.generate`` and ``namespace.router.best_worker_id``.

    It shares the router with its HTTP service; the settings' endpoint is that of the workers. An
    invalid environment is a ConfigError.
    """

    def __init__(
        self, router: RouterService, core: Router, cluster: Cluster, args: RouterArgs
    ) -> None:
        self._runtime = DistributedRuntime.detached()
        workers = self._runtime.endpoint(args.endpoint)
        self._component = workers.component.namespace.component("router")
        self._workers = DiscoveredWorkers(
            core, self._runtime.discovery, workers.path, cluster, model_name=args.model_name
        )
        self._decider, self._is_slow = router.decider, router.is_slow
        self._line = WaitingLine(self._decider, args.router_queue_timeout, is_slow=router.is_slow)
        self._sender = Sender(self._line, workers.client(), lambda: self._workers.ids)
        super().__init__("the router on the request plane", self._route, is_cancelled=False)

    def start(self) -> None:
        """Start following discovery and serving; ConfigError for a runtime port that is taken."""
        self.start_and_wait()

    async def _route(self) -> None:
        """Serve until the stop, which lets streams end; waits for discovery if it is down."""
        async with self._runtime:
            try:
                await self._runtime.server()
            except TransportError as error:
                logger.warning("waiting for the request plane: %s", error)
            serving = asyncio.ensure_future(self._serve())
            ending = asyncio.ensure_future(self.ending.wait())
            self.ready()
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, ending):
            task.cancel()
        self._line.close()
        await self._workers.close()
        with contextlib.suppress(asyncio.CancelledError, ClosedError):
            await serving

    async def _serve(self) -> None:
        self._workers.start()
        await self._patiently(lambda: self._workers.synced(SYNC_TIMEOUT_S), "the workers")

        async def offer(name: str, handler: Handler) -> None:
            offered = self._component.endpoint(name)
            await self._patiently(lambda: offered.serve_endpoint(handler), f"a place at {name}")

        await asyncio.gather(
            offer("generate", self.generate), offer("best_worker_id", self.best_worker_id)
        )

    @staticmethod
    async def _patiently(work: Callable[[], Awaitable[None]], what: str) -> None:
        while True:
            try:
                return await work()
            except ClosedError:
                raise
            except (KvflashError, OSError) as error:
                # Includes a refused login of discovery or the broker, which may be valid later.
                logger.warning("waiting for %s: %s", what, error)
            await asyncio.sleep(PAUSE_S)

    async def best_worker_id(self, request: Any) -> AsyncIterator[int]:
        """The worker that token ids or a request would go to now; nothing is booked."""
        fields = request if isinstance(request, dict) else {"token_ids": request}
        query = functools.partial(self._decider.query, _tokens(fields), _options(fields))
        worker_id, _, _, _ = await asyncio.to_thread(query) if self._is_slow else query()
        yield worker_id

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """Forward a request to the best worker, and return its items.

        If a worker can't be reached before the first item, another one is tried; after it never.
        The load is released however the stream ends.
        """
        if not isinstance(request, dict):
            raise InvalidArgumentError(f"a request is an object with token_ids, got {request!r}")
        _tokens(request)
        options, sent = _options(request), {"model": "unknown", **request}
        async with await self._sender.send(sent, options, context.id()) as stream:
            async for item in stream:
                yield item


def _options(request: dict[str, Any]) -> dict[str, Any]:
    return {**routing_options(request), "model_name": request.get("model")}


def _tokens(request: dict[str, Any]) -> Any:
    if request.get("token_ids") is None:
        raise InvalidArgumentError("missing field token_ids")
    return request["token_ids"]
