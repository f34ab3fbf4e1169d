"""Passes workers in discovery on to the frontend."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvflash.background import Background
from kvflash.discovery import Discovery
from kvflash.roster.bridge import Bridge
from kvflash.roster.core import Fleet, Replicas, component_of
from kvflash.roster.feed import NO_PLANE, WorkerFeed
from kvflash.roster.keys import Name
from kvflash.roster.loads import LoadReader
from kvflash.runtime.limits import RuntimeLimits

LOAD_ENDPOINT = "load_metrics"


class DiscoveryWatch(WorkerFeed, Background):
    """Watches discovery in its own thread and keeps a frontend's workers in step with it.

    Without ``report_load`` the core takes no requests. ``show_warnings`` takes the reason why
    discovery can't be reached; an empty list when it can.
    """

    _fleet: Fleet

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
        WorkerFeed.__init__(self, fleet, discovery, namespace or "", cluster=cluster)
        self._discovery, self._show_warnings = discovery, show_warnings
        discovery.show_outage = self._show_outage
        self._bridge = Bridge(RuntimeLimits())
        self._takes_requests = report_load is not None
        self._loads = LoadReader(report_load or (lambda _report: None), self._bridge.clients)
        Background.__init__(self, "kvflash-discovery", self.follow)

    async def close(self) -> None:
        """Follow no more, and close what it opened."""
        await super().close()
        await self._discovery.close()
        await self._loads.close()
        await self._bridge.close()

    def _show_outage(self, reason: str) -> None:
        known = "workers found before stay, and changes are not seen"
        self._show_warnings([f"{reason}; {known}"] if reason else [])

    async def _tell_safely(self, name: Name) -> None:
        path, instance_id = name
        if not path.endswith(f"/{LOAD_ENDPOINT}"):
            await super()._tell_safely(name)
        elif (instance := self._keys.instances.get(name)) is None:
            self._loads.forget(path, instance_id)
        elif self._takes_requests:
            self._loads.follow(path, instance_id, instance["transport"])

    async def _leave(self, name: Name) -> None:
        self._bridge.forget(*name)
        await super()._leave(name)

    async def _put(self, name: Name, card: dict[str, Any], state: str) -> bool:
        (path, instance_id), told = name, self._told.get(name[1])
        transport = self._keys.instances[name]["transport"]
        if transport.get("kind") != "openai":
            return await super()._put(name, card, state)
        # This process renders chats for vLLM only.
        is_vllm = (card.get("user_data") or {}).get("engine") == "vllm"
        tokenizer = card.get("tokenizer") if self._takes_requests and is_vllm else None
        events = self._keys.events_of(name)
        spec = _spec(instance_id, transport["url"], card, events, tokenizer)
        if told is not None and told[2] == spec:
            return False
        if told is not None:
            # For the core it is a different worker, which it may refuse.
            await self._remove(component_of(path), instance_id)
        await asyncio.to_thread(self._fleet.add_worker, spec)
        self._told[instance_id] = (name, spec, spec)
        return True

    async def _fields(self, name: Name, card: dict[str, Any]) -> dict[str, Any]:
        (path, instance_id), plane = name, NO_PLANE
        if self._takes_requests:
            transport = self._keys.instances[name]["transport"]
            plane = await self._bridge.open(path, instance_id, transport)
        return {"id": instance_id, "plane": plane, "endpoint": path, "card": card}


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
