"""Classes and functions with Dynamo's names and arguments: its runtime, its router, its index."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from kvflash.errors import InvalidArgumentError
from kvflash.routing.config import KvRouterConfig as _KvRouterConfig
from kvflash.routing.request import override_options
from kvflash.routing.router import KvPushRouter as _KvPushRouter
from kvflash.runtime import Client as _Client
from kvflash.runtime import Component, Stream, kvflash_worker
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
        raise InvalidArgumentError(
            f"direct() takes one argument {name} (or its alias {alias}), which is {problem}"
        )
    return other if value is None else value


class DistributedRuntime(_DistributedRuntime):
    """A runtime that returns clients of :class:`Client`."""

    _client_type = Client


def dynamo_worker(
    *_: Any, **__: Any
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass a runtime to a coroutine function as its first argument, and close it afterwards.

    Arguments such as ``static`` are accepted and have no effect.
    """
    return kvflash_worker(DistributedRuntime.detached)


class KvRouterConfig(_KvRouterConfig):
    """Settings whose ``router_mode`` is ``kv`` by default.

    Dynamo's documents print the formula that decides. ``KVFLASH_ROUTING_ALGORITHM`` in the
    environment, and ``router_mode``, take precedence.
    """

    _is_kv_meant = True


class KvPushRouter(_KvPushRouter):
    """A router that takes these settings by default."""

    _default_config = KvRouterConfig


class RouterMode(Enum):
    """Dynamo's routing modes; each value is the policy's name here."""

    RoundRobin = "round-robin"
    Random = "random"
    PowerOfTwoChoices = "power-of-two"
    LeastLoaded = "least-loaded"
    KV = "kv"


def RouterConfig(  # noqa: N802 - the name that scripts call
    mode: RouterMode | None = None, config: _KvRouterConfig | None = None, **settings: Any
) -> _KvRouterConfig:
    """Combine a mode and settings.

    Args:
        mode: The mode; None: that of ``config``.
        config: Settings; None: the defaults.
        **settings: Fields of :class:`KvRouterConfig` that replace those of ``config``.

    Raises:
        ConfigError: A setting is out of range or contradicts another.
        TypeError: The setting does not exist.
    """
    if mode is not None:
        settings["router_mode"] = mode.value
    return dataclasses.replace(config or KvRouterConfig(), **settings)


class RouterConfigOverride(dict[str, Any]):
    """A ``router_config_override``: ``RouterConfigOverride(overlap_score_weight=2.0)``.

    Raises:
        InvalidArgumentError: An unknown setting; names the known ones.
    """

    def __init__(self, **settings: Any) -> None:
        override_options(settings)
        super().__init__(settings)


class Matches(dict[int, int]):
    """Leading blocks that each worker holds, by worker id; workers without any are left out."""

    @property
    def scores(self) -> dict[int, int]:
        """The same as a plain dictionary."""
        return dict(self)


class KvIndexer:
    """Counts which workers of a component hold how much of a prompt.

    Args:
        component: The workers' component; its endpoint is ``generate``.
        kv_block_size: Tokens in a block of these workers.

    Raises:
        InvalidArgumentError: The block size is 0 or too large.
    """

    def __init__(self, component: Component, kv_block_size: int) -> None:
        self._block_size = kv_block_size
        self._router = _KvPushRouter(
            component.endpoint("generate"), kv_block_size, _KvRouterConfig()
        )

    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    async def find_matches_for_request(
        self, token_ids: Sequence[int], lora_id: int | None = None
    ) -> Matches:
        """Count the leading blocks of a prompt that each worker holds.

        Args:
            token_ids: The prompt.
            lora_id: Accepted for compatibility; has no effect.

        Raises:
            InvalidArgumentError: The prompt is empty.
        """
        found = Matches()
        if len(token_ids) < self._block_size:
            return found
        for load in await self._router.get_potential_loads(token_ids):
            held = load["overlap_blocks"]
            # Of several ranks the one with the most blocks counts.
            if held > found.get(load["worker_id"], 0):
                found[load["worker_id"]] = held
        return found

    async def aclose(self) -> None:
        """Stop following events."""
        await self._router.aclose()
