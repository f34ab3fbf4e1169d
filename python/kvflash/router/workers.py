"""Keeps an endpoint's workers in discovery registered with the router."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kvflash.discovery import Discovery
from kvflash.errors import KvflashError
from kvflash.roster.core import component_of
from kvflash.roster.keys import WorkerKeys
from kvflash.routing.cluster import Cluster
from kvflash.routing.membership import Membership, tenant_of

if TYPE_CHECKING:
    from kvflash.router.service import RouterService

logger = logging.getLogger(__name__)

# A refused worker may be accepted later, when a limit has room or the other model has left.
AGAIN_S = 5.0
# Discovery may show an instance before its card, although the card was written first, because a
# folder is read while it changes. Longer than the pause between two reads.
CARD_S = 2.0
_ACTIVE = "active"
# Refused workers that /health names; it counts the others.
TOLD_MAX = 100


class DiscoveredWorkers:
    """Keeps the router's workers equal to an endpoint's instances in discovery.

    A worker lives as long as its instance; its registration includes its model card and event
    sockets. A worker that changes these is registered again. A removed card has no effect for
    CARD_S, because its instance is usually about to go as well; after that the worker is removed.
    ``model_name`` is the model of workers without a card; where others have one, only after CARD_S.
    With events over NATS they wait for a card, because events belong to a model.
    """

    def __init__(
        self,
        router: RouterService,
        discovery: Discovery,
        path: str,
        *,
        model_name: str,
        cluster: Cluster,
    ) -> None:
        self._router, self._cluster = router, cluster
        self._model_name, self._path = model_name, path
        self._component = component_of(path)
        self._members = Membership(cluster, self._component)
        self._keys = WorkerKeys(discovery, path, self._settle)
        self._trying: asyncio.Task[None] | None = None
        self._registered: dict[int, dict[str, Any]] = {}
        # Serving states given to the router; a worker without an entry is active.
        self._states: dict[int, str] = {}
        # Current or last cards of the workers; workers without one, and since when.
        self._cards: dict[int, dict[str, Any]] = {}
        self._bare: dict[int, float] = {}
        self._waking: asyncio.TimerHandle | None = None
        # Refused registrations with the reasons.
        self._refused: dict[int, tuple[dict[str, Any], str]] = {}
        # For /health.
        self._warnings: list[str] = []
        # Refused workers are retried.
        self._is_again = False

    @property
    def ids(self) -> list[int]:
        """Numbers of the registered workers, ascending."""
        return sorted(self._registered)

    @property
    def models(self) -> set[tuple[str, str]]:
        """Models and tenants of the registered workers."""
        return {(body["model_name"], body["tenant_id"]) for body in self._registered.values()}

    async def start(self) -> None:
        """Follow discovery once the component's stream has been read."""
        if self._cluster.is_nats:
            await self._members.follow()
        self._keys.start()
        self._trying = asyncio.get_running_loop().create_task(self._try_again())

    async def synced(self, timeout_s: float) -> None:
        """Wait until existing workers are registered; TransportError if not in time."""
        await self._keys.synced(timeout_s)

    async def close(self) -> None:
        """Stop following; workers stay."""
        await self._keys.close()
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.gather(self._trying, return_exceptions=True)
        self._members.close()

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            if self._refused:
                self._is_again = True
                self._keys.resettle()

    async def _settle(self) -> None:
        """Register new workers, remove those that left, and register changed ones again."""
        # First, so that its messages precede the router's changes.
        self._members.settle(number for _, number in self._keys.instances)
        wanted = self._wanted()
        leaving = [i for i, body in self._registered.items() if wanted.get(i) != body]
        await self._members.let_go(leaving)
        for worker_id in leaving:
            try:
                self._router.remove_worker(worker_id)
            except KvflashError as error:
                logger.error("%s", error)
            del self._registered[worker_id]
            self._states.pop(worker_id, None)
            # A changed worker is replaced within one turn of the event loop.
            if (body := wanted.get(worker_id)) is not None:
                self._register(worker_id, body)
            # Let requests run in between.
            await asyncio.sleep(0)
        is_again, self._is_again = self._is_again or bool(leaving), False
        self._refused = {i: one for i, one in self._refused.items() if wanted.get(i) == one[0]}
        for worker_id, body in wanted.items():
            if worker_id in self._registered or (worker_id in self._refused and not is_again):
                continue
            self._register(worker_id, body)
            await asyncio.sleep(0)
        for worker_id in self._registered:
            self._tell_state(worker_id)
        self._warn()

    def _tell_state(self, worker_id: int) -> None:
        """Pass on its serving state; only changes are sent, so that an operator's setting stays."""
        instance = self._keys.instances.get((self._path, worker_id))
        state = (instance or {}).get("state") or _ACTIVE
        if instance is None or state == self._states.get(worker_id, _ACTIVE):
            return
        self._states[worker_id] = state
        try:
            self._router.set_worker_state(worker_id, state)
        except KvflashError as error:
            logger.error("worker %d: %s", worker_id, error)

    def _warn(self) -> None:
        told = [
            f"worker {worker_id} found in discovery is refused: {reason}"
            for worker_id, (_, reason) in list(self._refused.items())[:TOLD_MAX]
        ]
        if (more := len(self._refused) - len(told)) > 0:
            told.append(f"{more} more workers found in discovery are refused; see the log")
        if told != self._warnings:
            self._warnings = told
            self._router.set_warnings(told)

    def _register(self, worker_id: int, body: dict[str, Any]) -> None:
        try:
            self._router.add_worker(body)
        except KvflashError as error:
            # Logged once.
            if worker_id not in self._refused:
                logger.error("worker %d: %s; trying again", worker_id, error)
            self._refused[worker_id] = (body, str(error))
            return
        self._refused.pop(worker_id, None)
        self._registered[worker_id] = body
        # In the same turn of the event loop: a draining worker gets no request in between.
        self._tell_state(worker_id)
        self._members.tell(self._cluster.worker_joined, self._component, worker_id)

    def _wanted(self) -> dict[int, dict[str, Any]]:
        before, self._cards = self._cards, {}
        bare, self._bare = self._bare, {}
        now_s = asyncio.get_running_loop().time()
        wanted = {}
        for worker_id, instance, now in self._keys.served():
            card = now or before.get(worker_id)
            if card is not None:
                self._cards[worker_id] = card
            if now is None:
                self._bare[worker_id] = bare.get(worker_id, now_s)
                is_late = now_s - self._bare[worker_id] >= CARD_S
                if self._is_kept_out(worker_id, had_card=card is not None, is_late=is_late):
                    continue
            ranks = self._keys.events_of((self._path, worker_id))
            wanted[worker_id] = self._body(worker_id, instance, card or {}, ranks)
        return wanted

    def _is_kept_out(self, worker_id: int, *, had_card: bool, is_late: bool) -> bool:
        """Whether a worker without a card must not be registered, or not yet."""
        if not had_card:
            # Over NATS events belong to a model.
            if self._cluster.is_nats:
                return True
            # If no worker has a card, waiting is pointless.
            if worker_id in self._registered or not self._keys.cards:
                return False
        if not is_late and self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(CARD_S, self._wake)
        # A worker that lost its card stays for CARD_S; one that never had one joins after that.
        return is_late == had_card

    def _wake(self) -> None:
        """Check workers without a card again after CARD_S."""
        self._waking = None
        self._keys.resettle()

    def _body(
        self,
        worker_id: int,
        instance: dict[str, Any],
        card: dict[str, Any],
        ranks: dict[int, dict[str, Any]],
    ) -> dict[str, Any]:
        transport = instance["transport"]
        sizes = [value.get("block_size") for value in ranks.values()]
        return {
            "worker_id": worker_id,
            "model_name": card.get("model_name") or self._model_name,
            "tenant_id": tenant_of(card) if self._cluster.is_nats else "default",
            "url": transport.get("url") or transport.get("address") or transport.get("subject"),
            "dp_size": max([card.get("dp_size") or 1, *(rank + 1 for rank in ranks)]),
            "block_size": card.get("kv_cache_block_size") or next(filter(None, sizes), None),
            "events": self._cluster.events(worker_id, ranks),
            "kv_total_blocks": card.get("total_kv_blocks"),
            "max_num_batched_tokens": card.get("max_num_batched_tokens"),
        }
