"""State shared with replicas: the workers' events in NATS, and active requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvflash._core import Frontend, Router, RouterCore
from kvflash.cluster_flags import ClusterFlags
from kvflash.errors import KvflashError
from kvflash.roster.core import Component, Replicas, exposed, is_brokered

if TYPE_CHECKING:
    from kvflash.discovery import Discovery
    from kvflash.routing.sharing import Sharing

logger = logging.getLogger(__name__)

READY_S_MAX = 60.0
# Longest single step that a stop waits for.
READY_STEP_S = 0.2
RETRY_S = 2.0
METRICS_S = 0.5
# How long a component without workers is followed: by then its state has forgotten their blocks.
ABANDONED_S = 660.0


class Cluster(Replicas):
    """Follows state and shares bookings for the components that discovery lists.

    ``open_discovery`` opens the discovery that lists workers, in the event loop that uses it.
    ``show_metrics`` is called twice a second with lines in the OpenMetrics text format,
    ``show_warnings`` as often with the reasons why the state is incomplete. With ``show_metrics``,
    components that :meth:`present` does not name are left after ABANDONED_S. Errors name
    ``setting``, which selects events over NATS. For ``is_strict`` see StateOptions.
    """

    def __init__(
        self,
        core: Frontend | Router | RouterCore,
        flags: ClusterFlags,
        *,
        open_discovery: Callable[[], Discovery],
        show_metrics: Callable[[str], None] | None = None,
        show_warnings: Callable[[list[str]], None] | None = None,
        setting: str = "--event-plane nats",
        is_strict: bool = False,
    ) -> None:
        super().__init__()
        self._catalog, self._flags, self._make_discovery = core.catalog, flags, open_discovery
        self._show_warnings, self._setting, self._is_strict = show_warnings, setting, is_strict
        self._remedy = f"start the router with {setting}, or the worker with --event-plane zmq"
        self._uses_events = core.uses_events
        self.is_nats = self._uses_events and flags.event_plane == "nats"
        self._sharing: Sharing | None = None
        if flags.router_replica_sync:
            # Without replicas asyncio need not be loaded.
            from kvflash.routing.sharing import Sharing  # noqa: PLC0415

            self._sharing = Sharing(
                core.bookings, open_discovery=open_discovery, event_plane=flags.event_plane
            )
        self.is_alone = not self.is_nats and self._sharing is None
        self._lock = threading.Lock()
        self._states: dict[Component, Any] = {}
        # Components whose state has arrived, timed out or can't be reached.
        self._awaited: set[Component] = set()
        # Since when components that are followed have no workers.
        self._abandoned: dict[Component, float] = {}
        self._present: set[Component] | None = None
        self._reset: set[Component] = set()
        self._is_stopped = threading.Event()
        self._reporter: threading.Thread | None = None
        if show_metrics is not None:
            self._reporter = threading.Thread(
                target=self._report, args=(show_metrics,), name="kvflash-report", daemon=True
            )

    def check(self) -> None:
        """See :meth:`Replicas.check`.

        Logs settings that have no effect without NATS. Raises TransportError if NATS does not
        answer, ConfigError if it refuses the login or its client is not installed.
        """
        for text in self._flags.without_effect(self._setting, uses_events=self._uses_events):
            logger.warning("%s", text)
        shares_by_nats = self._sharing is not None and self._flags.event_plane == "nats"
        if not (self.is_nats or shares_by_nats):
            return
        from kvflash.servers import NatsSettings, needing_nats  # noqa: PLC0415

        with needing_nats(self._setting):
            from kvflash.transport.nats_connection import check_server  # noqa: PLC0415
        check_server(NatsSettings.from_env())

    def start(self) -> None:
        """Start sharing, and its reports, in the background."""
        if self._sharing is not None:
            self._sharing.start()
        if self._reporter is not None:
            self._reporter.start()

    def stop(self) -> None:
        """Leave; blocks until done."""
        self._is_stopped.set()
        if self._reporter is not None and self._reporter.is_alive():
            self._reporter.join()
        with self._lock:
            states, self._states = list(self._states.values()), {}
        # Side by side: while servers do not answer, each needs seconds.
        for state in states:
            state.stop_soon()
        if self._sharing is not None:
            self._sharing.stop()
        for state in states:
            state.stop()

    # -- called by those that find workers; only before_worker and follow wait for a server

    def _receives(self, where: dict[str, Any]) -> bool:
        return self.is_nats or not self._uses_events or not is_brokered(where)

    def before_worker(
        self, component: Component, instance_id: int, events: dict[int, dict[str, Any]]
    ) -> None:
        """Load the component's state before the core learns of a worker."""
        schemes = {where["endpoint"].partition("://")[0] for where in events.values()}
        if not self.is_nats or (schemes and "jetstream" not in schemes):
            return
        self.follow(component)
        self.instance_joined(component, instance_id)

    def follow(self, component: Component) -> None:
        """Follow a component's stream; return when it is loaded, after 60 s, or at the stop."""
        end = time.monotonic() + READY_S_MAX
        while True:
            with self._lock:
                self._abandoned.pop(component, None)
                if component in self._awaited or self._is_stopped.is_set():
                    return
                if component not in self._states and not self._attach(component):
                    # Serving goes on without it.
                    self._awaited.add(component)
                    threading.Thread(
                        target=self._attach_later,
                        args=(component,),
                        name="kvflash-retry",
                        daemon=True,
                    ).start()
                    return
                is_ready = self._states[component].wait_ready(READY_STEP_S)
                if not is_ready and time.monotonic() < end:
                    continue
                self._awaited.add(component)
            if not is_ready:
                logger.warning(
                    "the state of %s.%s did not arrive within %g s; serving without it",
                    *component, READY_S_MAX,
                )  # fmt: skip
            return

    def instance_joined(self, component: Component, instance_id: int) -> None:
        """The instance has joined: its events in the stream count from now on."""
        state = self._states.get(component)
        if state is not None:
            state.worker_joined(instance_id)

    def worker_joined(
        self, component: Component, instance_id: int, shared_id: int | None = None
    ) -> None:
        """The core knows the worker: its events in the stream count, and requests are shared.

        ``shared_id`` is its number between routers, if that differs.
        """
        self.instance_joined(component, instance_id)
        if self._sharing is not None:
            self._sharing.worker_joined(component, instance_id, shared_id)

    def worker_left(self, component: Component, instance_id: int) -> None:
        """The worker has left."""
        state = self._states.get(component)
        if state is not None:
            state.worker_left(instance_id)
        self.worker_gone(instance_id)

    def worker_gone(self, instance_id: int) -> None:
        """The worker takes no more requests; events about its blocks may still arrive."""
        if self._sharing is not None:
            self._sharing.worker_left(instance_id)

    def only(self, component_ids: dict[Component, set[int]]) -> None:
        """Discovery has listed all workers: drop those that only the state knows."""
        for component, state in list(self._states.items()):
            state.keep_only(component_ids.get(component, set()))

    def present(self, components: set[Component]) -> None:
        """Discovery lists workers of these components only."""
        with self._lock:
            self._present = components

    def leave_abandoned(self, now_s: float) -> None:
        """Follow components no longer that have had no workers for ABANDONED_S."""
        with self._lock:
            if self._present is None:
                return
            absent = self._states.keys() - self._present
            self._abandoned = {one: self._abandoned.get(one, now_s) for one in absent}
            left = [one for one, at in self._abandoned.items() if now_s - at >= ABANDONED_S]
            states = {component: self._states.pop(component) for component in left}
            for component in left:
                del self._abandoned[component]
                self._awaited.discard(component)
        for component, state in states.items():
            logger.info(
                "the events of %s.%s are not followed any more: it has no workers", *component
            )
            state.stop()

    def _attach(self, component: Component) -> bool:
        from kvflash.state.attach import StateOptions, attach  # noqa: PLC0415

        options = StateOptions(
            snapshot_threshold=self._flags.router_snapshot_threshold,
            # Once: a component that is followed again has the state of other replicas.
            is_resetting=self._flags.router_reset_states and component not in self._reset,
            is_strict=self._is_strict,
        )
        try:
            state = attach(
                self._catalog, *component, open_keys=self._open_discovery, options=options
            )
        except Exception as error:
            text = "can't follow the events of %s.%s: %s; trying again"
            is_known = isinstance(error, KvflashError)
            logger.error(text, *component, error, exc_info=not is_known)
            return False
        self._states[component] = state
        self._reset.add(component)
        return True

    def _attach_later(self, component: Component) -> None:
        while not self._is_stopped.wait(RETRY_S):
            with self._lock:
                if self._is_stopped.is_set():
                    return
                if self._attach(component):
                    self._awaited.remove(component)
                    return

    async def _open_discovery(self) -> Discovery:
        return self._make_discovery()

    # -- metrics

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of each component, by ``namespace.component``; names include units."""
        found = {}
        for component, state in list(self._states.items()):
            with contextlib.suppress(KvflashError):
                found[".".join(component)] = state.stats()
        return found

    def _report(self, show: Callable[[str], None]) -> None:
        while not self._is_stopped.wait(METRICS_S):
            states = {f'component="{name}"': counts for name, counts in self.stats().items()}
            lines = exposed("kvflash_state_", states)
            if self._sharing is not None:
                lines = exposed("kvflash_sync_", {"": self._sharing.stats()}) + lines
            show(lines)
            if self._show_warnings is not None:
                self._show_warnings(self.warnings())
            self.leave_abandoned(time.monotonic())

    def warnings(self) -> list[str]:
        """Reasons why workers' events are missing, as text."""
        found = []
        for (namespace, component), state in list(self._states.items()):
            name = f"{namespace}.{component}"
            if not state.is_connected():
                found.append(
                    "NATS (NATS_SERVER) can't be reached: the router misses what workers of "
                    f"{name} store and evict, and uses their last known caches"
                )
            elif failure := state.snapshot_failure:
                found.append(
                    f"snapshots of {name} fail, so workers' events may not be stored either: "
                    f"{failure}; see the log of the NATS server"
                )
        return found
