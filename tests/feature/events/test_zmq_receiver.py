"""The event transport over real sockets: what is lost comes back, and what is wrong stays small.

The index is compared with plain dictionaries, through GET /dump.
"""

from __future__ import annotations

import contextlib
import random
import re
import resource
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import zmq

from kvflash import compute_block_hash_for_seq, compute_sequence_hashes
from kvflash._core import Indexer
from kvflash.doctor.events import ask_replays
from kvflash.transport.zmq import ZmqReceiver
from kvflash.transport.zmq_socket import open_replay
from service import (
    DEADLINE_S,
    END_OF_REPLAY,
    EmbeddedIndexer,
    batch,
    cleared,
    dumped_blocks,
    listener,
    needs_ipv6,
    removed,
    stored,
    until,
    wait_for_sequence,
)
from support_indexer import register_and_wait as register

SIZE = 2


@pytest.fixture(scope="module", params=[True, False], ids=["native", "in Python"])
def embedded(request):
    made = EmbeddedIndexer(is_native=request.param)
    assert (made.receiver._drain is not None) == request.param
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["native", "in Python"])
def hasty(request):
    """An indexer that soon gives a replay up, for those that wait for that."""
    made = EmbeddedIndexer(replay_timeout_s=0.5, is_native=request.param)
    yield made.http
    made.close()


def test_an_order_before_the_thread_runs_is_carried_out():
    """The thread of a busy machine starts late, and nothing but an order wakes it."""
    receiver = ZmqReceiver(Indexer(threads=1).catalog)
    carried_out = threading.Event()
    receiver._carry_out = lambda *_: carried_out.set()
    receiver.obey(("resume", 1, "", None))
    receiver.start()
    try:
        assert carried_out.wait(DEADLINE_S)
    finally:
        receiver.stop()


