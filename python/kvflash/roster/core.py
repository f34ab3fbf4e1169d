"""Interfaces that receive the workers found."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from kvflash.roster.endpoint import is_brokered

__all__ = ["Alone", "Component", "EngineFleet", "Fleet", "Replicas"]

logger = logging.getLogger(__name__)

#: Namespace and component.
Component = tuple[str, str]


class EngineFleet(Protocol):
    """A core that takes engines by address."""

    def add_worker(self, spec: str) -> int:
        """Add an engine with OpenAI's API."""

    def remove_worker(self, instance_id: int) -> None:
        """Remove it; its requests go on."""


class Fleet(EngineFleet, Protocol):
    """A core that also takes workers of the runtime."""

    def put_worker(self, worker: str) -> int:
        """Add or change a worker of the runtime."""

    def set_worker_state(self, instance_id: int, state: str) -> None:
        """Take a worker out of service, or put it back."""


class Replicas(Protocol):
    """Other routers of these workers; see :class:`kvflash.routing.cluster.Cluster`."""

    def check_events(self, instance_id: int, events: dict[int, dict[str, Any]]) -> None:
        """Log once if a worker announces events that this process does not receive."""

    def before_worker(
        self, component: Component, instance_id: int, events: dict[int, dict[str, Any]]
    ) -> None:
        """Called before a worker is added to the core."""

    def worker_joined(
        self, component: Component, instance_id: int, shared_id: int | None = None
    ) -> None:
        """Called after the core added it; its number between routers may differ."""

    def worker_left(self, component: Component, instance_id: int) -> None:
        """Called when it has left."""

    def worker_gone(self, instance_id: int) -> None:
        """Called when it takes no requests any more."""

    def only(self, component_ids: dict[Component, set[int]]) -> None:
        """Called when discovery has listed all workers."""


class Alone:
    """For a single router: nothing is shared, and only events over sockets are received."""

    def __init__(self) -> None:
        self._warned: set[int] = set()

    def check_events(self, instance_id: int, events: dict[int, dict[str, Any]]) -> None:
        """See :class:`Replicas`."""
        for where in events.values():
            if is_brokered(where) and instance_id not in self._warned:
                self._warned.add(instance_id)
                logger.error(
                    "worker %d publishes its events at %s, and only sockets are read here: start "
                    "the "
                    "worker with --event-plane zmq", instance_id, where["endpoint"],
                )  # fmt: skip

    def before_worker(self, *_told: Any) -> None:
        """See :class:`Replicas`."""

    worker_joined = worker_left = worker_gone = only = before_worker
