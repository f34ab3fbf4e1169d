"""Keeps a core's workers in step with discovery."""

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvflash.discovery import Discovery
from kvflash.errors import ConflictError, KvflashError, NotFoundError, OverloadedError
from kvflash.roster.core import Component, Replicas, Taker, announced, component_of
from kvflash.roster.keys import Name, WorkerKeys

logger = logging.getLogger(__name__)

_ACTIVE, _DRAINING = "active", "draining"
# The address of workers for a core that sends no requests.
NO_PLANE: dict[str, Any] = {"kind": "tcp", "address": "nowhere:1"}
# A refused worker may be accepted later, when a limit has room or a folder becomes readable.
AGAIN_S = 5.0


class WorkerFeed(ABC):
    """Passes workers in discovery on to a core, in one event loop.

    A worker is added when it has both an instance and a model card, and removed when one of them
    goes. While discovery is down, known workers stay, and so they do at the end. The scope is that
    of :class:`WorkerKeys`.
    """

    def __init__(
        self, fleet: Taker, discovery: Discovery, scope: str, *, cluster: Replicas
    ) -> None:
        self._fleet, self._cluster = fleet, cluster
        self._keys = WorkerKeys(discovery, scope, self._settle)
        # Workers in the core: their endpoint, what they are, and the whole text given to it.
        self._told: dict[int, tuple[Name, str, str]] = {}
        # Serving states given to the core; a worker without an entry is active.
        self._states: dict[int, str] = {}
        # Components that this batch has compared already; each comparison costs O(all workers).
        self._compared: set[Component] = set()
        # Workers that the core refused, with the reason; they are retried.
        self._refused: dict[Name, str] = {}
        # No worker is accepted; logged once.
        self._is_useless = False
        # Those whose refusal the core shows until they are removed there.
        self._shown: set[int] = set()

    async def follow(self) -> None:
        """Follow discovery until cancelled."""
        try:
            self._keys.start()
            while True:
                await asyncio.sleep(AGAIN_S)
                if self._refused:
                    self._keys.resettle(self._refused)
        finally:
            await self.close()

    async def close(self) -> None:
        """Follow no more."""
        await self._keys.close()

    def _card(self, name: Name) -> dict[str, Any] | None:
        """The model card of an instance; None if it is not there, or is no worker."""
        return self._keys.cards.get(name) if name in self._keys.instances else None

    @abstractmethod
    async def _fields(self, name: Name, card: dict[str, Any]) -> dict[str, Any]:
        """The worker in the core's format, without its events."""

    def _events(self, name: Name) -> dict[str, Any]:
        """The worker's event endpoints in the core's format."""
        return announced(self._keys.events_of(name))

    async def _ask(self, call: Callable[..., object], *args: object) -> None:
        """Call the core: in a thread, because the first worker of a model loads its tokenizer."""
        await asyncio.to_thread(call, *args)

    async def _share(self, call: Callable[..., None], *args: object) -> None:
        """Call the cluster, which may wait for servers or search other routers' requests."""
        if self._cluster.is_alone:
            call(*args)
        else:
            await asyncio.to_thread(call, *args)

    async def _settle(self) -> None:
        """Bring the core's workers in line with discovery.

        One worker at a time: adding takes a while, and the worker may leave meanwhile. If it were
        removed concurrently, the outdated addition could come last and stay.
        """
        self._compared.clear()
        for name in self._keys.take_changed():
            await self._tell_safely(name)
            # Let requests run in between.
            await asyncio.sleep(0)
        is_useless = bool(self._refused) and not self._told
        if is_useless and not self._is_useless:
            logger.warning(
                "this service refused all workers in discovery (%d) and has none to use; the "
                "errors above give the reasons", len(self._refused),
            )  # fmt: skip
        self._is_useless = is_useless
        present = {component_of(path) for path, _ in self._keys.instances}
        await self._share(self._cluster.present, present)

    async def _compare(self) -> None:
        """Remove workers that exist only in the shared state."""
        found: dict[Component, set[int]] = {}
        for path, instance_id in self._keys.instances:
            found.setdefault(component_of(path), set()).add(instance_id)
        await self._share(self._cluster.only, found)

    async def _tell_safely(self, name: Name) -> None:
        """A worker that is refused must not hide the others."""
        try:
            await self._tell(name)
        except Exception as error:
            is_known = isinstance(error, ValueError | LookupError | KvflashError)
            before, reason = self._refused.get(name), str(error)
            # Logged once; the excess over a limit changes with every other worker.
            is_same = isinstance(error, OverloadedError) or before == reason
            if before is None or not is_same:
                text = "worker %d at %s: %s; trying again"
                logger.error(text, name[1], name[0], error, exc_info=not is_known)
            self._refused[name] = reason
        else:
            self._refused.pop(name, None)

    async def _tell(self, name: Name) -> None:
        path, instance_id = name
        component = component_of(path)
        told, card = self._told.get(instance_id), self._card(name)
        if told is not None and told[0] != name:
            if card is not None:
                raise ConflictError(
                    f"it serves a model at {told[0][0]} as well: a runtime can serve one model "
                    "here; the second is ignored"
                )
            return
        if card is None:
            await self._leave(name)
            return
        if told is None:
            await self._before(name, card)
            if component not in self._compared:
                self._compared.add(component)
                await self._compare()
            # It may have left meanwhile.
            card = self._card(name)
            if card is None:
                return
        self._cluster.check_events(instance_id, self._keys.events_of(name))
        state = self._keys.instances[name].get("state") or _ACTIVE
        is_changed = await self._put(name, card, state)
        try:
            # Only changes are sent, so that an operator's setting stays.
            if state != self._states.get(instance_id, _ACTIVE):
                await self._ask(self._fleet.set_worker_state, instance_id, state)
                self._states[instance_id] = state
        finally:
            if is_changed:
                # If the core replaced the worker, it dropped other routers' requests there.
                await self._share(self._cluster.worker_joined, component, instance_id)

    async def _before(self, name: Name, _card: dict[str, Any]) -> None:
        """Prepare for a new worker."""
        before, events = self._cluster.before_worker, self._keys.events_of(name)
        await self._share(before, component_of(name[0]), name[1], events)

    async def _leave(self, name: Name) -> None:
        path, instance_id = name
        if instance_id in self._told:
            logger.info("worker %d left: %s", instance_id, path)
        if instance_id in self._told or instance_id in self._shown:
            await self._remove(component_of(path), instance_id)
            # There may be room for others now.
            self._keys.resettle(self._refused)

    async def _put(self, name: Name, card: dict[str, Any], state: str) -> bool:
        """Add a worker to the core, or change it there; False if nothing has changed."""
        instance_id, told = name[1], self._told.get(name[1])
        fields = await self._fields(name, card)
        worker = json.dumps(fields, sort_keys=True)
        fields["events"] = self._events(name)
        text = json.dumps(fields, sort_keys=True)
        if told is not None and told[2] == text:
            return False
        self._shown.add(instance_id)
        # With its state: a draining worker gets no request in between.
        sent = json.dumps({**fields, "state": state}) if state == _DRAINING else text
        if told is None or told[1] == worker:
            await self._ask(self._fleet.put_worker, sent)
        else:
            await self._replace(component_of(name[0]), instance_id, sent)
        self._shown.discard(instance_id)
        self._told[instance_id] = (name, worker, text)
        return True

    async def _replace(self, component: Component, instance_id: int, text: str) -> None:
        """Put a worker that the core takes for a different one, whose blocks it forgets."""
        # Shared state first: it keeps the blocks.
        await self._share(self._cluster.worker_left, component, instance_id)
        try:
            await self._ask(self._fleet.put_worker, text)
        except Exception:
            await self._give_up_change(component, instance_id)
            raise

    async def _give_up_change(self, component: Component, instance_id: int) -> None:
        """The core refused a change, and may still have the worker as it was."""
        await self._share(self._cluster.worker_joined, component, instance_id)

    async def _remove(self, component: Component, instance_id: int) -> None:
        """Remove a worker from the core, or a refused one that the core shows."""
        if instance_id in self._told:
            # Shared state first: the core forgets the worker's blocks.
            await self._share(self._cluster.worker_left, component, instance_id)
        # DELETE /workers may have removed it first.
        with contextlib.suppress(NotFoundError):
            await self._ask(self._fleet.remove_worker, instance_id)
        self._told.pop(instance_id, None)
        self._states.pop(instance_id, None)
        self._shown.discard(instance_id)
