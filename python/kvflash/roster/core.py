"""What receives the workers found: the core, and replicas of the service."""

import logging
from typing import Any

from kvflash._core import FoundWorkers, Frontend, Router, RouterCore

logger = logging.getLogger(__name__)

#: Namespace and component.
Component = tuple[str, str]
#: A core that takes workers: the frontend, or what an indexer follows.
Fleet = Frontend | FoundWorkers
#: A core that takes workers of discovery.
Taker = Fleet | Router | RouterCore


def announced(events: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A worker's announced event endpoints, by rank, in the core's format."""
    return {
        str(rank): {key: where.get(key) for key in ("endpoint", "replay_endpoint")}
        for rank, where in events.items()
    }


def exposed(prefix: str, groups: dict[str, dict[str, int]]) -> str:
    """Lines in the OpenMetrics text format; a group's name becomes its label."""
    values: dict[str, list[tuple[str, int]]] = {}
    for label, counts in groups.items():
        for name, count in counts.items():
            values.setdefault(name, []).append((label, count))
    lines = []
    for name, found in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# TYPE {prefix}{name.removesuffix('_total')} {kind}\n")
        for label, count in found:
            labels = f"{{{label}}}" if label else ""
            lines.append(f"{prefix}{name}{labels} {count}\n")
    return "".join(lines)


def component_of(path: str) -> Component:
    """The component of an endpoint, ``namespace/component/endpoint``."""
    namespace, component, _ = path.split("/", 2)
    return namespace, component


def is_brokered(where: dict[str, Any]) -> bool:
    """Whether a broker carries these events."""
    return str(where.get("endpoint")).partition("://")[0] in ("jetstream", "nats")


class Replicas:
    """Other routers of these workers; :class:`kvflash.routing.cluster.Cluster` has some.

    This base class is for a single service: nothing is shared, and only events over sockets are
    received.
    """

    #: Whether events come over NATS.
    is_nats = False
    #: Whether nothing is shared: then no call waits.
    is_alone = True
    # What to do about events that are not received.
    _remedy = "start the worker with --event-plane zmq, since only sockets are read here"

    def __init__(self) -> None:
        self._warned: set[int] = set()

    def check(self) -> None:
        """Contact the required servers, so that a missing one is reported at start-up."""

    def start(self) -> None:
        """Start sharing in the background."""

    def stop(self) -> None:
        """Leave; blocks until done."""

    def check_events(self, instance_id: int, events: dict[int, dict[str, Any]]) -> None:
        """Log once if a worker announces events that this process does not receive."""
        for where in events.values():
            if not self._receives(where) and instance_id not in self._warned:
                self._warned.add(instance_id)
                logger.error(
                    "worker %d publishes its events at %s: %s; until then its cache is not counted",
                    instance_id, where["endpoint"], self._remedy,
                )  # fmt: skip

    def _receives(self, where: dict[str, Any]) -> bool:
        """Whether events from there are received, if they are needed."""
        return not is_brokered(where)

    def events(self, events: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Of the sockets that a worker announces, those to pass to a core that reads all of them.

        Events in JetStream arrive without a subscription.
        """
        return {
            rank: where
            for rank, where in announced(events).items()
            if not is_brokered(where) or (self.is_nats and where["endpoint"].startswith("nats://"))
        }

    def before_worker(
        self, component: Component, instance_id: int, events: dict[int, dict[str, Any]]
    ) -> None:
        """Called before a worker is added to the core."""

    def instance_joined(self, component: Component, instance_id: int) -> None:
        """Called for an instance that the core does not get."""

    def worker_joined(
        self, component: Component, instance_id: int, shared_id: int | None = None
    ) -> None:
        """Called after the core added or changed it; its number between routers may differ."""

    def worker_left(self, component: Component, instance_id: int) -> None:
        """Called when it has left."""

    def worker_gone(self, instance_id: int) -> None:
        """Called when it takes no requests any more."""

    def only(self, component_ids: dict[Component, set[int]]) -> None:
        """Called when discovery has listed all workers."""

    def present(self, components: set[Component]) -> None:
        """Called with the components of the workers in discovery after each change."""