class Holdings:
    """An engine's cache by first principles: writes its own events, knows what it holds."""

    def __init__(self, seed, instance=1):
        self._random = random.Random(seed)
        self._instance = instance
        self._names = iter(range(1 + instance * 10**6, 10**9))
        self.places = {}

    def next_batch(self):
        return batch(*(self._event() for _ in range(self._random.randint(1, 4))))

    def _event(self):
        roll = self._random.random()
        if self.places and roll < 0.35:
            gone = self._random.sample(sorted(self.places), min(3, len(self.places)))
            for name in gone:
                del self.places[name]
            return removed(gone)
        if roll < 0.38:
            self.places.clear()
            return cleared()
        parent = self._random.choice([None, *self.places])
        ids = [self._random.randint(0, 9) for _ in range(SIZE * self._random.randint(1, 4))]
        names = [next(self._names) for _ in range(len(ids) // SIZE)]
        event = stored(names, ids, parent, block_size=SIZE)
        chain = [] if parent is None else [self.places[parent]]
        for name, local in zip(names, compute_block_hash_for_seq(ids, SIZE), strict=True):
            chain = compute_sequence_hashes([*chain, local])[-1:]
            self.places[name] = chain[0]
        return event

    def restart(self):
        self.places.clear()

    @property
    def facts(self):
        return {(self._instance, 0, "device", name, at) for name, at in self.places.items()}


def counts(http, instance=1):
    return listener(http, instance)["events"]


def one(name=1, ids=(1, 2), parent=None):
    return batch(stored([name], ids, parent, block_size=SIZE))


@needs_ipv6
def test_events_and_replay_of_an_engine_at_an_ipv6_address(http, engine):
    made, held = engine(endpoint="tcp://[::1]:*"), Holdings(7)
    register(http, made)
    made.publish(held.next_batch())
    made.publish(held.next_batch(), is_sent=False)
    wait_for_sequence(http, 1, made.publish(held.next_batch()))
    assert dumped_blocks(http) == held.facts
    assert made.asked
    # The doctor has sockets of its own.
    (answer,) = ask_replays([(made.replay_endpoint, 0)], 5)
    assert (answer.has_answered, answer.first) == (True, 0)


# -- gaps


@pytest.mark.parametrize("topic_in_replay", [True, False], ids=["with topic", "without topic"])
def test_what_was_dropped_is_replayed(http, engine, topic_in_replay):
    made, held = engine(topic_in_replay=topic_in_replay), Holdings(1)
    register(http, made)
    assert made.asked == [0]
    for is_sent in (True, True, False, False, False, True, True):
        last = made.publish(held.next_batch(), is_sent=is_sent)
    wait_for_sequence(http, 1, last)
    assert made.asked == [0, 2]
    assert dumped_blocks(http) == held.facts
    events = counts(http)
    assert events["gap_batches"] == 3
    # The last batch comes with the replay, or by itself when that was quicker than the engine.
    assert events["repaired_batches"] in (4, 5)
    assert (events["batches"], events["lost_batches"], events["restarts"]) == (7, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_any_losses_are_repaired(http, engine, seed):
    made, held, dice = engine(topic_in_replay=bool(seed % 2)), Holdings(seed), random.Random(seed)
    register(http, made)
    sent = 0
    for at in range(400):
        is_sent = dice.random() < 0.7 or at == 399
        sent += is_sent
        last = made.publish(held.next_batch(), is_sent=is_sent)
    wait_for_sequence(http, 1, last)
    assert 200 < sent < 350
    assert dumped_blocks(http) == held.facts
    events = counts(http)
    assert (events["batches"], events["lost_batches"], events["restarts"]) == (400, 0, 0)


def test_without_a_replay_endpoint_what_is_lost_is_counted(http, engine, caplog):
    made = engine(replay=False)
    register(http, made)
    made.publish(one(1))
    made.publish(one(2, (3, 4), 1), is_sent=False)
    made.publish(one(3, (5, 6)), is_sent=False)
    last = made.publish(one(4, (7, 8)))
    wait_for_sequence(http, 1, last)
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 4}
    events = counts(http)
    assert (events["gap_batches"], events["lost_batches"], events["batches"]) == (2, 2, 2)
    # By its address: numbers in the core are not those of workers.
    [said] = [record.message for record in caplog.records if "no replay endpoint" in record.message]
    assert said.startswith(f"engine at {made.endpoint}: batches ")
    made.publish(one(5, (9, 10)), is_sent=False)
    last = made.publish(one(6, (11, 12)))
    wait_for_sequence(http, 1, last)
    messages = [record.message for record in caplog.records]
    said = f"engine at {made.endpoint}: batch {last - 1} was not received"
    assert any(message.startswith(said) for message in messages), messages


def test_a_ring_that_begins_later_gives_what_it_has(http, engine):
    made = engine(ring=3)
    register(http, made)
    made.publish(one(1))
    wait_for_sequence(http, 1, 0)
    for name in range(2, 11):
        made.publish(one(name, (name, name)), is_sent=False)
    last = made.publish(one(11, (11, 11)))
    wait_for_sequence(http, 1, last)
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 9, 10, 11}
    events = counts(http)
    assert (events["lost_batches"], events["repaired_batches"], events["batches"]) == (7, 3, 4)
    assert made.asked == [0, 1]


def test_a_ring_that_begins_later_does_not_cost_frames_that_came_live(http, engine):
    made = engine(ring=3)
    register(http, made)
    made.publish(one(1))
    wait_for_sequence(http, 1, 0)
    made.gate.clear()
    made.publish(one(2, (2, 2)), is_sent=False)
    for name in range(3, 13):
        last = made.publish(one(name, (name, name)))
    until(lambda: made.asked == [0, 1], "the replay to be asked for")
    made.gate.set()
    wait_for_sequence(http, 1, last)
    assert {fact[3] for fact in dumped_blocks(http)} == {1, *range(3, 13)}
    assert counts(http)["lost_batches"] == 1


def test_a_replay_without_an_answer_ends(hasty, engine):
    made, other = engine(), engine()
    register(hasty, made)
    register(hasty, other, 2)
    made.answer = lambda first: None
    made.publish(one(1))
    made.publish(one(2, (3, 4), 1), is_sent=False)
    made.publish(one(3, (5, 6)))
    # Others are served meanwhile.
    until(lambda: made.asked == [0, 1], "the replay to be asked for")
    wait_for_sequence(hasty, 2, other.publish(one(1)))
    entry = wait_for_sequence(hasty, 1, 2)
    assert entry["status"] == "active"
    assert entry["last_error"].startswith("replay failed: ")
    assert "sent none of the missing batches for 0.5 s" in entry["last_error"]
    # It goes on, and the next gap tries again.
    made.answer = made.ring_from
    made.publish(one(4, (7, 8)), is_sent=False)
    wait_for_sequence(hasty, 1, made.publish(one(5, (9, 9))))
    assert {fact[3] for fact in dumped_blocks(hasty) if fact[0] == 1} == {1, 3, 4, 5}
    events = counts(hasty)
    assert (events["lost_batches"], events["batches"]) == (1, 4)
    assert made.asked == [0, 1, 3]


def test_a_replay_that_stalls_midway_keeps_what_came(hasty, engine):
    made = engine()
    register(hasty, made)
    for name in range(1, 6):
        made.publish(one(name, (name, name)), is_sent=name == 1)
    made.answer = lambda first: made.ring_from(first)[:2] if first == 1 else None
    last = made.publish(one(6, (6, 6)))
    wait_for_sequence(hasty, 1, last)
    assert {fact[3] for fact in dumped_blocks(hasty)} == {1, 2, 3, 6}
    assert counts(hasty)["lost_batches"] == 2


def test_a_replay_with_holes_is_asked_for_again(hasty, engine):
    """A ROUTER drops what its queue can't hold: vLLM's holds 1,000 messages, its ring 10,000."""
    made, held = engine(), Holdings(10)
    register(hasty, made)
    made.answer = lambda first: made.ring_from(first)[:40] + made.ring_from(first)[60:100]
    for _ in range(200):
        made.publish(held.next_batch(), is_sent=False)
    last = made.publish(held.next_batch())
    wait_for_sequence(hasty, 1, last)
    assert counts(hasty)["lost_batches"] == 0
    assert dumped_blocks(hasty) == held.facts


def test_swapped_endpoints_are_named_and_can_be_corrected(http, engine, caplog):
    made = engine()
    swapped = SimpleNamespace(endpoint=made.replay_endpoint, replay_endpoint=made.endpoint)
    register(http, swapped, is_awaited=False)
    told = "is it the engine's replay_endpoint"
    until(lambda: told in listener(http, 1).get("last_error", ""), "the reason")
    assert listener(http, 1)["status"] == "pending"
    assert caplog.text.count(told) == 1
    http.post("/unregister", {"instance_id": 1, "model_name": "m"})
    register(http, made)
    assert "last_error" not in listener(http, 1)


@contextlib.contextmanager
def registered_server(http):
    """A TCP server at the event endpoint of worker 1, which does not answer by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        peer = SimpleNamespace(endpoint=endpoint, replay_endpoint=None)
        register(http, peer, is_awaited=False)
        yield server, endpoint


def test_a_peer_that_hangs_up_is_told_and_tried_until_it_publishes(http, engine):
    """As a proxy does whose engine is down, which libzmq alone would dial 20 times per second."""
    with registered_server(http) as (proxy, endpoint):
        for _ in range(3):
            proxy.accept()[0].close()
        until(lambda: "a proxy" in listener(http, 1).get("last_error", ""), "the reason")
    engine(replay=False, endpoint=endpoint)
    until(lambda: listener(http, 1)["status"] == "active", "the connection")


def test_a_peer_that_says_nothing_is_told(http, monkeypatch):
    monkeypatch.setattr("kvflash.transport.zmq._HANDSHAKE_S", 0.2)
    with registered_server(http):
        until(lambda: "its HTTP port" in listener(http, 1).get("last_error", ""), "the reason")


def test_what_a_web_server_answers_is_no_message(http):
    """libzmq would read it as ZMTP 1.0, and abort the process where its last frame is cut off."""
    said = b"HTTP/1.1 400 Bad Request\r\n" + b"content-type: text/plain\r\n" * 100
    with registered_server(http) as (server, _):
        for _ in range(3):
            with server.accept()[0] as connection:
                connection.recv(64)
                connection.sendall(said)
        until(lambda: "its HTTP port" in listener(http, 1).get("last_error", ""), "the reason")
    events = listener(http, 1)["events"]
    assert (events["undecodable"], events["malformed"], events["gap_batches"]) == (0, 0, 0)


def test_nobody_at_the_replay_endpoint(hasty, engine):
    made = engine()
    made.stop_replay()
    register(hasty, made, is_awaited=False)
    made.wait_for_subscriber()
    made.publish(one(1))
    made.publish(one(2, (2, 2)), is_sent=False)
    last = made.publish(one(3, (3, 3)))
    wait_for_sequence(hasty, 1, last)
    assert counts(hasty)["lost_batches"] == 1


def test_a_replay_endpoint_that_cannot_be_connected(http, engine):
    made = engine(replay=False)
    register(http, made, is_awaited=False, replay_endpoint="tcp://127.0.0.1:*")
    made.wait_for_subscriber()
    made.publish(one(1))
    made.publish(one(2, (2, 2)), is_sent=False)
    entry = wait_for_sequence(http, 1, made.publish(one(3, (3, 3))))
    assert "can't reach tcp://127.0.0.1:*" in entry["last_error"]
    assert entry["events"]["lost_batches"] == 1


SECOND = (2).to_bytes(8, "big")
GARBAGE = {
    "one part": [[b"what"]],
    "an empty part": [[b""]],
    "a sequence of 7 bytes": [[SECOND[1:], one(2)]],
    "many parts": [[b"a"] * 20],
    "no batch": [[b"t", (1).to_bytes(8, "big"), b"\xc1\xc1"], [b"t", END_OF_REPLAY, b""]],
    "an old number": [[b"t", (0).to_bytes(8, "big"), one(9, (9, 9))], [b"t", END_OF_REPLAY, b""]],
    "an end with content": [[b"t", END_OF_REPLAY, b"content"]],
    "an empty payload": [[b"t", (1).to_bytes(8, "big"), b""]],
    "nothing but the end": [[END_OF_REPLAY, b""]],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_replay_of_garbage_ends_and_the_stream_goes_on(hasty, engine, name):
    made = engine()
    register(hasty, made)
    made.answer = lambda first: GARBAGE[name]
    made.publish(one(1))
    made.publish(one(2, (2, 2)), is_sent=False)
    made.publish(one(3, (3, 3)))
    wait_for_sequence(hasty, 1, 2)
    made.answer = made.ring_from
    made.publish(one(4, (4, 4)), is_sent=False)
    wait_for_sequence(hasty, 1, made.publish(one(5, (5, 5))))
    assert {fact[3] for fact in dumped_blocks(hasty)} == {1, 3, 4, 5}
    events = counts(hasty)
    assert events["lost_batches"] + events["undecodable"] >= 1


def test_a_replay_of_a_far_number_does_not_deafen(http, engine):
    made = engine()
    register(http, made)
    made.answer = lambda first: [
        [b"t", (2**40).to_bytes(8, "big"), one(9, (9, 9))],
        [b"t", END_OF_REPLAY, b""],
    ]
    made.publish(one(1))
    made.publish(one(2, (2, 2)), is_sent=False)
    made.publish(one(3, (3, 3)))
    until(lambda: made.asked == [0, 1], "the replay")
    made.answer = made.ring_from
    made.publish(one(4, (4, 4)))
    until(lambda: {1, 3, 4} <= {fact[3] for fact in dumped_blocks(http)}, "live frames")


def test_garbage_after_a_reconnect_costs_nobody_else(engine):
    embedded = EmbeddedIndexer()
    try:
        made, other = engine(), engine()
        register(embedded.http, made)
        register(embedded.http, other, 2)
        wait_for_sequence(embedded.http, 1, made.publish(one(1)))
        made.answer = lambda first: [[b"t", b"short", one(1)], [b"t", END_OF_REPLAY, b""]]
        made.restart()
        until(lambda: len(made.asked) > 1, "the verification")
        number = other.publish(one(1))
        until(lambda: listener(embedded.http, 2)["last_sequence"] == number, "the other")
    finally:
        embedded.close()


def test_live_frames_during_a_replay_are_applied_once(http, engine):
    made, held = engine(), Holdings(7)
    register(http, made)
    for _ in range(3):
        made.publish(held.next_batch())
    wait_for_sequence(http, 1, 2)
    made.gate.clear()
    made.publish(held.next_batch(), is_sent=False)
    for _ in range(500):
        made.publish(held.next_batch())
    until(lambda: made.asked == [0, 3], "the replay to be asked for")
    # Half of what the replay brings is in the SUB socket as well, the rest is not sent before it.
    made.gate.set()
    for _ in range(500):
        last = made.publish(held.next_batch())
    wait_for_sequence(http, 1, last)
    assert dumped_blocks(http) == held.facts
    events = counts(http)
    assert (events["batches"], events["lost_batches"], events["restarts"]) == (1004, 0, 0)


def test_a_replay_larger_than_a_round(http, engine):
    made, held = engine(), Holdings(8)
    register(http, made)
    for _ in range(3000):
        made.publish(held.next_batch(), is_sent=False)
    last = made.publish(held.next_batch())
    wait_for_sequence(http, 1, last)
    assert dumped_blocks(http) == held.facts
    assert counts(http)["repaired_batches"] == 3001


def test_all_that_an_engine_keeps_waits_for_its_reader(zmq_socket):
    # As vLLM by default: 10,000 batches, sent at once from a socket that queues 1,000.
    engine = zmq_socket(zmq.ROUTER)
    engine.setsockopt(zmq.ROUTER_MANDATORY, 1)
    engine.setsockopt(zmq.SNDTIMEO, 5_000)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    with zmq.Context() as context:
        replay = open_replay(context, f"tcp://127.0.0.1:{port}", 0)
        peer, *_ = engine.recv_multipart()
        for sequence in range(10_000):
            engine.send_multipart([peer, b"", sequence.to_bytes(8, "big"), bytes(4_000)])
        received = [replay.recv_multipart()[1] for _ in range(10_000)]
        replay.close(0)
    assert received == [sequence.to_bytes(8, "big") for sequence in range(10_000)]


# -- connections


def test_what_came_before_the_subscription_is_caught_up(http, engine):
    made, held = engine(), Holdings(2)
    for _ in range(20):
        made.publish(held.next_batch())
    register(http, made)
    # Without a single live frame.
    wait_for_sequence(http, 1, 19)
    assert made.asked == [0]
    assert dumped_blocks(http) == held.facts
    wait_for_sequence(http, 1, made.publish(held.next_batch()))
    assert dumped_blocks(http) == held.facts
    assert counts(http)["gap_batches"] == 0


def test_a_publisher_that_starts_after_its_registration(http, engine):
    made, held = engine(), Holdings(3)
    made.stop()
    register(http, made, is_awaited=False)
    # The address of a stopped socket may still accept a connection.
    until(lambda: listener(http, 1)["status"] == "pending", "no connection")
    made.start()
    for _ in range(50):
        last = made.publish(held.next_batch())
    wait_for_sequence(http, 1, last)
    assert dumped_blocks(http) == held.facts
    assert counts(http)["lost_batches"] == 0


def test_what_is_published_while_disconnected_is_caught_up(http, engine):
    made, held = engine(), Holdings(4)
    register(http, made)
    for _ in range(5):
        last = made.publish(held.next_batch())
    wait_for_sequence(http, 1, last)
    # The socket breaks, the engine lives on.
    made.pub.close(0)
    until(lambda: listener(http, 1)["status"] == "pending", "the loss to be seen")
    for _ in range(7):
        last = made.publish(held.next_batch(), is_sent=False)
    kept = made.ring, made.sequence
    made.stop_replay()
    made.gate.clear()
    made.start()
    made.ring, made.sequence = kept
    made.gate.set()
    wait_for_sequence(http, 1, last)
    assert made.asked == [0, 4]
    assert dumped_blocks(http) == held.facts
    wait_for_sequence(http, 1, made.publish(held.next_batch()))
    assert dumped_blocks(http) == held.facts
    events = counts(http)
    assert (events["restarts"], events["lost_batches"], events["batches"]) == (0, 0, 13)


@pytest.mark.parametrize("has_replay", [True, False], ids=["with replay", "without replay"])
def test_a_restart_forgets_what_was_held(http, engine, has_replay):
    made, held = engine(replay=has_replay), Holdings(5)
    register(http, made)
    for _ in range(10):
        last = made.publish(held.next_batch())
    wait_for_sequence(http, 1, last)
    made.restart()
    held.restart()
    made.wait_for_subscriber()
    for _ in range(4):
        last = made.publish(held.next_batch())
    until(lambda: counts(http)["restarts"] == 1, "the restart to be noticed")
    wait_for_sequence(http, 1, last)
    assert dumped_blocks(http) == held.facts
    events = counts(http)
    assert (events["batches"], events["lost_batches"], events["restarts"]) == (14, 0, 1)


@pytest.mark.parametrize("new_batches", [0, 3, 10, 25])
def test_a_restart_while_disconnected_is_found_without_a_live_frame(http, engine, new_batches):
    """Also when the new engine has already numbered past the old one's last batch."""
    made, held = engine(), Holdings(6)
    register(http, made)
    for _ in range(10):
        last = made.publish(held.next_batch())
    wait_for_sequence(http, 1, last)
    made.stop()
    held.restart()
    until(lambda: listener(http, 1)["status"] == "pending", "the loss to be seen")
    made.gate.clear()
    made.start()
    for _ in range(new_batches):
        made.publish(held.next_batch(), is_sent=False)
    made.gate.set()
    until(lambda: counts(http)["restarts"] == 1, "the restart to be noticed")
    until(lambda: dumped_blocks(http) == held.facts, "the new engine's blocks")
    wait_for_sequence(http, 1, made.publish(held.next_batch()))
    assert dumped_blocks(http) == held.facts
    assert counts(http)["lost_batches"] == 0


def test_a_restart_whose_first_frames_were_missed(hasty, engine):
    made, held = engine(), Holdings(9)
    register(hasty, made)
    for _ in range(10):
        last = made.publish(held.next_batch())
    wait_for_sequence(hasty, 1, last)
    made.answer = lambda first: None  # the verification gets no answer
    made.restart()
    held.restart()
    made.wait_for_subscriber()
    until(lambda: len(made.asked) == 2, "the verification")
    made.publish(held.next_batch(), is_sent=False)
    made.publish(held.next_batch(), is_sent=False)
    until(lambda: "replay failed" in listener(hasty, 1).get("last_error", ""), "its end")
    made.answer = made.ring_from
    last = made.publish(held.next_batch())
    wait_for_sequence(hasty, 1, last)
    assert made.asked == [0, 9, 0]
    assert dumped_blocks(hasty) == held.facts
    assert counts(hasty)["restarts"] == 1


def test_a_replay_that_fails_with_its_engine_leaves_it_pending(hasty, engine):
    made = engine()
    register(hasty, made)
    wait_for_sequence(hasty, 1, made.publish(one(1)))
    made.answer = lambda first: None
    made.publish(one(2, (2, 2)), is_sent=False)
    made.publish(one(3, (3, 3)))
    until(lambda: made.asked == [0, 1], "the replay to be asked for")
    made.stop()
    until(lambda: listener(hasty, 1)["status"] == "pending", "the loss to be seen")
    wait_for_sequence(hasty, 1, 2)
    # The engine is gone for good.
    entry = listener(hasty, 1)
    assert entry["status"] == "pending", entry


def test_unsubscribing_while_a_replay_runs(http, engine):
    made, other = engine(), engine()
    register(http, made)
    register(http, other, 2)
    made.gate.clear()
    made.publish(one(1), is_sent=False)
    made.publish(one(2, (2, 2)))
    until(lambda: made.asked == [0, 0], "the replay to be asked for")
    http.post("/unregister", {"instance_id": 1, "model_name": "m"})
    made.wait_for_departure()
    made.gate.set()
    wait_for_sequence(http, 2, other.publish(one(1)))
    assert {fact[0] for fact in dumped_blocks(http)} == {2}
    # The same engine can come back.
    made.asked.clear()
    register(http, made)
    wait_for_sequence(http, 1, 1)
    assert {fact[3] for fact in dumped_blocks(http) if fact[0] == 1} == {1, 2}


# -- malformed frames


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"kv-events"],
        [b"kv-events", b"\0" * 7, b"payload"],
        [b"kv-events", b"\0" * 9, b"payload"],
        [b"kv-events", b"", b""],
        [b"", b"", b"", b""],
        [b"payload", b"no number"],
    ],
    ids=repr,
)
def test_a_malformed_message_is_counted(http, engine, parts):
    made = engine()
    register(http, made)
    made.publish(one(1))
    made.pub.send_multipart(parts)
    wait_for_sequence(http, 1, made.publish(one(2, (2, 2))))
    events = counts(http)
    assert (events["undecodable"], events["gap_batches"], events["batches"]) == (1, 0, 2)
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 2}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        batch()[:-1],
        batch() + b"\0",
        b"\x93\xcb" + b"\0" * 8 + b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
    ids=lambda payload: repr(payload[:20]),
)
def test_a_payload_that_is_no_batch_is_counted_and_the_stream_goes_on(http, engine, payload):
    made = engine()
    register(http, made)
    made.publish(one(1))
    made.publish(payload)
    wait_for_sequence(http, 1, made.publish(one(2, (2, 2))))
    events = counts(http)
    assert (events["undecodable"], events["lost_batches"], events["batches"]) == (1, 0, 2)
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 2}


