"""The router, with Dynamo's names and its default of the policy."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from kvflash.routing.config import KvRouterConfig as _KvRouterConfig
from kvflash.routing.config import override_options
from kvflash.routing.router import KvPushRouter as _KvPushRouter
from kvflash.runtime import Endpoint


class KvRouterConfig(_KvRouterConfig):
    """Settings whose ``router_mode`` is ``kv`` by default.

    Dynamo's documents print the formula that decides. ``KVFLASH_ROUTING_ALGORITHM`` in the
    environment, and ``router_mode``, take precedence.
    """

    _is_kv_meant = True


class KvPushRouter(_KvPushRouter):
    """A router that takes these settings by default.

    Args:
        endpoint: Endpoint that the workers serve.
        block_size: Tokens in a block of the workers.
        kv_router_config: Routing settings.

    Raises:
        InvalidArgumentError: The block size is 0 or too large.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: _KvRouterConfig | None = None,
    ) -> None:
        super().__init__(endpoint, block_size, kv_router_config or KvRouterConfig())


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
