"""Passes workers in discovery on to the frontend."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

from kvflash.background import Background
from kvflash.discovery import Discovery
from kvflash.errors import ConflictError, KvflashError, NotFoundError, OverloadedError
from kvflash.roster.bridge import Bridge
from kvflash.roster.core import Component, Fleet, Replicas, announced, component_of
from kvflash.roster.keys import Name, WorkerKeys
from kvflash.roster.loads import LoadReader
from kvflash.runtime.limits import RuntimeLimits

logger = logging.getLogger(__name__)

LOAD_ENDPOINT = "load_metrics"
_ACTIVE = "active"
# The address of workers for a core that takes no requests.
NO_PLANE: dict[str, Any] = {"kind": "tcp", "address": "nowhere:1"}
# A refused worker may be accepted later, when a limit has room or a folder becomes readable.
AGAIN_S = 5.0


class DiscoveryWatch(Background):
    """Watches discovery in its own thread and keeps a frontend's workers in step with it.

    A worker is added when both its instance and its model card exist, and removed when one of them
    goes. While discovery is down, known workers stay, and so they do when it is stopped. Without
    ``report_load`` the core takes no requests. ``show_warnings`` takes the reason why discovery
    can't be reached; an empty list when it can.
    """

    def __init__(
        self,
        fleet: Fleet,
        discovery: Discovery,
        *,
        cluster: Replicas,
        show_warnings: Callable[[list[str]], None],
        namespace: str | None = None,
        report_load: Callable[[str], None] | None = None,
    ) -> None:
        self._fleet, self._cluster = fleet, cluster
        self._discovery, self._show_warnings = discovery, show_warnings
        discovery.show_outage = self._show_outage
        self._keys = WorkerKeys(discovery, namespace or "", self._settle)
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
        self._bridge = Bridge(RuntimeLimits())
        self._takes_requests = report_load is not None
        self._loads = LoadReader(report_load or (lambda _report: None), self._bridge.clients)
        super().__init__("kvflash-discovery", self._watch_all)

    async def _watch_all(self) -> None:
        try:
            self._keys.start()
            while True:
                await asyncio.sleep(AGAIN_S)
                if self._refused:
                    self._keys.resettle(self._refused)
        finally:
            await self._keys.close()
            await self._discovery.close()
            await self._loads.close()
            await self._bridge.close()

    def _show_outage(self, reason: str) -> None:
        known = "workers found before stay, and changes are not seen"
        self._show_warnings([f"{reason}; {known}"] if reason else [])

    async def _settle(self) -> None:
        """Bring the core's workers in line with discovery.

        One worker at a time: adding takes a while, and the worker may leave meanwhile. If it were
        removed concurrently, the outdated addition could come last and stay.
        """
        self._compared.clear()
        for name in self._keys.take_changed():
            path, instance_id = name
            if path.endswith(f"/{LOAD_ENDPOINT}"):
                instance = self._keys.instances.get(name)
                if instance is None:
                    self._loads.forget(path, instance_id)
                elif self._takes_requests:
                    self._loads.follow(path, instance_id, instance["transport"])
            else:
                await self._tell_safely(name)
        is_useless = bool(self._refused) and not self._told
        if is_useless and not self._is_useless:
            logger.warning(
                "this service refused all workers in discovery (%d) and has none to use; the "
                "errors above give the reasons", len(self._refused),
            )  # fmt: skip
        self._is_useless = is_useless
        present = {component_of(path) for path, _ in self._keys.instances}
        await asyncio.to_thread(self._cluster.present, present)

    async def _compare(self) -> None:
        """Remove workers that exist only in the shared state."""
        found: dict[Component, set[int]] = {}
        for path, instance_id in self._keys.instances:
            found.setdefault(component_of(path), set()).add(instance_id)
        await asyncio.to_thread(self._cluster.only, found)

    async def _tell_safely(self, name: Name) -> None:
        """A worker that is refused must not hide the others."""
        try:
            await self._tell(name)
        except Exception as error:
            is_known = isinstance(error, ValueError | LookupError | KvflashError)
            # Logged once; the excess over a limit changes with every other worker.
            reason = "a limit" if isinstance(error, OverloadedError) else str(error)
            if self._refused.get(name) != reason:
                text = "worker %d at %s: %s; trying again"
                logger.error(text, name[1], name[0], error, exc_info=not is_known)
            self._refused[name] = reason
        else:
            self._refused.pop(name, None)

    async def _tell(self, name: Name) -> None:
        keys, (path, instance_id) = self._keys, name
        component = component_of(path)
        told = self._told.get(instance_id)
        card, instance = keys.cards.get(name), keys.instances.get(name)
        if told is not None and told[0] != name:
            if card is not None and instance is not None:
                raise ConflictError(
                    f"it serves a model at {told[0][0]} as well: a runtime can serve one model "
                    "here; the second is ignored"
                )
            return
        if card is None or instance is None:
            self._bridge.forget(path, instance_id)
            if told is not None:
                logger.info("worker %d left: %s", instance_id, path)
            if told is not None or instance_id in self._shown:
                await self._remove(component, instance_id)
                # There may be room for others now.
                keys.resettle(self._refused)
            return
        events = keys.events_of(name)
        if told is None:
            before = self._cluster.before_worker
            await asyncio.to_thread(before, component, instance_id, events)
            if component not in self._compared:
                self._compared.add(component)
                await self._compare()
            # It may have left meanwhile.
            card, instance = keys.cards.get(name), keys.instances.get(name)
            if card is None or instance is None:
                return
        self._cluster.check_events(instance_id, events)
        is_changed = await self._put(name, card, instance, events)
        try:
            await self._tell_state(instance_id, instance)
        finally:
            if is_changed:
                # If the core replaced the worker, it dropped other routers' requests there.
                await asyncio.to_thread(self._cluster.worker_joined, component, instance_id)

    async def _put(
        self,
        name: Name,
        card: dict[str, Any],
        instance: dict[str, Any],
        events: dict[int, dict[str, Any]],
    ) -> bool:
        """Add a worker to the core, or change it there; False if nothing has changed."""
        (path, instance_id), transport = name, instance["transport"]
        told = self._told.get(instance_id)
        is_engine = transport.get("kind") == "openai"
        if is_engine:
            # This process renders chats for vLLM only.
            is_vllm = (card.get("user_data") or {}).get("engine") == "vllm"
            tokenizer = card.get("tokenizer") if self._takes_requests and is_vllm else None
            worker = text = _spec(instance_id, transport["url"], card, events, tokenizer)
        else:
            plane = NO_PLANE
            if self._takes_requests:
                plane = await self._bridge.open(path, instance_id, transport)
            fields = {"id": instance_id, "plane": plane, "endpoint": path, "card": card}
            worker = json.dumps(fields, sort_keys=True)
            text = json.dumps({**fields, "events": announced(events)}, sort_keys=True)
        if told is not None and told[2] == text:
            return False
        # In threads: the first worker of a model loads its tokenizer.
        if is_engine:
            if told is not None:
                # For the core it is a different worker, which it may refuse.
                await self._remove(component_of(path), instance_id)
            await asyncio.to_thread(self._fleet.add_worker, text)
        else:
            self._shown.add(instance_id)
            if told is None or told[1] == worker:
                await asyncio.to_thread(self._fleet.put_worker, text)
            else:
                await self._replace(component_of(path), instance_id, text)
            self._shown.discard(instance_id)
        self._told[instance_id] = (name, worker, text)
        return True

    async def _replace(self, component: Component, instance_id: int, text: str) -> None:
        """Put a worker that the core takes for a different one, whose blocks it forgets."""
        # Shared state first: it keeps the blocks.
        await asyncio.to_thread(self._cluster.worker_left, component, instance_id)
        try:
            await asyncio.to_thread(self._fleet.put_worker, text)
        except Exception:
            # The core may still have the worker as it was.
            await asyncio.to_thread(self._cluster.worker_joined, component, instance_id)
            raise

    async def _tell_state(self, instance_id: int, instance: dict[str, Any]) -> None:
        """Pass on its serving state; only changes are sent, so that an operator's setting stays."""
        state = instance.get("state") or _ACTIVE
        if state != self._states.get(instance_id, _ACTIVE):
            await asyncio.to_thread(self._fleet.set_worker_state, instance_id, state)
            self._states[instance_id] = state

    async def _remove(self, component: Component, instance_id: int) -> None:
        """Remove a worker from the core, or a refused one that the core shows."""
        if instance_id in self._told:
            # Shared state first: the core forgets the worker's blocks.
            await asyncio.to_thread(self._cluster.worker_left, component, instance_id)
        # DELETE /workers may have removed it first.
        with contextlib.suppress(NotFoundError):
            await asyncio.to_thread(self._fleet.remove_worker, instance_id)
        self._told.pop(instance_id, None)
        self._states.pop(instance_id, None)
        self._shown.discard(instance_id)


def _spec(
    instance_id: int,
    url: str,
    card: dict[str, Any],
    events: dict[int, dict[str, Any]],
    tokenizer: str | None,
) -> str:
    """An engine with OpenAI's API in the format of ``--worker``, with rank 0's event endpoint.

    The core finds rank r at port + r, or at a broker under its own rank.
    """
    fields = {
        "id": instance_id,
        "events": events.get(0, {}).get("endpoint"),
        "replay": events.get(0, {}).get("replay_endpoint"),
        "dp": card.get("dp_size"),
        "role": "prefill" if "prefill" in (card.get("model_type") or ()) else None,
        # A path with a comma can't be said in this format.
        "tokenizer": None if tokenizer is None or "," in tokenizer else tokenizer,
    }
    return ",".join([url, *(f"{key}={value}" for key, value in fields.items() if value)])
