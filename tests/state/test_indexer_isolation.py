"""Models and tenants are apart: random registrations, events and queries against plain dicts.

All engines publish the same tokens under the same names, so only the model and tenant of a
registration keep their blocks apart. After every step every pair is queried. Its answer must equal
the twin's: without workers of another pair, without removed workers, and complete.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvflash import ConflictError, NotFoundError
from kvflash._core import Indexer
from service import batch, cleared, removed, stored

SIZE = 2
BLOCKS = 4
TOKENS = list(range(1, 1 + SIZE * BLOCKS))
# Joined by a colon, some of them read the same.
PAIRS = [
    ("a", "b"),
    ("a:b", "c"),
    ("a", "b:c"),
    ("a:b:c", "default"),
    ("a", "default"),
    ("a:", ":"),
]
INSTANCES = [1, 2, 3]
RANKS = [0, 1]
KINDS = ["store", "remove", "clear"]

pairs = st.sampled_from(PAIRS)
instances = st.sampled_from(INSTANCES)
ranks = st.sampled_from(RANKS)


class Isolation(RuleBasedStateMachine):
    """The twin: who is registered where, which ranks they named, how often each holds a block.

    All of it is kept by instance, pair and rank: an instance may serve several pairs.
    """

    @initialize()
    def start(self):
        self.indexer = Indexer(threads=1, drain_timeout_s=0.1)
        self.publishers = {}
        self.named = {}
        self.held = {}
        self.known = set()
        self.times = itertools.count(1)

    def teardown(self):
        if hasattr(self, "indexer"):
            self.indexer.stop()

    @rule(pair=pairs, instance=instances, rank=ranks)
    def register(self, pair, instance, rank):
        def call():
            fields = {"model_name": pair[0], "tenant_id": pair[1], "block_size": SIZE}
            self.indexer.register(instance, "tcp://127.0.0.1:1", dp_rank=rank, **fields)

        key = (instance, pair, rank)
        if key in self.publishers:
            with pytest.raises(ConflictError):
                call()
            return
        call()
        kind, publisher, _, _ = self.indexer.catalog.next_order(5.0)
        assert kind == "subscribe"
        self.known.add(pair)
        self.publishers[key] = [publisher, 0]
        self.named[key] = {rank}
        self.check()

    @precondition(lambda self: self.publishers)
    @rule(
        data=st.data(), rank=st.none() | ranks, what=st.sampled_from(["store", "remove", "clear"])
    )
    def publish(self, data, rank, what):
        key = data.draw(st.sampled_from(sorted(self.publishers)))
        instance, pair, own = key
        speaker = self.publishers[key]
        named = own if rank is None else rank
        blocks = self.held.setdefault((instance, pair, named), Counter())
        block = data.draw(st.integers(1, BLOCKS))
        if what == "store":
            event = stored(range(1, block + 1), TOKENS[: block * SIZE], block_size=SIZE)
            blocks.update(range(1, block + 1))
        elif what == "remove":
            event = removed([block])
            blocks[block] -= blocks[block] > 0
        else:
            event = cleared()
            blocks.clear()
        self.named[key].add(named)
        payload = batch(event, dp_rank=rank, ts=float(next(self.times)))
        message = [b"", speaker[1].to_bytes(8, "big"), payload]
        assert self.indexer.catalog.take(speaker[0], [message])[1] == "applied"
        speaker[1] += 1
        self.check()

    @rule(pair=pairs, instance=instances, rank=st.none() | ranks, has_tenant=st.booleans())
    def unregister(self, pair, instance, rank, has_tenant):
        def is_meant(at):
            return at == pair if has_tenant else at[0] == pair[0]

        own = [key for key in self.publishers if key[0] == instance and is_meant(key[1])]
        gone = [key for key in own if rank is None or key[2] == rank]
        # Of a rank that only events have named the publisher stays.
        losing = [key for key in own if key not in gone and rank in self.named[key]]

        def call():
            tenant = pair[1] if has_tenant else None
            fields = {"model_name": pair[0], "tenant_id": tenant, "dp_rank": rank}
            self.indexer.unregister(instance, **fields)

        if not gone and not losing:
            with pytest.raises(NotFoundError):
                call()
            return
        call()
        for key in gone:
            assert self.indexer.catalog.next_order(5.0)[0] == "unsubscribe"
            del self.publishers[key]
            for named in self.named.pop(key):
                self.forget(key, named)
        for key in losing:
            self.named[key].discard(rank)
            self.forget(key, rank)
        self.check()

    def forget(self, gone, rank):
        # Where another publisher speaks for the rank, too, its blocks are that one's.
        spoken_for = (ranks for key, ranks in self.named.items() if key[:2] == gone[:2])
        if not any(rank in ranks for ranks in spoken_for):
            self.held.pop((*gone[:2], rank), None)

    def check(self):
        for pair in PAIRS:
            fields = {"model_name": pair[0], "tenant_id": pair[1]}
            if pair not in self.known:
                with pytest.raises(NotFoundError):
                    self.indexer.query(TOKENS, **fields)
                continue
            answer = json.loads(self.indexer.query(TOKENS, **fields))
            wanted = {}
            for key, named in self.named.items():
                assert key in self.publishers
                instance, at, _ = key
                if at == pair:
                    for rank in named:
                        blocks = self.held.get((instance, pair, rank), Counter())
                        depth = next(n for n in range(BLOCKS + 1) if not blocks[n + 1])
                        wanted.setdefault(str(instance), {})[str(rank)] = depth * SIZE
            assert answer["scores"] == wanted, pair
            assert set(answer["instances"]) == set(wanted)


Isolation.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestIsolation = Isolation.TestCase
