"""Copies the workers of an endpoint from discovery to a core."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from kvflash._core import RouterCore
from kvflash.discovery import Discovery
from kvflash.errors import KvflashError
from kvflash.roster.core import component_of
from kvflash.roster.keys import WorkerKeys
from kvflash.routing.cluster import Cluster
from kvflash.routing.membership import Membership, tenant_of

logger = logging.getLogger(__name__)

RANKS_MAX = 1_024
# Longest wait for the first replays, and the pause between two looks at them.
REPLAY_S_MAX, REPLAY_STEP_S = 1.0, 0.002

# A worker and a rank of it.
Rank = tuple[int, int]
#: Starts to serve, with the model's name and tenant if needed; returns where to report after that.
Serve = Callable[[tuple[str, str] | None], tuple[RouterCore, Cluster]]


class Workers:
    """Keeps a core's workers, ranks and event sockets in line with an endpoint in discovery.

    If events come over NATS, ``serve`` is called once the model's name is known, a worker counts
    once it has a model card, and the first workers once the state of their component is loaded.
    ``min_workers`` is the number that :meth:`enough` waits for.
    """

    def __init__(
        self,
        core: RouterCore,
        discovery: Discovery,
        path: str,
        cluster: Cluster,
        *,
        serve: Serve,
        min_workers: int,
    ) -> None:
        self._core, self._cluster, self._serve = core, cluster, serve
        self._component = component_of(path)
        self._keys = WorkerKeys(discovery, path, self._settle)
        self._subscribed: dict[Rank, tuple[str, str | None]] = {}
        # Workers of the core, with what it knows of them.
        self._workers: dict[Rank, dict[str, int | None]] = {}
        self._draining: list[int] = []
        self._warned: set[int] = set()
        # Present instances without a model card.
        self._cardless: set[int] = set()
        self._first_name: str | None = None
        #: Events come over NATS.
        self.is_brokered = cluster.is_nats
        self._model: tuple[str, str] | None = None
        self._members: Membership | None = None
        self._replays_end_s: float | None = None
        self._min_workers = min_workers
        # Once min_workers instances have been present at once, and at the end.
        self._enough = asyncio.Event()
        if not min_workers:
            self._enough.set()
        # Unless it is running already.
        self._attached = asyncio.Event()
        self._attached.set()

    @property
    def ids(self) -> list[int]:
        """Instances that are present now, ascending."""
        return sorted({worker for worker, _ in self._workers})

    def start(self) -> None:
        """Follow discovery; needs a running event loop."""
        if not self.is_brokered:
            self._core, self._cluster = self._serve(None)
            self._members = Membership(self._cluster, self._component)
        self._keys.start()

    async def synced(self, timeout_s: float) -> None:
        """Wait until the current instances are known; TransportError if that takes too long.

        The first calls also wait until the instances have replayed their earlier events, for up to
        a second, because their caches would count as empty until then.
        """
        await self._keys.synced(timeout_s)
        # Ends by itself once they are known.
        await self._attached.wait()
        await self._caught_up()

    async def enough(self, timeout_s: float) -> None:
        """Wait until min_workers instances have been present at once, or the time, or the end."""
        if not self._enough.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enough.wait(), timeout_s)

    async def _caught_up(self) -> None:
        loop = asyncio.get_running_loop()
        if self._replays_end_s is None:
            self._replays_end_s = loop.time() + REPLAY_S_MAX
        # The core's threads have no event to wait for, so this looks again every 2 ms.
        while loop.time() < self._replays_end_s:
            if self._core.is_caught_up:
                self._replays_end_s = 0.0
                return
            await asyncio.sleep(REPLAY_STEP_S)

    async def close(self) -> None:
        """Stop following."""
        self._enough.set()
        await self._keys.close()
        if self._members is not None:
            self._members.close()

    async def _settle(self) -> None:
        cards = self._cards()
        if self.is_brokered and self._model is None and cards:
            await self._attach(next(iter(cards.values())))
            # This took a while.
            cards = self._cards()
        if self._members is None:
            return
        # First, so that the state's blocks are known before the core sees the workers.
        self._members.settle(number for _, number in self._keys.instances)
        # The shared state must learn of departures before the core forgets the workers.
        await self._members.let_go(set(self.ids) - cards.keys())
        self._set_workers(cards, self._members)
        self._set_draining()
        # The core has forgotten workers that left: if they come back, events are fetched again.
        self._subscribe()

    async def _attach(self, card: dict[str, Any]) -> None:
        """Serve this card's model with the state of its component's stream."""
        self._attached.clear()
        try:
            model = _model_of(card)
            self._core, self._cluster = self._serve(model)
            self._model = model
            members = Membership(self._cluster, self._component)
            await members.follow()
            self._members = members
        finally:
            self._attached.set()

    def _cards(self) -> dict[int, dict[str, Any]]:
        found, without = {}, set()
        for worker, _, card in self._keys.served():
            if self.is_brokered and (card is None or card.get("model_name") is None):
                without.add(worker)
                continue
            found[worker] = card or {}
            self._check(worker, found[worker])
        # A known worker withdraws its card when it ends.
        for worker in sorted(without - self._cardless - set(self.ids)):
            logger.warning(
                "worker %d gets no requests until it calls register_llm: events over NATS are per "
                "model, and it has no model card",
                worker,
            )
        self._cardless = without
        self._warned &= found.keys()
        return found

    def _set_workers(self, cards: dict[int, dict[str, Any]], members: Membership) -> None:
        ids, before = self.ids, self._workers
        now = {
            (worker, rank): {
                "kv_total_blocks": _count(card.get("total_kv_blocks")),
                "max_num_batched_tokens": _count(card.get("max_num_batched_tokens")),
            }
            for worker, card in sorted(cards.items())
            for rank in range(_rank_count(card))
        }
        try:
            if now.keys() != before.keys():
                self._core.set_workers(list(now))
        except KvflashError as error:
            logger.error("the router refused some workers: %s", error)
            return
        self._workers = now
        for worker in cards.keys() - ids:
            members.tell(self._cluster.worker_joined, self._component, worker)
        if len(cards) >= self._min_workers:
            self._enough.set()
        for (worker, rank), report in now.items():
            if before.get((worker, rank)) != report:
                self._core.report(worker, rank, **report)

    def _set_draining(self) -> None:
        draining = sorted(
            worker for worker, instance, _ in self._keys.served()
            if instance.get("state") == "draining"
        )  # fmt: skip
        if draining != self._draining:
            self._core.set_draining(draining)
            self._draining = draining

    def _check(self, worker: int, card: dict[str, Any]) -> None:
        """Warn once of another model, or of a block size that makes every overlap 0."""
        if worker in self._warned:
            return
        name = card.get("model_name")
        self._first_name = self._first_name or name
        size, own_size = card.get("kv_cache_block_size"), self._core.block_size
        if self._model is not None and self._model != _model_of(card):
            logger.error(
                "worker %d serves %r of tenant %r, this router %r of %r: its cache is not counted",
                worker, *_model_of(card), *self._model,
            )  # fmt: skip
        elif self._model is None and name not in (None, self._first_name):
            logger.error(
                "worker %d serves %r, and others at the same endpoint %r: requests go to both, "
                "whatever model they name; serve each model at an endpoint of its own",
                worker, name, self._first_name,
            )  # fmt: skip
        elif size is not None and size != own_size:
            logger.error(
                "worker %d has blocks of %r tokens, this router of %d: its blocks never match; "
                "give the router block_size=%r", worker, size, own_size, size,
            )  # fmt: skip
        else:
            return
        self._warned.add(worker)

    def _subscribe(self) -> None:
        """Subscribe to exactly the sockets that the core's workers announce."""
        if not self._core.uses_events:
            return
        ids = set(self.ids)
        wanted: dict[Rank, tuple[str, str | None]] = {}
        for (_, worker), ranks in self._keys.events.items():
            if worker not in ids:
                continue
            self._cluster.check_events(worker, ranks)
            for rank, where in self._cluster.events(ranks).items():
                wanted[worker, int(rank)] = (where["endpoint"], where.get("replay_endpoint"))
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


def _rank_count(card: dict[str, Any]) -> int:
    size: int = card.get("dp_size") or 1
    return size if 1 <= size <= RANKS_MAX else 1


def _model_of(card: dict[str, Any]) -> tuple[str, str]:
    return card["model_name"], tenant_of(card)


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 2**63 else None
