"""Announces workers registered by gateways to replicas of the router."""

import asyncio
import json

from kvflash._core import Router
from kvflash.background import Background
from kvflash.roster.shared import shared_id
from kvflash.routing.cluster import Cluster

#: Where routers without discovered workers find each other.
COMPONENT = ("routers", "registered")

INTERVAL_S = 0.2


class RegisteredWorkers(Background):
    """Polls the registered workers, five times a second.

    Two routers mean the same worker if its number, model, tenant and url are equal at both.
    """

    def __init__(self, registry: Router, cluster: Cluster) -> None:
        self._registry, self._cluster = registry, cluster
        self._seen = 0
        self._known: dict[int, tuple[int, int]] = {}
        super().__init__("kvflash-registered", self._poll)

    def _look(self) -> None:
        changes = self._registry.worker_changes()
        if changes == self._seen:
            return
        self._seen = changes
        now = {
            worker_id: (shared_id(json.dumps([worker_id, model, tenant, url])), joined)
            for worker_id, model, tenant, url, joined in self._registry.registered()
        }
        before, self._known = self._known, now
        for worker_id, registration in before.items():
            if now.get(worker_id) != registration:
                self._cluster.worker_gone(worker_id)
        for worker_id, registration in now.items():
            if before.get(worker_id) != registration:
                self._cluster.worker_joined(COMPONENT, worker_id, registration[0])

    async def _poll(self) -> None:
        while True:
            # It looks through the other replicas' requests for each worker that joins.
            await asyncio.to_thread(self._look)
            await asyncio.sleep(INTERVAL_S)
