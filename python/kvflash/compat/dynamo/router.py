"""The router, with Dynamo's default of its policy."""

from __future__ import annotations

from kvflash.routing import KvPushRouter as _KvPushRouter
from kvflash.routing import KvRouterConfig as _KvRouterConfig
from kvflash.runtime import Endpoint

__all__ = ["KvPushRouter", "KvRouterConfig"]


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
