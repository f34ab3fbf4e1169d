"""Announces workers registered by gateways to replicas of the router."""

import json
import threading

from kvflash._core import Router
from kvflash.roster.shared import shared_id
from kvflash.routing.cluster import Cluster

#: Where routers without discovered workers find each other.
COMPONENT = ("routers", "registered")

INTERVAL_S = 0.2


class RegisteredWorkers:
    """Polls the registered workers, five times a second.

    Two routers mean the same worker if its number, model, tenant and url are equal at both.
    """

    def __init__(self, registry: Router, cluster: Cluster) -> None:
        self._registry, self._cluster = registry, cluster
        self._seen = 0
        self._known: dict[int, tuple[int, int]] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvflash-registered", daemon=True)

    def start(self) -> None:
        """Start polling in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling. Blocks until done."""
        self._is_stopped.set()
        if self._thread.is_alive():
            self._thread.join()

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

    def _run(self) -> None:
        self._look()
        while not self._is_stopped.wait(INTERVAL_S):
            self._look()
