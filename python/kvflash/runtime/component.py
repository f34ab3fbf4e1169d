"""Names: a namespace has components, a component has endpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvflash.errors import InvalidArgumentError
from kvflash.runtime.client import Client
from kvflash.runtime.serving import Handler

if TYPE_CHECKING:
    from kvflash.runtime.distributed import DistributedRuntime

__all__ = ["Component", "Endpoint", "Namespace", "check_name"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")


def check_name(what: str, name: str) -> str:
    """Refuse a name that a key, an address or a subject could not hold.

    Raises:
        InvalidArgumentError: It is not 1 to 48 letters, digits, ``_`` and ``-``.
    """
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
        """A component of it.

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
        """An endpoint of it.

        Raises:
            InvalidArgumentError: The name is not allowed.
        """
        return Endpoint(self, name)


class Endpoint:
    """Something that the workers of a component can be asked.

    Attributes:
        runtime: The runtime.
        component: What it belongs to.
        name: Its own name.
        path: ``namespace/component/endpoint``.
    """

    def __init__(self, component: Component, name: str) -> None:
        self.runtime = component.runtime
        self.component = component
        self.name = check_name("endpoint", name)
        self.path = f"{component.namespace.name}/{component.name}/{self.name}"

    def client(self) -> Client:
        """Who asks its instances; may be awaited, and need not be."""
        return Client(self, self.runtime.instances(self.path))

    def instance_id(self) -> int:
        """The number that this process has among the instances: that of its runtime."""
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
                :class:`Context` if it takes two arguments. What it yields is sent as it is yielded;
                while the reader is slow it is not asked for more. What it raises reaches the
                client: errors of this package as they are, others as WorkerError.
            graceful_shutdown: Let running streams end before the process does, for up to
                drain_timeout_s.
            max_concurrent_requests: Requests served at once; further ones are refused as
                overloaded, and clients go elsewhere. Default: the runtime's requests_max.

        Raises:
            ConflictError: It is served already.
            ConfigError: The address can't be bound.
            TransportError: Discovery or the broker can't be reached.
        """
        await self.runtime.serve(
            self,
            handler,
            requests_max=max_concurrent_requests,
            is_graceful=graceful_shutdown,
        )
