"""The workers of an endpoint, as discovery tells them, registered with the router."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from kvflash.discovery import Discovery
from kvflash.errors import KvflashError
from kvflash.roster.keys import WorkerKeys
from kvflash.routing.cluster import Cluster
from kvflash.routing.membership import Membership, tenant_of

__all__ = ["DiscoveredWorkers", "Registrar"]

logger = logging.getLogger(__name__)

# What was refused may be taken later: a limit has room again, or the other model has left.
AGAIN_S = 5.0
# Discovery may show an instance before its card, though that was there first: a folder is read
# while it changes. Longer than the pause between two looks at it.
CARD_S = 2.0
# Workers that were refused and that /health names; it counts the others.
TOLD_MAX = 100


class Registrar(Protocol):
    """Where workers are registered."""

    def add_worker(self, worker: dict[str, Any]) -> Any:
        """Register one."""

    def remove_worker(self, worker_id: int) -> None:
        """Forget one."""

    def set_warnings(self, warnings: list[str]) -> None:
        """Show these in ``/health`` instead of those before."""


class DiscoveredWorkers:
    """Keeps the router's workers as discovery has those of one endpoint.

    A worker is there as long as its instance is; what its model card and its event sockets say is
    part of its registration. One that changes what it says is registered anew. A card that goes
    changes nothing for CARD_S, as the instance is mostly about to go, too; then the worker is let
    go.

    Args:
        router: Where they are registered.
        discovery: Where to look.
        path: ``namespace/component/endpoint``.
        model_name: Model of workers that announce no card, after CARD_S where others have one.
            Where events come over NATS these wait for one: events are told by model.
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
        self._model_name, self._path = model_name, path
        namespace, name, _ = path.split("/", 2)
        self._component = (namespace, name)
        self._members = Membership(cluster, self._component)
        self._keys = WorkerKeys(discovery, path, self._settle)
        self._trying: asyncio.Task[None] | None = None
        self._registered: dict[int, dict[str, Any]] = {}
        # The model cards that these have, or had; who is there without one, and since when.
        self._cards: dict[int, dict[str, Any]] = {}
        self._bare: dict[int, float] = {}
        self._waking: asyncio.TimerHandle | None = None
        self._refused: dict[int, dict[str, Any]] = {}
        # Why, and what /health says of it.
        self._reasons: dict[int, str] = {}
        self._warnings: list[str] = []
        # Those that were refused have another chance.
        self._is_again = False

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
        if self._cluster.is_nats:
            await self._members.follow()
        self._keys.start()
        self._trying = asyncio.get_running_loop().create_task(self._try_again())

    async def synced(self, timeout_s: float) -> None:
        """Wait until what is there is registered.

        Raises:
            TransportError: Discovery did not answer in time.
        """
        await self._keys.synced(timeout_s)

    async def close(self) -> None:
        """Follow no more; workers stay as they are."""
        await self._keys.close()
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.gather(self._trying, return_exceptions=True)
        self._members.close()

    async def _try_again(self) -> None:
        """Now and then, those that were refused."""
        while True:
            await asyncio.sleep(AGAIN_S)
            if self._refused:
                self._is_again = True
                self._keys.resettle()

    async def _settle(self) -> None:
        """Register those that came, forget those that left, and both for those that changed."""
        # First: what it tells is told before the router hears of them.
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
            # Who has only changed is away for no turn of the loop.
            if (body := wanted.get(worker_id)) is not None:
                self._register(worker_id, body)
            # Requests go on between them.
            await asyncio.sleep(0)
        is_again, self._is_again = self._is_again or bool(leaving), False
        self._refused = {i: body for i, body in self._refused.items() if wanted.get(i) == body}
        self._reasons = {i: self._reasons[i] for i in self._refused}
        for worker_id, body in wanted.items():
            if worker_id in self._registered or (worker_id in self._refused and not is_again):
                continue
            self._register(worker_id, body)
            await asyncio.sleep(0)
        self._warn()

    def _warn(self) -> None:
        """Have /health name the workers that were refused."""
        told = [
            f"worker {worker_id} found in discovery is refused: {self._reasons[worker_id]}"
            for worker_id in list(self._refused)[:TOLD_MAX]
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
            # Said once.
            if worker_id not in self._refused:
                logger.error("worker %d: %s; trying again", worker_id, error)
            self._refused[worker_id], self._reasons[worker_id] = body, str(error)
            return
        self._refused.pop(worker_id, None)
        self._reasons.pop(worker_id, None)
        self._registered[worker_id] = body
        self._members.tell(self._cluster.instance_joined, self._component, worker_id)
        # The first one of a component connects.
        self._members.tell(self._cluster.worker_joined, self._component, worker_id)

    def _wanted(self) -> dict[int, dict[str, Any]]:
        """Registrations of the workers that discovery tells of."""
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
        """Whether a worker that has no card is not to be registered, or not yet."""
        if not had_card:
            # Events over NATS are told by model.
            if self._cluster.is_nats:
                return True
            # Where nobody has one there is nothing to wait for.
            if worker_id in self._registered or not self._keys.cards:
                return False
        if not is_late and self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(CARD_S, self._wake)
        # One that had a card is there for a while longer, one that never had one after a while.
        return is_late == had_card

    def _wake(self) -> None:
        """Look again at those without a card, once that is too long."""
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
