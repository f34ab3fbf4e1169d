"""A router while the state of a component is being restored."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from kvflash._core import Router
from kvflash.cluster_flags import ClusterFlags
from kvflash.discovery import MemoryDiscovery
from kvflash.errors import TransportError
from kvflash.routing import cluster
from kvflash.routing.cluster import Cluster
from kvflash.state import frames
from kvflash.state.attach import StateOptions
from service import DEADLINE_S, until

COMPONENT = ("ns", "backend")


class Restoring:
    """The state of a component that is a while away."""

    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.waits: list[float] = []
        self.is_waited_for = False
        self.is_ending = self.is_stopped = False
        self.resets: list[bool] = []

    def attached(self, *_: Any, options: StateOptions, **__: Any) -> Restoring:
        self.resets.append(options.is_resetting)
        return self

    def wait_ready(self, timeout_s: float) -> bool:
        assert not self.is_stopped
        self.waits.append(timeout_s)
        self.is_waited_for = True
        is_ready = self.is_ready.wait(timeout_s)
        self.is_waited_for = False
        return is_ready

    def stop_soon(self) -> None:
        self.is_ending = True

    def stop(self) -> None:
        # Without this, waiting callers would wait for ever.
        assert not self.is_waited_for
        self.is_stopped = True


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Restoring:
    made = Restoring()
    monkeypatch.setattr("kvflash.state.attach.attach", made.attached)
    return made


def following(made: Cluster) -> threading.Thread:
    thread = threading.Thread(target=made.follow, args=(COMPONENT,))
    thread.start()
    return thread


def nats_cluster(**others: Any) -> Cluster:
    flags = ClusterFlags(event_plane="nats", **others)
    return Cluster(Router(), flags, open_discovery=MemoryDiscovery)


def test_states_and_sharing_end_side_by_side(state: Restoring) -> None:
    """Each takes seconds while its server does not answer."""
    state.is_ready.set()
    made = nats_cluster(router_replica_sync=True)
    made.follow(COMPONENT)
    sharing: Any = made._sharing
    stop, ended = sharing.stop, []

    def watched() -> None:
        ended.append((state.is_ending, state.is_stopped))
        stop()

    sharing.stop = watched
    made.stop()
    assert ended == [(True, False)]
    assert state.is_stopped


def test_stopping_does_not_wait_for_a_restore(state: Restoring) -> None:
    made = nats_cluster()
    threads = [following(made), following(made)]
    until(lambda: len(state.waits) > 1, "the restore to be waited for")
    made.stop()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert state.is_stopped
    assert max(state.waits) < 1.0


def test_a_restore_is_waited_for_by_all_and_once(
    state: Restoring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = nats_cluster()
    threads: list[Any] = [following(made), following(made)]
    until(lambda: len(state.waits) > 1, "the restore to be waited for")
    assert all(thread.is_alive() for thread in threads)
    state.is_ready.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    # Another component, given up.
    monkeypatch.setattr(cluster, "READY_S_MAX", 0.0)
    state.is_ready.clear()
    made.follow(("ns", "other"))
    asked = len(state.waits)
    made.follow(("ns", "other"))
    made.follow(COMPONENT)
    assert len(state.waits) == asked
    assert "the state of ns.other did not arrive within 0 s" in caplog.text
    made.stop()


def test_a_stream_that_cannot_be_reached_is_tried_again_once_for_all_workers(
    state: Restoring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = threading.Semaphore(0)
    failing = threading.Event()
    failing.set()

    causes = itertools.cycle([TransportError("it is away"), RuntimeError("unforeseen")])

    def attach(*_: Any, **__: Any) -> Restoring:
        attempts.release()
        if failing.is_set():
            raise next(causes)
        return state

    monkeypatch.setattr("kvflash.state.attach.attach", attach)
    monkeypatch.setattr(cluster, "RETRY_S", 0.01)
    made = nats_cluster()
    before = threading.active_count()
    for _ in range(5):
        made.follow(COMPONENT)
        assert threading.active_count() <= before + 1
    for _ in range(3):
        assert attempts.acquire(timeout=DEADLINE_S)
    failing.clear()
    until(lambda: COMPONENT in made._states, "the stream")
    # From then on it is waited for.
    waiting = following(made)
    until(lambda: state.is_waited_for, "the restore to be waited for")
    state.is_ready.set()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert "can't follow the events of ns.backend: it is away; trying again" in caplog.text
    made.stop()


def test_a_component_whose_workers_all_left_is_not_followed_for_ever(
    state: Restoring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = nats_cluster(router_reset_states=True)
    state.is_ready.set()
    made.follow(COMPONENT)
    made.present({COMPONENT})
    keep_s = cluster.ABANDONED_S
    made.leave_abandoned(0.0)
    made.leave_abandoned(10 * keep_s)
    # Its blocks are kept for a while, and it counts again if a worker comes.
    made.present(set())
    made.leave_abandoned(20 * keep_s)
    made.leave_abandoned(21 * keep_s - 1.0)
    assert COMPONENT in made._states
    made.follow(COMPONENT)
    made.leave_abandoned(22 * keep_s)
    assert not state.is_stopped
    made.leave_abandoned(23 * keep_s)
    assert state.is_stopped
    assert made._states == {}
    assert "the events of ns.backend are not followed any more" in caplog.text
    # A worker that comes later is followed as the first one was, with what replicas have kept.
    state.is_stopped = False
    made.follow(COMPONENT)
    assert COMPONENT in made._states
    assert state.resets == [True, False]
    made.stop()


def test_a_state_forgets_blocks_before_its_component_is_left() -> None:
    assert cluster.ABANDONED_S > frames._AWAY_S_MAX
