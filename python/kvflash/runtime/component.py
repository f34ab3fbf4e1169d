"""Names: a namespace contains components, a component contains endpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvflash.errors import InvalidArgumentError
from kvflash.runtime.client import Client
from kvflash.runtime.serving import Handler

if TYPE_CHECKING:
    from kvflash.runtime.distributed import DistributedRuntime

_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")


def check_name(what: str, name: str) -> str:
    """Refuse, as InvalidArgumentError, a name that is invalid in keys, addresses and subjects."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{what} must have 1 to 48 of the characters A-Z a-z 0-9 _ -, got {name!r}"
        )
    return name


class Namespace:
    """A group of components that belong together."""

    def __init__(self, runtime: DistributedRuntime, name: str) -> None:
        self.runtime = runtime
        self.name = check_name("namespace", name)

    def component(self, name: str) -> Component:
        """Return one of its components.

        Raises:
            InvalidArgumentError: The name is not allowed.
        """
        return Component(self, name)


class Component:
    """Workers of one kind."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.runtime = namespace.runtime
        self.namespace = namespace
        self.name = check_name("component", name)

    def endpoint(self, name: str) -> Endpoint:
        """Return one of its endpoints.

        Raises:
            InvalidArgumentError: The name is not allowed.
        """
        return Endpoint(self, name)


class Endpoint:
    """An operation that the workers of a component serve.

    Attributes:
        runtime: The runtime.
        component: The component that it belongs to.
        name: The last part of the path.
        path: ``namespace/component/endpoint``.
    """

    def __init__(self, component: Component, name: str) -> None:
        self.runtime = component.runtime
        self.component = component
        self.name = check_name("endpoint", name)
        self.path = f"{component.namespace.name}/{component.name}/{self.name}"

    def client(self) -> Client:
        """A client of its instances; awaiting it is optional."""
        return self.runtime._client_type(self, self.runtime.instances(self.path))

    def instance_id(self) -> int:
        """This process's instance number, which is that of its runtime."""
        return self.runtime.instance_id

    lease_id = connection_id = instance_id

    async def serve_endpoint(
        self,
        handler: Handler,
        graceful_shutdown: bool = True,
        *,
        max_concurrent_requests: int | None = None,
    ) -> None:
        """Serve until the runtime is shut down, by SIGTERM or :meth:`DistributedRuntime.shutdown`.

        Args:
            handler: An async generator function, called with the request, and with the
                :class:`Context` if it takes two arguments. Each item is sent as it is yielded;
                while the reader is slow, the generator is paused. Exceptions reach the client:
                errors of this package unchanged, others as WorkerError.
            graceful_shutdown: Let running streams finish before the process ends, for up to
                drain_timeout_s.
            max_concurrent_requests: Requests served at once; further ones are refused as
                overloaded, and clients try another instance. Default: the runtime's requests_max.

        Raises:
            ConflictError: The endpoint is already served.
            ConfigError: The address can't be bound.
            TransportError: Discovery or the broker can't be reached.
        """
        await self.runtime.serve(
            self, handler, requests_max=max_concurrent_requests, is_graceful=graceful_shutdown
        )
