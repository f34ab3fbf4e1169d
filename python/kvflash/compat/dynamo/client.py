"""The runtime with Dynamo's names of arguments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvflash.errors import InvalidArgumentError
from kvflash.runtime import Client as _Client
from kvflash.runtime import Component, Endpoint, Namespace, Stream, kvflash_worker
from kvflash.runtime import DistributedRuntime as _DistributedRuntime

T = TypeVar("T")


class Client(_Client):
    """A client whose ``direct`` also takes ``input`` and ``component_id``."""

    async def direct(
        self,
        request: Any = None,
        instance_id: int | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        input: Any = None,  # noqa: A002 - the name that scripts use
        component_id: int | None = None,
    ) -> Stream:
        """Send a request to this instance only.

        Args:
            request: The request.
            instance_id: Number of the instance.
            request_id: Name of the request; random if omitted.
            timeout_s: Time limit of the whole answer.
            input: Alias of ``request``.
            component_id: Alias of ``instance_id``.

        Raises:
            InvalidArgumentError: The request or the instance is missing or given twice.
            NotFoundError: The instance does not exist.
        """
        payload = _one("request", request, "input", input)
        number = _one("instance_id", instance_id, "component_id", component_id)
        return await super().direct(payload, number, request_id=request_id, timeout_s=timeout_s)


def _one(name: str, value: Any, alias: str, other: Any) -> Any:
    if (value is None) == (other is None):
        problem = "missing" if value is None else "given twice"
        raise InvalidArgumentError(f"direct() takes {name} or {alias}, and one is {problem}")
    return other if value is None else value


class _Endpoint(Endpoint):
    def client(self) -> Client:
        return Client(self, self.runtime.instances(self.path))


class _Component(Component):
    def endpoint(self, name: str) -> Endpoint:
        return _Endpoint(self, name)


class _Namespace(Namespace):
    def component(self, name: str) -> Component:
        return _Component(self, name)


class DistributedRuntime(_DistributedRuntime):
    """A runtime that returns clients of :class:`Client`."""

    def namespace(self, name: str) -> Namespace:
        """A namespace.

        Raises:
            InvalidArgumentError: The name is not allowed.
        """
        return _Namespace(self, name)


def dynamo_worker(
    *_: Any, **__: Any
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass a runtime to a coroutine function as its first argument, and close it afterwards.

    Arguments such as ``static`` are accepted and have no effect.
    """
    return kvflash_worker(DistributedRuntime.detached)
