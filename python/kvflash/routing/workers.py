"""The workers of an endpoint, as discovery tells them to a core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvflash._core import RouterCore
from kvflash.discovery import Delete, Discovery, Put, Synced
from kvflash.errors import ClosedError, DecodeError, KvflashError, TransportError
from kvflash.routing.cluster import Cluster
from kvflash.routing.keys import read_key
from kvflash.routing.membership import Membership, tenant_of

__all__ = ["Workers"]

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.5
RANKS_MAX = 1_024


@dataclass
class _Known:
    """What the keys of one prefix say, by what follows the prefix."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    synced: asyncio.Event = field(default_factory=asyncio.Event)


#: Begins to serve, with the model's name and tenant where that matters; what to tell from then on.
Serve = Callable[[tuple[str, str] | None], tuple[RouterCore, Cluster]]


class Workers:
    """Keeps a core's workers, ranks and event sockets as discovery has them.

    Where events come over NATS a worker counts once it has a model card, and the first ones when
    the state of their component is there.

    Args:
        core: The core.
        discovery: Where to look.
        path: ``namespace/component/endpoint``.
        cluster: What is shared with other routers of the component.
        serve: Is called at the start; over NATS when the model's name is known.
    """

    def __init__(
        self, core: RouterCore, discovery: Discovery, path: str, cluster: Cluster, *, serve: Serve
    ) -> None:
        self._core, self._cluster, self._serve = core, cluster, serve
        namespace, name, self._endpoint = path.split("/", 2)
        self._component = (namespace, name)
        self._discovery = discovery
        component = path.rpartition("/")[0]
        self._prefixes = {
            # Of all endpoints: what is in the stream is of all.
            "instances": f"v1/instances/{component}/",
            "models": f"v1/models/{path}/",
            "events": f"v1/events/{component}/",
        }
        self._known = {kind: _Known() for kind in self._prefixes}
        self._tasks: list[asyncio.Task[None]] = []
        self._subscribed: dict[tuple[int, int], tuple[str, str | None]] = {}
        self._workers: list[tuple[int, int]] = []
        self._warned: set[int] = set()
        #: Events come over NATS.
        self.is_brokered = cluster.is_nats and core.uses_events
        self._model: tuple[str, str] | None = None
        self._is_serving = False
        self._setting = asyncio.Lock()
        self._attaching: asyncio.Task[None] | None = None
        self._members: Membership | None = None

    @property
    def ids(self) -> list[int]:
        """Instances that are there now, ascending."""
        return sorted({worker for worker, _ in self._workers})

    def start(self) -> None:
        """Follow discovery; needs a running event loop."""
        loop = asyncio.get_running_loop()
        if not self.is_brokered:
            self._core, self._cluster = self._serve(None)
            self._members = Membership(self._cluster, self._component)
            self._is_serving = True
        self._tasks = [loop.create_task(self._follow(kind)) for kind in self._prefixes]

    async def synced(self, timeout_s: float) -> None:
        """Wait until what is there is known.

        Raises:
            TransportError: Discovery did not answer in time.
        """
        waiting = [one.synced.wait() for one in self._known.values() if not one.synced.is_set()]
        if waiting:
            try:
                await asyncio.wait_for(asyncio.gather(*waiting), timeout_s)
            except asyncio.TimeoutError as error:
                raise TransportError(
                    f"discovery has not answered within {timeout_s:g} s"
                ) from error
        if self._attaching is not None and not self._attaching.done():
            # It ends by itself, with what is there.
            await asyncio.shield(self._attaching)

    async def close(self) -> None:
        """Follow no more."""
        tasks = [*self._tasks, *([self._attaching] if self._attaching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._members is not None:
            self._members.close()

    async def _follow(self, kind: str) -> None:
        while True:
            try:
                async with self._discovery.watch(self._prefixes[kind]) as watch:
                    async for event in watch:
                        await self._take(kind, event)
                return
            except ClosedError:
                return
            except KvflashError as error:
                # Backends reconnect by themselves; what they give up on is tried again anyway.
                logger.warning("%s: %s", self._prefixes[kind], error)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _take(self, kind: str, event: Put | Delete | Synced) -> None:
        known = self._known[kind]
        if isinstance(event, Synced):
            known.synced.set()
            self._settle()
            return
        name = event.key.removeprefix(self._prefixes[kind])
        if isinstance(event, Put):
            try:
                known.values[name] = read_key(event.key, event.value)
            except DecodeError as error:
                logger.error("discovery key %s: %s", event.key, error)
                return
        else:
            known.values.pop(name, None)
        if kind == "events":
            self._subscribe()
        else:
            async with self._setting:
                # First: what it tells is told before the core hears of them.
                self._settle()
                # What is told meanwhile waits for this to be done.
                wanted = self._wanted()
                await self._let_go(wanted)
                self._set_workers(wanted)
                # The core forgot the blocks of those that left: should they come back, their events
                # are asked for anew.
                self._subscribe()

    async def _let_go(self, wanted: list[tuple[int, int]]) -> None:
        """What is shared hears of those that leave before the core forgets them."""
        if self._members is not None:
            for worker in set(self.ids) - {worker for worker, _ in wanted}:
                await self._members.let_go(worker)

    def _settle(self) -> None:
        """Once all are known, and when that changes."""
        if self._members is not None and self._known["instances"].synced.is_set():
            self._members.settle(list(self._known["instances"].values))

    async def _attach(self, model: tuple[str, str]) -> None:
        """Serve this model with what its component's stream tells."""
        self._model = model
        self._core, self._cluster = self._serve(model)
        self._members = Membership(self._cluster, self._component)
        await self._members.follow()
        self._is_serving = True
        self._settle()
        self._set_workers(self._wanted())
        self._subscribe()

    def _wanted(self) -> list[tuple[int, int]]:
        """Workers and ranks that discovery tells of, ascending."""
        cards = self._known["models"].values
        workers = []
        for name in self._known["instances"].values:
            endpoint, _, number = name.rpartition("/")
            if endpoint != self._endpoint:
                continue
            card = cards.get(number, {})
            if self.is_brokered and not self._has_model(int(number), card):
                continue
            self._check(int(number), card)
            size = card.get("dp_size")
            ranks = size if isinstance(size, int) and 1 <= size <= RANKS_MAX else 1
            workers += [(int(number), rank) for rank in range(ranks)]
        return sorted(workers)

    def _set_workers(self, workers: list[tuple[int, int]]) -> None:
        if not self._is_serving:
            return
        cards = self._known["models"].values
        try:
            if workers != self._workers:
                self._core.set_workers(workers)
                before, self._workers = set(self.ids), workers
                self._share(before, set(self.ids))
        except KvflashError as error:
            logger.error("the router does not take all workers: %s", error)
            return
        for worker, rank in workers:
            card = cards.get(str(worker), {})
            self._core.report(
                worker,
                rank,
                kv_total_blocks=_count(card.get("total_kv_blocks")),
                max_num_batched_tokens=_count(card.get("max_num_batched_tokens")),
            )

    def _share(self, before: set[int], now: set[int]) -> None:
        assert self._members is not None
        for worker in before - now:
            self._members.tell(self._cluster.worker_gone, worker)
        for worker in now - before:
            self._members.tell(self._cluster.instance_joined, self._component, worker)
            # The first one of a component connects.
            self._members.tell(self._cluster.worker_joined, self._component, worker)

    def _has_model(self, worker: int, card: dict[str, Any]) -> bool:
        """Whether it has a card; the first one says which model is served."""
        name = card.get("model_name")
        if not isinstance(name, str):
            return False
        model = (name, tenant_of(card))
        if self._attaching is None:
            self._attaching = asyncio.get_running_loop().create_task(self._attach(model))
        elif self._model is not None and self._model != model and worker not in self._warned:
            self._warned.add(worker)
            logger.error(
                "worker %d serves %r of tenant %r, this router %r of %r: its cache earns no credit",
                worker, *model, *self._model,
            )  # fmt: skip
        return True

    def _check(self, worker: int, card: dict[str, Any]) -> None:
        """Another block size makes everything score 0: that must not go unsaid."""
        size = card.get("kv_cache_block_size")
        if size is None or size == self._core.block_size or worker in self._warned:
            return
        self._warned.add(worker)
        logger.error(
            "worker %d has blocks of %r tokens, this router of %d: its blocks never match; give "
            "the router block_size=%r",
            worker,
            size,
            self._core.block_size,
            size,
        )

    def _subscribe(self) -> None:
        """Listen to the sockets that the core's workers announce, and to no others."""
        if not (self._core.uses_events and self._is_serving):
            return
        ids = set(self.ids)
        wanted: dict[tuple[int, int], tuple[str, str | None]] = {}
        for name, value in self._known["events"].values.items():
            worker, _, rank = name.partition("/")
            # What is in the stream comes by itself.
            if int(worker) in ids and self._cluster.events(int(worker), {int(rank): value}):
                sockets = (value["endpoint"], value.get("replay_endpoint"))
                wanted[int(worker), int(rank)] = sockets
        for key, sockets in list(self._subscribed.items()):
            if wanted.get(key) != sockets:
                del self._subscribed[key]
                self._core.unsubscribe(*key)
        for key, sockets in wanted.items():
            if key in self._subscribed:
                continue
            try:
                self._core.subscribe(*key, *sockets)
                self._subscribed[key] = sockets
            except KvflashError as error:
                logger.error("events of worker %d rank %d: %s", *key, error)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 < value < 2**63 else None
