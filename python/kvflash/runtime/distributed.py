"""The runtime: one process among others in discovery."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvflash.discovery import Discovery, open_discovery
from kvflash.discovery.announcer import Announcer
from kvflash.discovery.base import new_lease_id
from kvflash.errors import ClosedError, InvalidArgumentError, KvflashError, TransportError
from kvflash.runtime.arguments import check_range
from kvflash.runtime.client import Client
from kvflash.runtime.component import Endpoint, Namespace
from kvflash.runtime.instances import Instances
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import PlaneClients, PlaneServer, make_server
from kvflash.runtime.serving import Handler, Served, Serving
from kvflash.runtime.settings import host_address, plane_name, runtime_port
from kvflash.runtime.signals import Signals

logger = logging.getLogger(__name__)

T = TypeVar("T")

INSTANCES = "v1/instances/"
MODELS = "v1/models/"


class DistributedRuntime(contextlib.AbstractAsyncContextManager["DistributedRuntime"]):
    """Serves endpoints and calls those of other processes.

    It belongs to the event loop that first uses it. A process may have several runtimes.

    Args:
        discovery: ``mem``, ``file``, ``etcd`` or a Discovery; default: KVFLASH_DISCOVERY, else
            ``file``.
        request_plane: ``tcp``, ``http`` or ``nats``, for the endpoints that it serves. Others are
            called over the plane that they announce. Default: KVFLASH_REQUEST_PLANE, else ``tcp``.
        host: Address at which others reach this process; default: KVFLASH_HOST, else 127.0.0.1 for
            mem and file, else the address of the default route.
        port: Port to listen on; default: KVFLASH_RUNTIME_PORT, else any free one.
        limits: Limits of sizes and times.

    Attributes:
        instance_id: Its number, for all of its endpoints: 63 bits, random.
        discovery: Its discovery.
        limits: Its limits.
        host: The address at which others reach this process.

    Raises:
        ConfigError: A setting is invalid.
        InvalidArgumentError: The port is out of range.
    """

    #: The class of its endpoints' clients.
    _client_type = Client

    def __init__(
        self,
        discovery: Discovery | str | None = None,
        request_plane: str | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        limits: RuntimeLimits | None = None,
    ) -> None:
        self._owns_discovery = discovery is None or isinstance(discovery, str)
        self.discovery = (
            discovery if isinstance(discovery, Discovery) else open_discovery(discovery)
        )
        self.limits = limits or RuntimeLimits()
        self.instance_id = new_lease_id()
        self._plane = plane_name(request_plane)
        self.host = host or host_address(is_local=self.discovery.is_local)
        self._port = runtime_port() if port is None else check_range("port", port, 0, 65_535)
        self._serving = Serving(self.instance_id, self.limits)
        self._signals = Signals()
        self.planes = PlaneClients(self.limits)
        self._instances: dict[str, Instances] = {}
        self._announcer = Announcer(
            self.discovery,
            f"instance {self.instance_id}",
            lease_id=self.instance_id,
            ttl_s=self.limits.lease_ttl_s,
        )
        self._server: PlaneServer | None = None
        self._shutdown: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._stopped = asyncio.Event()

    @classmethod
    def detached(cls) -> DistributedRuntime:
        """Create a runtime with the settings of the environment."""
        return cls()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- names

    def namespace(self, name: str) -> Namespace:
        """Return a namespace.

        Raises:
            InvalidArgumentError: The name is not allowed.
        """
        return Namespace(self, name)

    def endpoint(self, path: str) -> Endpoint:
        """Return an endpoint by its three names, ``namespace.component.endpoint`` or with slashes.

        Raises:
            InvalidArgumentError: The path does not have three parts, or one is not allowed.
        """
        parts = str(path).removeprefix("dyn://").replace("/", ".").split(".")
        if len(parts) != 3:
            raise InvalidArgumentError(
                f"endpoint must be namespace.component.endpoint, got {path!r}"
            )
        return self.namespace(parts[0]).component(parts[1]).endpoint(parts[2])

    # -- announcing

    async def announce(self, key: str, value: Any) -> None:
        """Put a key, with a JSON value, for as long as this process lives.

        The key is put again after the lease is lost; if that has just happened, the new lease puts
        it. Raises ClosedError after a shutdown and TransportError if discovery can't be reached.
        """
        self._check_running()
        await self._announcer.announce(key, json.dumps(value).encode())

    async def announce_instance(self, path: str, transport: dict[str, Any]) -> None:
        """Announce that this process serves an endpoint, and how it is reached."""
        names = dict(zip(("namespace", "component", "endpoint"), path.split("/"), strict=True))
        instance = {"instance_id": self.instance_id, **names, "transport": transport}
        await self.announce(self._instance_key(path), instance)

    def _instance_key(self, path: str) -> str:
        return f"{INSTANCES}{path}/{self.instance_id}"

    def announced(self, prefix: str) -> dict[str, Any]:
        """The keys with this prefix that this process has announced. From any thread."""
        keys = dict(self._announcer.keys)
        return {key: json.loads(data) for key, data in keys.items() if key.startswith(prefix)}

    async def withdraw(self, key: str) -> None:
        """Delete an announced key; after a TransportError the background retries the deletion."""
        await self._announcer.withdraw(key)

    # -- serving

    async def serve(
        self, endpoint: Endpoint, handler: Handler, *, requests_max: int | None, is_graceful: bool
    ) -> None:
        """Serve an endpoint until the shutdown; a task that is cancelled withdraws it."""
        self._check_running()
        try:
            served = await self.start_serving(
                endpoint, handler, requests_max=requests_max, is_graceful=is_graceful
            )
        except ClosedError:
            if self._shutdown is None:
                raise
            # The shutdown began meanwhile, and leaves nothing of it.
            await self._stopped.wait()
            return
        try:
            await self._stopped.wait()
        finally:
            if self._shutdown is None:
                await self._stop_serving(served)

    async def start_serving(
        self,
        endpoint: Endpoint,
        handler: Handler,
        *,
        requests_max: int | None = None,
        is_graceful: bool = True,
    ) -> Served:
        """Serve an endpoint until the shutdown; returns once it is announced."""
        path = endpoint.path
        served = self._serving.add(
            path, handler, requests_max=requests_max, is_graceful=is_graceful
        )
        try:
            self._check_running()
            await self._announcer.lease()
            server = await self.server()
            transport = await server.open(path)
            self._signals.take(self.shutdown)
            await self.announce_instance(path, transport)
        except BaseException as error:
            if self._shutdown is None:
                await self._stop_serving(served)
            elif isinstance(error, TransportError):
                # The shutdown has closed what it wanted to use.
                raise ClosedError("the runtime is shut down") from error
            raise
        return served

    async def _stop_serving(self, served: Served) -> None:
        served.is_graceful = False
        key = self._instance_key(served.name)
        try:
            await self.withdraw(key)
        except (KvflashError, OSError) as error:
            logger.warning("%s stays for a while: %s", key, error)
        finally:
            await served.drain(0.0, self.limits.cancel_grace_s)
            self._serving.endpoints.pop(served.name, None)

    async def server(self) -> PlaneServer:
        """The server of the request plane, started by the first call.

        Raises ConfigError if the port can't be bound, TransportError if the broker can't be
        reached, where the next call tries again; ClosedError after a shutdown.
        """
        async with self._beginning:
            self._check_running()
            if self._server is None:
                server = make_server(self._plane, self._serving, host=self.host, port=self._port)
                await server.start()
                if self._shutdown is not None:
                    # The shutdown began meanwhile and knows nothing of this server.
                    await server.close()
                    raise ClosedError("the runtime is shut down")
                self._server = server
            return self._server

    def _check_running(self) -> None:
        if self._shutdown is not None:
            raise ClosedError("the runtime is shut down")

    # -- calling others

    def instances(self, path: str) -> Instances:
        """The instances of an endpoint, shared by all of its clients."""
        self._check_running()
        fresh = Instances(self.discovery, f"{INSTANCES}{path}/")
        return self._instances.setdefault(path, fresh)

    # -- ending

    def shutdown(self) -> None:
        """Start to leave discovery, drain and close. Returns at once; further calls do nothing."""
        if self._shutdown is None:
            self._shutdown = asyncio.get_running_loop().create_task(self._shut_down())

    async def close(self) -> None:
        """Shut down and wait until that is complete."""
        self.shutdown()
        assert self._shutdown is not None
        await asyncio.shield(self._shutdown)

    async def wait_for_shutdown(self) -> None:
        """Wait until the shutdown is complete."""
        await self._stopped.wait()

    def stats(self) -> dict[str, dict[str, int]]:
        """Per served endpoint: running, requests_total, refused_total, failed_total."""
        return {
            path: {"running": len(served.running), **served.counts}
            for path, served in self._serving.endpoints.items()
        }

    async def _shut_down(self) -> None:
        try:
            # The stack closes everything, the last entry first, even if something before it fails.
            async with contextlib.AsyncExitStack() as closing:
                if self._owns_discovery:
                    closing.push_async_callback(self.discovery.close)
                closing.push_async_callback(self.planes.close)
                for instances in self._instances.values():
                    closing.push_async_callback(instances.close)
                if self._server is not None:
                    closing.push_async_callback(self._server.close)
                # First, so that no new request is sent here.
                await self._announcer.close()
                await asyncio.gather(
                    *(
                        served.drain(self.limits.drain_timeout_s, self.limits.cancel_grace_s)
                        for served in self._serving.endpoints.values()
                    )
                )
        except Exception:
            logger.exception("shutting down instance %d", self.instance_id)
        finally:
            self._signals.give_back(self.limits.end_grace_s)
            self._stopped.set()


def kvflash_worker(
    open_runtime: Callable[[], DistributedRuntime] = DistributedRuntime.detached,
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass a coroutine function a runtime as its first argument, and close it afterwards.

    ::

        @kvflash_worker()
        async def worker(runtime): ...

        asyncio.run(worker())

    Args:
        open_runtime: Creates the runtime.
    """

    def wrap(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(function)
        async def run(*args: Any, **options: Any) -> T:
            async with open_runtime() as runtime:
                return await function(runtime, *args, **options)

        return run

    return wrap