def test_the_end_mark_is_no_live_batch(http, engine):
    made = engine()
    register(http, made)
    made.publish(one(1))
    made.pub.send_multipart([b"kv-events", END_OF_REPLAY, b""])
    wait_for_sequence(http, 1, made.publish(one(2, (2, 2))))
    assert counts(http)["restarts"] == 0
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 2}


@pytest.mark.parametrize("has_replay", [True, False], ids=["with replay", "without replay"])
def test_a_frame_over_the_limit_costs_itself(hasty, engine, has_replay):
    made = engine(replay=has_replay)
    register(hasty, made)
    wait_for_sequence(hasty, 1, made.publish(one(1)))
    made.publish(b"\0" * (16 * 1024 * 1024 + 1))
    made.wait_for_departure()
    made.wait_for_subscriber()
    last = made.publish(one(2, (2, 2)))
    wait_for_sequence(hasty, 1, last)
    assert {fact[3] for fact in dumped_blocks(hasty)} == {1, 2}
    events = counts(hasty)
    assert (events["lost_batches"], events["restarts"]) == (1, 0)
    wait_for_sequence(hasty, 1, made.publish(one(3, (3, 3))))


def test_a_frame_of_the_limit_is_taken(http, engine):
    made = engine()
    register(http, made)
    ids = list(range(2**17, 2**17 + 2**21))
    payload = batch(stored([1], ids, block_size=len(ids)))
    assert 8 << 20 < len(payload) <= 16 << 20
    entry = wait_for_sequence(http, 1, made.publish(payload))
    assert entry["events"]["undecodable"] == 0
    assert entry["events"]["block_size_mismatch"] == 1


