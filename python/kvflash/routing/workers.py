"""The workers of an endpoint, as discovery tells them to a core."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from kvflash._core import RouterCore
from kvflash.discovery import Delete, Discovery, Put, Synced
from kvflash.errors import ClosedError, KvflashError, TransportError
from kvflash.routing.sharing import Sharing

__all__ = ["Workers"]

logger = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.5
RANKS_MAX = 1_024


@dataclass
class _Known:
    """What the keys of one prefix say, by what follows the prefix."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    synced: asyncio.Event = field(default_factory=asyncio.Event)


class Workers:
    """Keeps a core's workers, ranks and event sockets as discovery has them.

    Args:
        core: The core.
        discovery: Where to look.
        path: ``namespace/component/endpoint``.
        sharing: Shares bookings with other routers of the component.
    """

    def __init__(
        self,
        core: RouterCore,
        discovery: Discovery,
        path: str,
        sharing: Sharing | None = None,
    ) -> None:
        self._core = core
        namespace, name, _ = path.split("/", 2)
        self._component = (namespace, name)
        self._sharing = sharing
        self._joining: set[asyncio.Task[None]] = set()
        self._discovery = discovery
        component = path.rpartition("/")[0]
        self._prefixes = {
            "instances": f"v1/instances/{path}/",
            "models": f"v1/models/{path}/",
            "events": f"v1/events/{component}/",
        }
        self._known = {kind: _Known() for kind in self._prefixes}
        self._tasks: list[asyncio.Task[None]] = []
        self._subscribed: dict[tuple[int, int], tuple[str, str | None]] = {}
        self._workers: list[tuple[int, int]] = []
        self._warned: set[int] = set()

    @property
    def ids(self) -> list[int]:
        """Instances that are there now, ascending."""
        return sorted({worker for worker, _ in self._workers})

    def start(self) -> None:
        """Follow discovery; needs a running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(kind)) for kind in self._prefixes]

    async def synced(self, timeout_s: float) -> None:
        """Wait until what is there is known.

        Raises:
            TransportError: Discovery did not answer in time.
        """
        waiting = [one.synced.wait() for one in self._known.values() if not one.synced.is_set()]
        if not waiting:
            return
        try:
            await asyncio.wait_for(asyncio.gather(*waiting), timeout_s)
        except asyncio.TimeoutError as error:
            raise TransportError(f"discovery has not answered within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Follow no more."""
        tasks = [*self._tasks, *self._joining]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, kind: str) -> None:
        while True:
            try:
                async with self._discovery.watch(self._prefixes[kind]) as watch:
                    async for event in watch:
                        self._take(kind, event)
                return
            except ClosedError:
                return
            except KvflashError as error:
                # Backends reconnect by themselves; what they give up on is tried again anyway.
                logger.warning("%s: %s", self._prefixes[kind], error)
                await asyncio.sleep(RESTART_PAUSE_S)

    def _take(self, kind: str, event: Put | Delete | Synced) -> None:
        known = self._known[kind]
        if isinstance(event, Synced):
            known.synced.set()
            return
        name = event.key.removeprefix(self._prefixes[kind])
        if isinstance(event, Put):
            try:
                value = json.loads(event.value)
                if not isinstance(value, dict):
                    raise TypeError("not an object")
            except (ValueError, TypeError) as error:
                logger.warning("%s can't be read: %s", event.key, error)
                return
            known.values[name] = value
        else:
            known.values.pop(name, None)
        if kind == "events":
            self._subscribe()
        else:
            self._set_workers()

    def _set_workers(self) -> None:
        cards = self._known["models"].values
        workers = []
        for name in self._known["instances"].values:
            if not name.isdecimal():
                logger.warning("an instance is a number, got %r", name)
                continue
            card = cards.get(name, {})
            self._check(int(name), card)
            size = card.get("dp_size")
            ranks = size if isinstance(size, int) and 1 <= size <= RANKS_MAX else 1
            workers += [(int(name), rank) for rank in range(ranks)]
        workers.sort()
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
        if self._sharing is None:
            return
        for worker in before - now:
            self._sharing.worker_left(worker)
        for worker in now - before:
            task = asyncio.get_running_loop().create_task(self._join(self._sharing, worker))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _join(self, sharing: Sharing, worker: int) -> None:
        while worker in self.ids:
            try:
                # The first one of a component connects.
                await asyncio.to_thread(sharing.worker_joined, self._component, worker)
                return
            except KvflashError as error:
                logger.error("requests of other routers do not count: %s; trying again", error)
                await asyncio.sleep(RESTART_PAUSE_S)

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
        """Listen to the sockets that are announced, and to no others."""
        if not self._core.uses_events:
            return
        wanted: dict[tuple[int, int], tuple[str, str | None]] = {}
        for name, value in self._known["events"].values.items():
            worker, _, rank = name.partition("/")
            endpoint = value.get("endpoint")
            if worker.isdecimal() and rank.isdecimal() and isinstance(endpoint, str):
                wanted[int(worker), int(rank)] = (endpoint, value.get("replay_endpoint"))
            else:
                logger.warning("events of %r can't be listened to: %r", name, value)
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
