"""Receiving without Python, and waiting for sockets, on real sockets of this process."""

from __future__ import annotations

import threading

import pytest
import zmq

from kvflash import errors
from kvflash._core import Indexer, Repair, ZmqDrain
from kvflash.transport.poller import Poller
from kvflash.transport.zmq import find_drain
from service import batch, stored, until


@pytest.fixture
def drain():
    found = find_drain()
    assert found is not None, "this pyzmq's libzmq must be found"
    return found


@pytest.fixture
def feed():
    """A catalog with one publisher: (catalog, its number, counts)."""
    indexer = Indexer(threads=1)
    indexer.register(1, "tcp://127.0.0.1:1", model_name="m", block_size=2)
    order = indexer.catalog.next_order(1.0)
    assert order is not None
    yield indexer.catalog, order[1]
    indexer.stop()


@pytest.fixture
def pairs():
    context = zmq.Context()
    made = []

    def make():
        near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (near, far):
            # A sender never waits: it has ended before its socket is closed, whatever fails.
            socket.set_hwm(0)
        near.bind(f"inproc://{len(made)}")
        far.connect(f"inproc://{len(made)}")
        made.extend([near, far])
        return near, far

    yield make
    for socket in made:
        socket.close(0)
    context.term()


def message(number, *, parts=(b"kv-events",), size=1):
    ids = [number % 1000, number] * size
    names = range(number * size + 1, (number + 1) * size + 1)
    return [*parts, number.to_bytes(8, "big"), batch(stored(names, ids, block_size=2))]


@pytest.mark.parametrize("parts", [(), (b"t",), (b"a", b"", b"b" * 1_000)], ids=len)
def test_messages_are_taken_in_order_up_to_the_limit(drain, feed, pairs, parts):
    catalog, publisher = feed
    near, far = pairs()
    for number in range(10):
        far.send_multipart(message(number, parts=parts, size=1 + 40 * (number % 2)))
    assert drain.take(catalog, publisher, near, 4) == (4, None)
    assert catalog.position(publisher) == (4, 3)
    assert drain.take(catalog, publisher, near, 256) == (6, None)
    assert catalog.position(publisher) == (10, 9)
    assert drain.take(catalog, publisher, near, 256) == (0, None)


def test_a_gap_is_handed_back_and_the_rest_stays_in_the_socket(drain, feed, pairs):
    catalog, publisher = feed
    near, far = pairs()
    sent = [message(number) for number in (0, 3, 4)]
    for parts in sent:
        far.send_multipart(parts)
    taken, unread = drain.take(catalog, publisher, near, 256)
    assert (taken, unread) == (1, tuple(sent[1][-2:]))
    assert catalog.take(publisher, [list(unread)]) == (0, "gap", 1, 2)
    catalog.give_up(publisher, 3)
    assert catalog.take(publisher, [list(unread)]) == (1, "applied", 0, 0)
    assert near.recv_multipart() == sent[2]


def test_what_is_no_message_is_passed_over(drain, feed, pairs):
    catalog, publisher = feed
    near, far = pairs()
    far.send_multipart([b"one part"])
    far.send_multipart([b"topic", b"7 bytes", b"payload"])
    far.send_multipart(message(0))
    assert drain.take(catalog, publisher, near, 256) == (3, None)
    assert catalog.position(publisher) == (1, 0)


def test_messages_of_nobody_are_read_away(drain, feed, pairs):
    catalog, _ = feed
    near, far = pairs()
    far.send_multipart(message(0))
    assert drain.take(catalog, 10**6, near, 256) == (1, None)
    assert not near.poll(0)


def test_a_replay_is_read_up_to_its_end(drain, feed, pairs):
    catalog, publisher = feed
    near, far = pairs()
    repair = Repair(catalog, publisher, has_endpoint=True, timeout_s=5)
    assert repair.connected() == [("ask", 0, 0, "")]
    for number in range(10):
        far.send_multipart(message(number, parts=(b"",), size=1 + 40 * (number % 2)))
    assert drain.answer(repair, near, 4) == []
    assert catalog.position(publisher) == (4, 3)
    far.send_multipart([b"one part ends it"])
    far.send_multipart(message(10))
    assert drain.answer(repair, near, 256) == [("dismiss", 0, 0, "")]
    assert catalog.position(publisher) == (10, 9)
    assert not near.poll(0)


def test_a_closed_socket_is_refused(drain, feed, pairs):
    catalog, publisher = feed
    near, _ = pairs()
    near.close(0)
    repair = Repair(catalog, publisher, has_endpoint=True, timeout_s=5)
    with pytest.raises((errors.ClosedError, zmq.ZMQError)):
        drain.take(catalog, publisher, near, 1)
    with pytest.raises((errors.ClosedError, zmq.ZMQError)):
        drain.answer(repair, near, 1)


def test_a_socket_of_an_ended_context_is_told(drain, feed):
    catalog, publisher = feed
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    ending = threading.Thread(target=context.term)
    ending.start()
    try:
        # term() waits for the socket to be closed; meanwhile every call on it fails.
        with pytest.raises(errors.TransportError, match="can't receive"):
            until(lambda: drain.take(catalog, publisher, socket, 1)[0], "the end of the context")
    finally:
        socket.close(0)
        ending.join()


@pytest.mark.parametrize(
    ("library", "wanted"),
    [
        ("/no/such/library.so", "is not loaded"),
        ("libc.so.6", "has no zmq_"),
        ("a\0b", "zero bytes"),
    ],
)
def test_libraries_that_are_not_libzmq_are_refused(library, wanted):
    with pytest.raises(errors.TransportError, match=wanted):
        ZmqDrain(library)


def test_only_sockets_with_something_are_told_until_they_have_nothing(pairs):
    poller = Poller()
    (a, to_a), (b, to_b), (c, _) = pairs(), pairs(), pairs()
    to_a.send(b"before it was registered")
    for socket in (a, b, c):
        poller.register(socket)
    assert poller.poll(0) == [a]
    assert poller.poll(0) == [a]
    to_b.send(b"1")
    to_b.send(b"2")
    assert set(poller.poll(None)) == {a, b}
    a.recv()
    b.recv()
    assert poller.poll(None) == [b]
    b.recv()
    assert poller.poll(0) == []
    assert poller.poll(5) == []
    to_a.send(b"again")
    assert poller.poll(None) == [a]
    poller.unregister(a)
    assert poller.poll(0) == []
    # Its messages are reported when it comes back.
    poller.register(a)
    assert poller.poll(5_000) == [a]
    poller.close()


def test_nothing_is_overlooked_while_messages_come(pairs):
    """With a concurrent sender, every message between two checks is reported by one of them."""
    poller, count = Poller(), 20_000
    made = [pairs() for _ in range(3)]
    for near, _ in made:
        poller.register(near)

    def send():
        for number in range(count):
            made[number % 3][1].send(b"x")

    sender = threading.Thread(target=send)
    sender.start()
    received = 0
    try:
        while received < count:
            ready = poller.poll(5_000)
            assert ready, f"{received} of {count} after 5 s"
            for socket in ready:
                # One at a time, so that most looks find something left.
                socket.recv(zmq.NOBLOCK)
                received += 1
    finally:
        sender.join()
        poller.close()