# -- many


def counted_batches(http):
    sample = r'kvflash_kvindexer_events_total\{kind="batches"\} (\d+)'
    return int(re.search(sample, http.get("/metrics").decode())[1])


def test_two_hundred_publishers_at_once(http, zmq_socket):
    before = counted_batches(http)
    pubs = {}
    for instance in range(200):
        pubs[instance] = zmq_socket(zmq.XPUB)
        port = pubs[instance].bind_to_random_port("tcp://127.0.0.1")
        body = {"instance_id": instance, "endpoint": f"tcp://127.0.0.1:{port}"}
        http.post("/register", {**body, "model_name": "m", "block_size": SIZE}, expect=201)
    for pub in pubs.values():
        assert pub.poll(30_000), "nobody subscribed"
        pub.recv()
    for number in range(10):
        for instance, pub in pubs.items():
            ids = [instance, number]
            payload = one(1 + number, ids, number or None)
            pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def applied():
        workers = http.get("/workers")
        return sum(w["listeners"]["0"]["last_sequence"] == 9 for w in workers) == 200

    until(applied, "all batches of all publishers")
    workers = http.get("/workers")
    assert [w["blocks"] for w in workers] == [10] * 200
    assert {w["status"] for w in workers} == {"active"}
    for instance in (0, 99, 199):
        ids = [i for number in range(10) for i in (instance, number)]
        scores = http.post("/query", {"token_ids": ids, "model_name": "m"})["scores"]
        assert scores[str(instance)] == {"0": 20}
        assert sum(score["0"] for score in scores.values()) == 20
    assert counted_batches(http) - before == 2000


