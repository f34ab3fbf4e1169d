"""The workers of an endpoint, as discovery tells them, registered with the router."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from kvflash.discovery import Discovery, Put, Synced
from kvflash.errors import ClosedError, DecodeError, KvflashError, TransportError
from kvflash.routing.cluster import Cluster
from kvflash.routing.keys import read_key
from kvflash.routing.membership import Membership, tenant_of

__all__ = ["DiscoveredWorkers", "Registrar"]

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.5
# What was refused may be taken later: a limit has room again, or the other model has left.
AGAIN_S = 5.0


class Registrar(Protocol):
    """Where workers are registered."""

    def add_worker(self, worker: dict[str, Any]) -> Any:
        """Register one."""

    def remove_worker(self, worker_id: int) -> None:
        """Forget one."""


class DiscoveredWorkers:
    """Keeps the router's workers as discovery has those of one endpoint.

    A worker is there as long as its instance is; what its model card and its event sockets say is
    part of its registration. One that changes what it says is registered anew.

    Args:
        router: Where they are registered.
        discovery: Where to look.
        path: ``namespace/component/endpoint``.
        model_name: Model of workers that announce no card. Where events come over NATS these
            wait for one: events are told by model.
        cluster: What is shared with other routers of the component.
    """

    def __init__(
        self,
        router: Registrar,
        discovery: Discovery,
        path: str,
        *,
        model_name: str,
        cluster: Cluster,
    ) -> None:
        self._router, self._cluster = router, cluster
        self._discovery = discovery
        self._model_name = model_name
        component, _, self._endpoint = path.rpartition("/")
        namespace, _, name = component.partition("/")
        self._component = (namespace, name)
        self._members = Membership(cluster, self._component)
        self._prefixes = {
            # Of all endpoints: what is in the stream is of all.
            "instances": f"v1/instances/{component}/",
            "models": f"v1/models/{path}/",
            "events": f"v1/events/{component}/",
        }
        self._values: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in self._prefixes}
        self._synced = {kind: asyncio.Event() for kind in self._prefixes}
        self._tasks: list[asyncio.Task[None]] = []
        self._registering = asyncio.Lock()
        self._registered: dict[int, dict[str, Any]] = {}
        self._refused: dict[int, dict[str, Any]] = {}

    @property
    def ids(self) -> list[int]:
        """Numbers of those that are registered now, ascending."""
        return sorted(self._registered)

    @property
    def models(self) -> set[tuple[str, str]]:
        """Models, and their tenants, of those that are registered now."""
        return {(body["model_name"], body["tenant_id"]) for body in self._registered.values()}

    async def start(self) -> None:
        """Follow discovery, when what the component's stream tells is known."""
        loop = asyncio.get_running_loop()
        if self._cluster.is_nats:
            await self._members.follow()
        self._tasks = [loop.create_task(self._follow(kind)) for kind in self._prefixes]
        self._tasks.append(loop.create_task(self._try_again()))

    async def synced(self, timeout_s: float) -> None:
        """Wait until what is there is registered.

        Raises:
            TransportError: Discovery did not answer in time.
        """
        waiting = asyncio.gather(*(event.wait() for event in self._synced.values()))
        try:
            await asyncio.wait_for(waiting, timeout_s)
        except asyncio.TimeoutError as error:
            raise TransportError(f"discovery has not answered within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Follow no more; workers stay as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._members.close()

    async def _follow(self, kind: str) -> None:
        while True:
            try:
                async with self._discovery.watch(self._prefixes[kind]) as watch:
                    async for event in watch:
                        if isinstance(event, Synced):
                            self._synced[kind].set()
                        else:
                            value = event.value if isinstance(event, Put) else None
                            self._take(kind, event.key, value)
                        # A worker's three keys belong together: what the other watches have at hand
                        # comes first, or it would be registered without its card for a moment.
                        await asyncio.sleep(0)
                        if all(one.is_set() for one in self._synced.values()):
                            async with self._registering:
                                # First: what it tells is told before the router hears of them.
                                self._members.settle(list(self._values["instances"]))
                                await self._register()
                return
            except ClosedError:
                return
            except KvflashError as error:
                # Backends reconnect by themselves; what they give up on is tried again anyway.
                logger.warning("%s: %s", self._prefixes[kind], error)
                await asyncio.sleep(RESTART_PAUSE_S)

    def _take(self, kind: str, key: str, value: bytes | None) -> None:
        name = key.removeprefix(self._prefixes[kind])
        if value is None:
            self._values[kind].pop(name, None)
            return
        try:
            self._values[kind][name] = read_key(key, value)
        except DecodeError as error:
            logger.error("discovery key %s: %s", key, error)

    async def _try_again(self) -> None:
        """Now and then, those that were refused."""
        while True:
            await asyncio.sleep(AGAIN_S)
            async with self._registering:
                if self._refused:
                    await self._register(is_again=True)

    async def _register(self, *, is_again: bool = False) -> None:
        wanted = {}
        for name, instance in self._values["instances"].items():
            endpoint, _, number = name.rpartition("/")
            is_named = number in self._values["models"] or not self._cluster.is_nats
            if endpoint == self._endpoint and number.isdecimal() and is_named:
                wanted[int(number)] = self._body(int(number), instance)
        for worker_id in [i for i, body in self._registered.items() if wanted.get(i) != body]:
            await self._members.let_go([worker_id])
            try:
                self._router.remove_worker(worker_id)
            except KvflashError as error:
                logger.error("%s", error)
            del self._registered[worker_id]
            is_again = True
        self._refused = {i: body for i, body in self._refused.items() if wanted.get(i) == body}
        for worker_id, body in wanted.items():
            if worker_id in self._registered or (worker_id in self._refused and not is_again):
                continue
            try:
                self._router.add_worker(body)
            except KvflashError as error:
                # Said once.
                if worker_id not in self._refused:
                    logger.error("worker %d: %s; trying again", worker_id, error)
                self._refused[worker_id] = body
                continue
            self._refused.pop(worker_id, None)
            self._registered[worker_id] = body
            self._members.tell(self._cluster.instance_joined, self._component, worker_id)
            # The first one of a component connects.
            self._members.tell(self._cluster.worker_joined, self._component, worker_id)

    def _body(self, worker_id: int, instance: dict[str, Any]) -> dict[str, Any]:
        number = str(worker_id)
        card = self._values["models"].get(number, {})
        transport = instance["transport"]
        ranks = {
            int(rank): value
            for key, value in self._values["events"].items()
            for owner, _, rank in [key.partition("/")]
            if owner == number and rank.isdecimal()
        }
        sizes = [value.get("block_size") for value in ranks.values()]
        return {
            "worker_id": worker_id,
            "model_name": card.get("model_name") or self._model_name,
            "tenant_id": tenant_of(card) if self._cluster.is_nats else "default",
            "url": transport.get("url") or transport.get("address") or transport.get("subject"),
            "dp_size": max([card.get("dp_size") or 1, *(rank + 1 for rank in ranks)]),
            "block_size": card.get("kv_cache_block_size") or next(filter(None, sizes), None),
            "events": self._cluster.events(worker_id, dict(sorted(ranks.items()))),
            "kv_total_blocks": card.get("total_kv_blocks"),
            "max_num_batched_tokens": card.get("max_num_batched_tokens"),
        }
