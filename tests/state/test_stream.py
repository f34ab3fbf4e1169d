"""The order of a publisher's batches: random losses, repeats, restarts and repairs against a twin.

The twin keeps a list of what happened and works every answer out of it. Every return value of the
catalog, its position, its counters and what the index holds afterwards are compared.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflash import DecodeError, InvalidArgumentError, compute_block_hash_for_seq
from kvflash._core import Indexer
from service import DEADLINE_S, END_OF_REPLAY, Http, batch, cleared, dumped_blocks, removed, stored

NAMES = range(1, 9)
INSTANCES = itertools.count(1)


class Service:
    """One indexer for all examples; each has an instance of its own."""

    def __init__(self):
        self.indexer = Indexer(threads=1, drain_timeout_s=0.2)
        self.http = Http(f"http://127.0.0.1:{self.indexer.start('127.0.0.1', 0)}")

    def register(self):
        instance = next(INSTANCES)
        self.indexer.register(instance, "tcp://127.0.0.1:1", model_name="m", block_size=1)
        order = self.indexer.catalog.next_order(5.0)
        assert order is not None
        assert order[0] == "subscribe"
        return instance, order[1]

    def unregister(self, instance):
        self.http.post("/unregister", {"instance_id": instance, "model_name": "m"})
        assert self.indexer.catalog.next_order(5.0)[0] == "unsubscribe"


@pytest.fixture(scope="module")
def service():
    made = Service()
    yield made
    made.http.close()
    made.indexer.stop()


class Batch:
    """A batch of one event: ``store``, ``remove``, ``clear``, or bytes that are no batch."""

    def __init__(self, number, kind, name, nonce):
        event = {
            "store": lambda: stored([name], [name], block_size=1),
            "remove": lambda: removed([name]),
            "clear": cleared,
            "junk": lambda: None,
        }[kind]()
        self.number, self.kind, self.name = number, kind, name
        # Time makes the batches of two lives of an engine differ.
        self.payload = b"junk %d" % nonce if event is None else batch(event, ts=float(nonce))

    @property
    def parts(self):
        return [b"topic", self.number.to_bytes(8, "big"), self.payload]

    def apply(self, held):
        if self.kind == "store":
            held[self.name] += 1
        elif self.kind == "remove" and held[self.name]:
            held[self.name] -= 1
        elif self.kind == "clear":
            held.clear()


class Twin:
    def __init__(self):
        self.done, self.live, self.last = set(), [], None
        self.held, self.restarts, self.lost, self.duplicates, self.junk = Counter(), 0, 0, 0, 0

    @property
    def next(self):
        return next(n for n in itertools.count() if n not in self.done)

    def forget(self):
        self.done, self.live, self.last = set(), [], None
        self.held.clear()
        self.restarts += 1

    def take(self, batches, *, replayed):
        """As Catalog.take."""
        for at, each in enumerate(batches):
            if not replayed and (
                any(number >= each.number for number in self.live) or self.contradicts(each)
            ):
                self.forget()
            if each.number > self.next:
                return at, "gap", self.next, each.number - 1
            if not replayed:
                self.live.append(each.number)
            if each.number in self.done:
                self.duplicates += 1
                continue
            self.done.add(each.number)
            self.last = each
            self.junk += each.kind == "junk"
            each.apply(self.held)
        return len(batches), "applied", 0, 0

    def contradicts(self, each):
        """The number of the batch applied last, and another payload: another life of the engine."""
        last = self.last
        return last is not None and (last.number, last.payload != each.payload) == (
            each.number,
            True,
        )

    def give_up(self, number):
        self.lost += max(0, number - self.next)
        self.done.update(range(number))

    def verify(self, first):
        if self.last is None:
            return True
        # A ring that has moved on past our place proves nothing.
        if first is not None and first.payload == self.last.payload:
            return True
        self.forget()
        return False


class Player:
    """An engine, a network that loses, and a receiver that repairs as the transport does."""

    def __init__(self, service, seen):
        self.service, self.seen = service, seen
        self.catalog = service.indexer.catalog
        self.instance, self.publisher = service.register()
        self.twin, self.nonces = Twin(), itertools.count()
        self.log, self.flying = [], []

    # -- the engine

    def publish(self, events):
        for kind, name in events:
            self.log.append(Batch(len(self.log), kind, name, next(self.nonces)))
            self.flying.append(self.log[-1])

    def restart(self, are_lost):
        self.log = []
        if are_lost:
            self.flying = []

    # -- the network

    def drop(self, at, count):
        del self.flying[at : at + count]

    def duplicate(self, at):
        if self.flying:
            at %= len(self.flying)
            self.flying.insert(at, self.flying[at])

    # -- the receiver

    def take(self, batches, *, replayed):
        parts = [each.parts for each in batches]
        verdict = self.catalog.take(self.publisher, parts, replayed=replayed)
        assert verdict == self.twin.take(batches, replayed=replayed)
        self.seen["replayed" if replayed else "live", verdict[1]] += 1
        return verdict

    def deliver(self, count, repair, keeps):
        batches, self.flying = self.flying[:count], self.flying[count:]
        consumed, outcome, first, last = self.take(batches, replayed=False)
        if outcome != "gap":
            return
        self.seen[repair] += 1
        left = batches[consumed:]
        if repair == "later":
            self.flying = left + self.flying
            return
        if repair != "give up":
            ring = [each for each in self.log if each.number >= first]
            if repair == "replay the start":
                ring = ring[:keeps]
            elif repair == "replay the end":
                ring = ring[-keeps:]
            self.replay(ring)
        # Batches that the replay did not supply are given up.
        while left:
            consumed, outcome, first, last = self.take(left, replayed=False)
            if outcome != "gap":
                break
            self.give_up(last + 1)
            left = left[consumed:]

    def replay(self, ring):
        while ring:
            consumed, outcome, _, last = self.take(ring, replayed=True)
            if outcome != "gap":
                break
            self.give_up(last + 1)
            ring = ring[consumed:]

    def give_up(self, number):
        self.catalog.give_up(self.publisher, number)
        self.twin.give_up(number)

    def reconnect(self, keeps, is_caught_up):
        """Verify with what the ring has from the last batch on, and catch up with its all."""
        wanted, last = self.catalog.position(self.publisher)
        ring = self.log[-keeps:] if keeps else []
        first = next((each for each in ring if last is not None and each.number >= last), None)
        head = None if first is None else tuple(first.parts[-2:])
        is_same = self.catalog.verify(self.publisher, head)
        assert is_same == self.twin.verify(first)
        self.seen["verified", is_same] += 1
        if is_caught_up:
            self.replay([each for each in self.log if is_same is False or each.number >= wanted])
            self.flying = []
            if not is_same:
                # A life followed from its first batch on: the index is the engine's own cache.
                truth = Counter()
                for each in self.log:
                    each.apply(truth)
                assert +truth == +self.twin.held
                self.seen["exact"] += bool(+truth)

    def give_up_what_is_not_missing(self, number):
        self.give_up(min(number, self.twin.next))

    def receive_no_message(self, parts):
        assert self.catalog.take(self.publisher, [parts]) == (1, "applied", 0, 0)
        self.twin.junk += 1

    def receive_the_end_mark(self, replayed):
        message = [b"topic", END_OF_REPLAY, batch(cleared())]
        assert self.catalog.take(self.publisher, [message], replayed=replayed)[1] == "applied"
        self.twin.junk += 1

    def check(self):
        twin = self.twin
        last = twin.last.number if twin.last else None
        assert self.catalog.position(self.publisher) == (twin.next, last)
        facts = {
            (self.instance, 0, "device", name, compute_block_hash_for_seq([name], 1)[0])
            for name, copies in twin.held.items()
            if copies
        }
        assert dumped_blocks(self.service.http) == facts
        [worker] = self.service.http.get("/workers")
        events = worker["listeners"]["0"]["events"]
        assert events["lost_batches"] == twin.lost
        assert events["restarts"] == twin.restarts
        assert events["duplicate_batches"] == twin.duplicates
        assert events["undecodable"] == twin.junk


KINDS = st.sampled_from(["store"] * 5 + ["remove"] * 3 + ["clear", "junk"])
SMALL = st.integers(0, 6)
REPAIRS = ["replay", "replay the start", "replay the end", "give up", "later"]
CALLS = {
    "publish": (st.lists(st.tuples(KINDS, st.sampled_from(NAMES)), min_size=1, max_size=6),),
    "restart": (st.booleans(),),
    "drop": (SMALL, st.integers(1, 3)),
    "duplicate": (SMALL,),
    "deliver": (st.integers(1, 8), st.sampled_from(REPAIRS), st.integers(1, 4)),
    "reconnect": (SMALL, st.booleans()),
    "give_up_what_is_not_missing": (SMALL,),
    "receive_no_message": (
        st.sampled_from([[], [b""], [b"x", b"1234567", b"y"], [b"", b"", b""]]),
    ),
    "receive_the_end_mark": (st.booleans(),),
}
# The receiver sees nothing of these.
UNSEEN = {"publish", "restart", "drop", "duplicate"}
OFTEN = ["publish"] * 8 + ["deliver"] * 8 + ["drop"] * 3 + sorted(CALLS)
# Made once: hypothesis would validate a new strategy at every call.
ARGUMENTS = {name: st.tuples(st.just(name), *drawn) for name, drawn in CALLS.items()}
CALL = st.sampled_from(OFTEN).flatmap(ARGUMENTS.__getitem__)


def test_random_streams(service):
    seen = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(CALL, min_size=15, max_size=40))
    def play(calls):
        player = Player(service, seen)
        try:
            for name, *arguments in calls:
                getattr(player, name)(*arguments)
                if name not in UNSEEN:
                    player.check()
            seen["restarts"] += player.twin.restarts
            seen["lost"] += player.twin.lost
        finally:
            service.unregister(player.instance)

    play()
    # A tenth of what usually happens: enough to know that it was looked at.
    for event in [
        *((way, outcome) for way in ("live", "replayed") for outcome in ("applied", "gap")),
        *(("verified", is_same) for is_same in (True, False)),
        *REPAIRS,
        "exact",
        "restarts",
        "lost",
    ]:
        assert seen[event] >= 3, (event, seen)


@pytest.fixture
def publisher(service):
    instance, number = service.register()
    yield number
    service.unregister(instance)


def frame(number, payload=None):
    return [b"", number.to_bytes(8, "big"), batch() if payload is None else payload]


def undecodable(service):
    return service.http.get("/workers")[0]["listeners"]["0"]["events"]["undecodable"]


def test_a_malformed_message_behind_a_gap_is_counted_once(service, publisher):
    catalog, messages = service.indexer.catalog, [frame(3), [b"malformed"], frame(4)]
    assert catalog.take(publisher, messages) == (0, "gap", 0, 2)
    catalog.give_up(publisher, 3)
    assert catalog.take(publisher, messages) == (3, "applied", 0, 0)
    assert undecodable(service) == 1


def test_the_end_mark_cannot_be_given_up(service, publisher):
    service.indexer.catalog.give_up(publisher, 2**64 - 1)
    assert service.indexer.catalog.position(publisher) == (0, None)
    [worker] = service.http.get("/workers")
    assert worker["listeners"]["0"]["events"]["lost_batches"] == 0


def test_a_publisher_that_is_gone_is_closed(service):
    instance, number = service.register()
    service.unregister(instance)
    catalog = service.indexer.catalog
    assert catalog.take(number, [frame(0)]) == (0, "closed", 0, 0)
    assert catalog.position(number) is None
    assert catalog.verify(number, None) is True
    catalog.give_up(number, 7)
    catalog.set_status(number, "active")


def test_no_order_is_none_after_the_time(service):
    catalog = service.indexer.catalog
    assert catalog.next_order(0.0) is None
    assert catalog.next_order(-1.0) is None
    assert catalog.next_order(0.01) is None


def test_who_waits_for_an_order_is_released_by_the_end():
    indexer = Indexer(threads=1)
    catalog, taken = indexer.catalog, []
    waiting = threading.Thread(target=lambda: taken.append(catalog.next_order()))
    waiting.start()
    assert waiting.is_alive()
    catalog.close_orders()
    waiting.join(DEADLINE_S)
    assert taken == [None]
    indexer.register(1, "tcp://127.0.0.1:1", model_name="m", block_size=1)
    assert catalog.next_order() is None, "nobody obeys any more"
    indexer.stop()


def test_the_last_number_of_all(service, publisher):
    catalog, last = service.indexer.catalog, 2**64 - 2
    assert catalog.take(publisher, [frame(last)]) == (0, "gap", 0, last - 1)
    catalog.give_up(publisher, last)
    assert catalog.take(publisher, [frame(last)]) == (1, "applied", 0, 0)
    assert catalog.position(publisher) == (2**64 - 1, last)
    assert catalog.take(publisher, [frame(0)]) == (1, "applied", 0, 0)
    assert catalog.position(publisher) == (1, 0)


def test_wrong_calls_are_refused_by_class(service, publisher):
    catalog = service.indexer.catalog
    with pytest.raises(InvalidArgumentError, match="pending, active, paused or failed"):
        catalog.set_status(publisher, "well")
    with pytest.raises(TypeError):
        catalog.take(publisher, frame(0))
    with pytest.raises(TypeError):
        catalog.take(publisher, [tuple(frame(0))])
    catalog.take(publisher, [frame(0)])
    with pytest.raises(DecodeError, match="8 bytes, got 3"):
        catalog.verify(publisher, (b"abc", b""))