def test_more_publishers_than_a_context_has_sockets(run, client, engine):
    """One socket stands for 500 engines."""
    http = client(run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1").ready()["url"])
    made = engine(replay=False)
    for instance in range(500):
        body = {"instance_id": instance, "endpoint": made.endpoint, "model_name": "m"}
        http.post("/register", {**body, "block_size": SIZE}, expect=201)

    def connected():
        made.publish(batch())
        workers = http.get("/workers")
        return sum(w["listeners"]["0"]["last_sequence"] is not None for w in workers) == 500

    until(connected, "every subscription")
    assert {w["status"] for w in http.get("/workers")} == {"active"}


@pytest.mark.parametrize(
    "service",
    [
        ("kvflash.indexer",),
        ("kvflash.frontend", "--worker", *(f"http://127.0.0.1:{port}" for port in range(1, 200))),
        ("kvflash.mocker", "--zmq-events-port", "auto"),
    ],
)
def test_a_service_may_open_as_many_files_as_the_system_lets_it(run, service):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        process = run(*service, "--port", "0", "--host", "127.0.0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    process.ready()
    assert resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    told = f"limit of open files raised to {hard}, from {hard // 2}"
    until(lambda: any(told in line for line in process.errors), "the line about it")
    lines = [line for line in process.errors if told in line or "worker" in line]
    assert told in lines[0], "a worker was added before"


# -- the receiver itself


def test_a_receiver_that_nobody_used_stops(embedded):
    receiver = ZmqReceiver(embedded.catalog)
    receiver.start()
    receiver.stop()


def test_stopping_twice_and_orders_after_the_stop_do_nothing(embedded):
    receiver = ZmqReceiver(embedded.catalog)
    receiver.start()
    receiver.stop()
    receiver.obey(("subscribe", 1, "tcp://127.0.0.1:1", None))
    receiver.obey(("unsubscribe", 1, "", None))
    receiver.stop()


# -- slow turns


def in_one_turn(receiver, act):
    """Run on the receiver's thread: what is to be seen in the same turn has waited that long."""
    done = Future()

    def run(kind, *order):
        if kind != "act":
            # An order from before.
            return type(receiver)._carry_out(receiver, kind, *order)
        del receiver._carry_out
        try:
            done.set_result(act())
        except Exception as error:
            done.set_exception(error)

    receiver._carry_out = run
    receiver.obey(("act", 0, "", None))
    return done.result(30.0)


def subscription_of(receiver, made):
    return next(s for s in receiver._subscriptions.values() if s.endpoint == made.endpoint)


def test_an_answer_that_waits_for_its_turn_is_not_late(engine):
    embedded = EmbeddedIndexer(replay_timeout_s=0.5)
    try:
        made, http = engine(), embedded.http
        register(http, made)
        wait_for_sequence(http, 1, made.publish(one(1)))
        made.gate.clear()
        made.publish(one(2, (2, 2)), is_sent=False)
        last = made.publish(one(3, (3, 3)))
        until(lambda: made.asked == [0, 1], "the replay to be asked for")
        subscription = subscription_of(embedded.receiver, made)

        def slow():
            made.gate.set()
            until(lambda: subscription.replay.poll(0), "the answer")
            until(lambda: subscription.repair.wait_s() == 0, "the time to be over")

        in_one_turn(embedded.receiver, slow)
        entry = wait_for_sequence(http, 1, last)
        assert "last_error" not in entry, entry
        assert counts(http)["lost_batches"] == 0
        assert made.asked == [0, 1]
    finally:
        embedded.close()


def test_a_connection_that_comes_back_in_a_slow_turn_is_kept(http, embedded, engine):
    made = engine(replay=False)
    register(http, made)
    wait_for_sequence(http, 1, made.publish(one(1)))
    subscription = subscription_of(embedded.receiver, made)
    socket, monitor = subscription.socket, subscription.monitor

    def slow():
        made.stop()
        until(lambda: monitor.poll(0), "the loss")
        embedded.receiver._on_monitor(subscription)
        made.start()
        until(lambda: monitor.poll(0), "what comes after it")
        subscription.reconnect_at = time.monotonic()

    in_one_turn(embedded.receiver, slow)
    made.wait_for_subscriber()
    until(lambda: listener(http, 1)["status"] == "active", "the connection")
    made.publish(one(2, (2, 2)))
    until(lambda: counts(http)["restarts"] == 1, "the restart to be noticed")
    assert subscription.socket is socket


# -- no more open files


@contextlib.contextmanager
def no_more_files():
    """This process can open nothing: all numbers that it may use are those of standard streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_publisher_without_a_socket_gets_one_when_there_is_one(http, engine, caplog, monkeypatch):
    monkeypatch.setattr("kvflash.transport.zmq._REOPEN_S", 0.1)
    made = engine(replay=False)
    http.get("/workers")
    with no_more_files():
        register(http, made, is_awaited=False)
        until(lambda: listener(http, 1)["status"] == "failed", "the failure")
    assert "Too many open files: the process may have 3; raise" in listener(http, 1)["last_error"]
    assert "ulimit -n" in caplog.text
    until(lambda: listener(http, 1)["status"] == "active", "the socket")
    made.wait_for_subscriber()
    wait_for_sequence(http, 1, made.publish(one(1)))


def test_a_pause_hides_no_failure(http, embedded, engine, monkeypatch):
    # So that it is told only once.
    monkeypatch.setattr("kvflash.transport.zmq._REOPEN_S", 3_600.0)
    made = engine(replay=False)
    http.get("/workers")
    with no_more_files():
        register(http, made, is_awaited=False)
        until(lambda: listener(http, 1)["status"] == "failed", "the failure")
        publisher = subscription_of(embedded.receiver, made).publisher
        for kind in ("pause", "resume"):
            embedded.receiver.obey((kind, publisher, "", None))
            in_one_turn(embedded.receiver, lambda: None)
            entry = listener(http, 1)
            assert entry["status"] == "failed"
            assert "can't open a socket: Too many open files" in entry["last_error"]


def test_a_paused_publisher_stays_paused_when_its_engine_restarts(http, embedded, engine):
    """Otherwise nothing could resume it: the core resumes only what it shows as paused."""
    made = engine(replay=False)
    register(http, made)
    subscription = subscription_of(embedded.receiver, made)
    order = (subscription.publisher, "", None)
    embedded.receiver.obey(("pause", *order))
    until(lambda: listener(http, 1)["status"] == "paused", "the pause")
    made.stop()
    until(lambda: not subscription.is_connected, "the loss to be seen")
    assert listener(http, 1)["status"] == "paused"
    made.start()
    until(lambda: subscription.is_connected, "the connection")
    in_one_turn(embedded.receiver, lambda: None)
    assert listener(http, 1)["status"] == "paused"
    embedded.receiver.obey(("resume", *order))
    until(lambda: listener(http, 1)["status"] == "active", "the release")
    made.wait_for_subscriber()
    wait_for_sequence(http, 1, made.publish(one(1)))


def test_a_gap_without_a_socket_for_its_replay_is_given_up(http, engine):
    made = engine()
    register(http, made)
    wait_for_sequence(http, 1, made.publish(one(1)))
    with no_more_files():
        made.publish(one(2, (2, 2)), is_sent=False)
        entry = wait_for_sequence(http, 1, made.publish(one(3, (3, 3))))
    assert "Too many open files" in entry["last_error"]
    assert entry["events"]["lost_batches"] == 1
    made.publish(one(4, (4, 4)), is_sent=False)
    wait_for_sequence(http, 1, made.publish(one(5, (5, 5))))
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 3, 4, 5}
    assert made.asked == [0, 3]


def test_a_late_replay_without_a_socket_to_ask_again_costs_nobody_else(http, engine):
    made, other = engine(), engine()
    register(http, made)
    register(http, other, 2)
    wait_for_sequence(http, 1, made.publish(one(1)))
    made.answer = lambda first: made.ring_from(first)[:2]
    made.gate.clear()
    for name in range(2, 6):
        made.publish(one(name, (name, name)), is_sent=False)
    last = made.publish(one(6, (6, 6)))
    until(lambda: made.asked == [0, 1], "the replay to be asked for")
    with no_more_files():
        made.gate.set()
        entry = wait_for_sequence(http, 1, last)
    assert "Too many open files" in entry["last_error"]
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 2, 3, 6}
    wait_for_sequence(http, 2, other.publish(one(1)))


def test_a_broken_connection_is_opened_again_when_it_can_be(http, engine, monkeypatch):
    monkeypatch.setattr("kvflash.transport.zmq._RECONNECT_GRACE_S", 0.2)
    made = engine(replay=False)
    register(http, made)
    wait_for_sequence(http, 1, made.publish(one(1)))
    with no_more_files():
        made.publish(b"\0" * (16 * 1024 * 1024 + 1))
        told = "connecting again fails: Too many open files"
        until(lambda: told in listener(http, 1).get("last_error", ""), "the failure")
        assert listener(http, 1)["status"] == "pending"
    made.wait_for_departure()
    made.wait_for_subscriber()
    wait_for_sequence(http, 1, made.publish(one(2, (2, 2))))
    assert {fact[3] for fact in dumped_blocks(http)} == {1, 2}


# -- sockets that can't work


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "inproc://engine"])
def test_a_socket_that_cannot_work_stays_failed(http, embedded, engine, endpoint):
    made = engine(replay=False)
    register(http, made)
    receiver = embedded.receiver
    number = subscription_of(receiver, made).publisher
    receiver.obey(("unsubscribe", number, "", None))
    receiver.obey(("hold", number, endpoint, None))
    receiver.obey(("resume", number, "", None))
    receiver.obey(("pause", number, "", None))
    in_one_turn(receiver, lambda: None)
    entry = listener(http, 1)
    assert entry["status"] == "failed", entry
    assert f"can't connect to {endpoint}" in entry["last_error"]


# -- errors in the transport itself


@pytest.mark.parametrize("handler", ["_connect", "_on_monitor", "_on_stream", "_on_replay"])
def test_a_publisher_whose_handler_raises_is_closed_and_the_others_go_on(
    http, engine, caplog, monkeypatch, handler
):
    made, other = engine(), engine()
    register(http, other, 2)
    is_at_once = handler in {"_connect", "_on_monitor"}
    if not is_at_once:
        register(http, made)
        wait_for_sequence(http, 1, made.publish(one(1)))
    handle, failures = getattr(ZmqReceiver, handler), []

    def broken(self, subscription, *args):
        if subscription.endpoint == made.endpoint:
            failures.append(handler)
            raise ValueError("odd")
        handle(self, subscription, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ZmqReceiver, handler, broken)
        if is_at_once:
            register(http, made, is_awaited=False)
        else:
            made.publish(one(2, (2, 2)), is_sent=handler == "_on_stream")
            made.publish(one(3, (3, 3)))
        until(lambda: listener(http, 1)["status"] == "failed", "the failure")
        for name in range(1, 4):
            wait_for_sequence(http, 2, other.publish(one(name, (name, name))))
    assert failures == [handler]
    assert caplog.text.count("Traceback") == 1
    assert f"engine at {made.endpoint}: reading its events failed" in caplog.text
    entry = listener(http, 1)
    assert entry["status"] == "failed"
    assert "ValueError('odd'); register it again" in entry["last_error"]
    http.post("/unregister", {"instance_id": 1, "model_name": "m"})
    register(http, made, is_awaited=False)
    wait_for_sequence(http, 1, made.publish(one(4, (4, 4))))
