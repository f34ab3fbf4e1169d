"""Keeps a router's workers equal to the instances of one endpoint."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvflash.background import cancel
from kvflash.discovery import Discovery
from kvflash.roster.core import Component, Replicas, Taker, component_of
from kvflash.roster.feed import NO_PLANE, WorkerFeed
from kvflash.roster.keys import Name


class EndpointWorkers(WorkerFeed):
    """Keeps a core's workers, ranks and event sockets in line with an endpoint in discovery.

    ``model_name`` is the model of workers without a name or a card. With events over NATS they wait
    for a card, because events belong to a model.
    """

    def __init__(
        self, fleet: Taker, discovery: Discovery, path: str, cluster: Replicas, *, model_name: str
    ) -> None:
        super().__init__(fleet, discovery, path, cluster=cluster)
        self._path, self._model_name = path, model_name
        self._following: list[asyncio.Task[None]] = []

    @property
    def ids(self) -> list[int]:
        """Numbers of the workers, ascending."""
        return sorted(self._told)

    def start(self) -> None:
        """Follow discovery; needs a running event loop."""
        self._following = [asyncio.get_running_loop().create_task(self.follow())]

    async def synced(self, timeout_s: float) -> None:
        """Wait until the current instances are known; TransportError if that takes too long."""
        await self._keys.synced(timeout_s)

    async def close(self) -> None:
        """Follow no more; workers stay."""
        following, self._following = self._following, []
        await cancel(following)
        await super().close()

    def _card(self, name: Name) -> dict[str, Any] | None:
        if name[0] != self._path or name not in self._keys.instances:
            return None
        return self._keys.cards.get(name) or (None if self._cluster.is_nats else {})

    async def _tell_safely(self, name: Name) -> None:
        await super()._tell_safely(name)
        path, instance_id = name
        if path != self._path and name in self._keys.instances:
            # The component's events, and snapshots of them, include its other endpoints' workers.
            await self._share(self._cluster.instance_joined, component_of(path), instance_id)

    async def _ask(self, call: Callable[..., object], *args: object) -> None:
        """Call the core at once: it takes microseconds."""
        call(*args)

    async def _give_up_change(self, component: Component, instance_id: int) -> None:
        # What the core may still have is no longer true.
        await self._remove(component, instance_id)

    def _events(self, name: Name) -> dict[str, Any]:
        return self._cluster.events(self._keys.events_of(name))

    async def _fields(self, name: Name, card: dict[str, Any]) -> dict[str, Any]:
        (path, instance_id), events = name, self._keys.events_of(name)
        transport = self._keys.instances[name]["transport"]
        sizes = (value.get("block_size") for value in events.values())
        known = {key: card.get(key) for key in ("total_kv_blocks", "max_num_batched_tokens")}
        return {
            "id": instance_id,
            "plane": NO_PLANE,
            "endpoint": path,
            "url": transport.get("url") or transport.get("address") or transport.get("subject"),
            "card": {
                **known,
                "model_name": card.get("model_name") or self._model_name,
                # Over NATS prefill-only workers have an index of their own.
                "model_type": (self._cluster.is_nats and card.get("model_type")) or [],
                "dp_size": max([card.get("dp_size") or 1, *(rank + 1 for rank in events)]),
                "kv_cache_block_size": card.get("kv_cache_block_size")
                or next(filter(None, sizes), None),
            },
        }
