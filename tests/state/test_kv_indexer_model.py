"""kvflash.KvIndexer against plain dictionaries: random calls, tiers, every answer compared."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflash import InvalidArgumentError, KvIndexer
from service import played

TIERS = ("device", "host_pinned", "disk", "external")
# Few names and few contents, so that blocks are shared, moved, evicted and stored again.
KEYS = st.sampled_from([(1, 0)] * 3 + [(1, 1), (2, 0)])
NAMES = st.integers(0, 24).map(lambda n: n * 7 + 2**63 * (n % 2))
LOCALS = st.integers(1, 4).map(lambda n: 2**64 - n)
TIER = st.sampled_from(("device",) * 5 + TIERS)
FORMS = {
    "list": list,
    "uint64": lambda values: np.array(values, np.uint64),
    "int64": lambda values: np.array(values, np.uint64).view(np.int64),
}
FORM = st.sampled_from(sorted(FORMS))


class Worker:
    """Blocks that one worker holds, by first principles."""

    def __init__(self):
        self.place = {}  # name -> the contents from the prompt's start
        self.copies = Counter()  # (tier, name) -> how often it must be removed

    def forget_unheld(self, name):
        if not any(self.copies[tier, name] for tier in TIERS):
            self.place.pop(name, None)

    def depths(self, prompt):
        held = {tier: set() for tier in TIERS}
        for (tier, name), copies in self.copies.items():
            if copies:
                held[tier].add(self.place[name])
        reached, depths = 0, []
        for tier in TIERS:
            while reached < len(prompt) and tuple(prompt[: reached + 1]) in held[tier]:
                reached += 1
            depths.append(reached)
        return tuple(depths)


class Model:
    def __init__(self, count_mode):
        self.workers, self.count_mode = {}, count_mode

    def store(self, key, tier, parent, blocks):
        """Blocks that were not held under these names; None when the event is refused."""
        names = [name for name, _ in blocks] + ([] if parent is None else [parent])
        if len(set(names)) < len(names):
            return None
        if parent is not None and parent not in getattr(self.workers.get(key), "place", ()):
            return None
        worker = self.workers.setdefault(key, Worker())
        chain = () if parent is None else worker.place[parent]
        new = 0
        for name, local in blocks:
            chain = (*chain, local)
            if worker.place.get(name, chain) != chain:
                for each in TIERS:
                    worker.copies[each, name] = 0
            worker.place[name] = chain
            new += not worker.copies[tier, name]
            if self.count_mode == "copies" or not worker.copies[tier, name]:
                worker.copies[tier, name] += 1
        return new

    def remove(self, key, tier, names):
        worker, gone = self.workers.get(key, Worker()), 0
        for name in names:
            if worker.copies[tier, name]:
                worker.copies[tier, name] -= 1
                gone += not worker.copies[tier, name]
                worker.forget_unheld(name)
        return gone

    def clear(self, key):
        if key not in self.workers:
            return 0
        dropped = self.count(key)
        self.workers[key] = Worker()
        return dropped

    def count(self, key):
        return sum(copies > 0 for copies in self.workers[key].copies.values())

    def scores(self, prompt):
        depths = {key: worker.depths(prompt) for key, worker in self.workers.items()}
        return {key: reached for key, reached in depths.items() if reached[-1]}


class Pair:
    """The index and its model, played alike."""

    def __init__(self, count_mode, seen):
        self.index, self.model = KvIndexer(4, count_mode=count_mode), Model(count_mode)
        self.count_mode, self.prompts, self.seen = count_mode, [()], seen

    def store(self, key, tier, parent, blocks, form):
        kind, pick = parent
        known = sorted(self.model.workers.get(key, Worker()).place)
        name = {"root": None, "any": pick}.get(kind)
        if kind == "held" and known:
            name = known[pick % len(known)]
        names, locals_ = (FORMS[form](list(each)) for each in zip(*blocks, strict=True))
        arguments = (key[0], names, locals_, name, key[1], tier)
        new = self.model.store(key, tier, name, blocks)
        if new is None:
            self.seen["refused"] += 1
            with pytest.raises(InvalidArgumentError):
                self.index.store(*arguments)
            return
        assert self.index.store(*arguments) == new
        self.prompts.append(self.model.workers[key].place[blocks[-1][0]])
        self.seen["stored"] += 1
        self.seen["stored under a parent"] += name is not None
        self.seen["stored again"] += new < len(blocks)

    def remove(self, key, tier, picks, form):
        held = sorted(self.model.workers.get(key, Worker()).place)
        names = [held[pick % len(held)] if held and pick < 10 else pick for pick in picks]
        gone = self.model.remove(key, tier, names)
        assert self.index.remove(key[0], FORMS[form](names), key[1], tier) == gone
        self.seen["removed"] += gone

    def clear(self, key, is_one_rank):
        keys = [each for each in self.model.workers if each[0] == key[0]]
        keys = [each for each in keys if not is_one_rank or each == key]
        dropped = sum(self.model.clear(each) for each in keys)
        assert self.index.clear_all_blocks(key[0], key[1] if is_one_rank else None) == dropped

    def remove_worker(self, key):
        keys = [each for each in self.model.workers if each[0] == key[0]]
        assert self.index.remove_worker(key[0]) == len(keys)
        for each in keys:
            del self.model.workers[each]

    def ask(self, prompt):
        self.compare(self.index, prompt)

    def restore_a_dump(self):
        copy, dump = KvIndexer(4, count_mode=self.count_mode), self.index.dump_tree_as_events()
        assert copy.apply_events(dump) == len(dump)
        for prompt in self.prompts[-10:]:
            self.compare(copy, prompt)
        assert played(map(json.loads, copy.dump_tree_as_events())) == played(map(json.loads, dump))
        for key in self.model.workers:
            assert copy.block_count(*key) == self.model.count(key)
        self.seen["dumped"] += len(dump)

    def check(self):
        for prompt in self.prompts[-6:]:
            self.compare(self.index, prompt)
        assert self.index.workers() == sorted(self.model.workers)
        for key in self.model.workers:
            assert self.index.block_count(*key) == self.model.count(key)
        memberships = sum(map(self.model.count, self.model.workers))
        assert self.index.stats()["memberships"] == memberships

    def compare(self, index, prompt):
        wanted = self.model.scores(prompt)
        device = {key: depths[0] for key, depths in wanted.items() if depths[0]}
        prompt = np.array(prompt, np.uint64)
        found = index.find_matches(prompt)
        assert (found.tier_scores, found.scores, len(found)) == (wanted, device, len(device))
        reached = [sum(depth > at for depth in device.values()) for at in range(len(prompt))]
        assert found.frequencies == [count for count in reached if count]
        ranked = sorted((-depth, key) for key, depth in device.items())
        assert index.top(prompt, 2) == [(*key, -depth) for depth, key in ranked[:2]]
        ids, ranks, depths = np.zeros(9, np.uint64), np.zeros(9, np.uint32), np.zeros(9, np.uint32)
        count = index.find_matches_into(prompt, ids, ranks, depths)
        keys = zip(ids[:count].tolist(), ranks[:count].tolist(), strict=True)
        assert dict(zip(keys, depths[:count].tolist(), strict=True)) == device
        self.seen["several workers matched"] += len(found) > 1
        self.seen["lower tiers matched"] += any(d[0] < d[3] for d in wanted.values())


PARENTS = st.one_of(
    st.just(("root", 0)),
    st.tuples(st.just("held"), st.integers(0, 12)),
    st.tuples(st.just("held"), st.integers(0, 12)),
    st.tuples(st.just("any"), NAMES),
)
BLOCKS = st.lists(st.tuples(NAMES, LOCALS), min_size=1, max_size=5, unique_by=lambda b: b[0])
ANY_BLOCKS = st.lists(st.tuples(NAMES, LOCALS), min_size=1, max_size=5)
CALLS = {
    "store": (KEYS, TIER, PARENTS, st.one_of(BLOCKS, BLOCKS, BLOCKS, ANY_BLOCKS), FORM),
    "remove": (KEYS, TIER, st.lists(st.integers(0, 12), min_size=1, max_size=5), FORM),
    "clear": (KEYS, st.booleans()),
    "remove_worker": (KEYS,),
    "ask": (st.lists(LOCALS, max_size=8),),
    "restore_a_dump": (),
}
OFTEN = ["store"] * 9 + ["remove"] * 5 + ["restore_a_dump"] * 2 + sorted(CALLS)
CALL = st.sampled_from(OFTEN).flatmap(lambda name: st.tuples(st.just(name), *CALLS[name]))


@pytest.mark.parametrize("count_mode", ["copies", "set"])
def test_random_calls(count_mode):
    seen = Counter()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(CALL, min_size=20, max_size=50))
    def play(calls):
        pair = Pair(count_mode, seen)
        for name, *arguments in calls:
            getattr(pair, name)(*arguments)
            pair.check()

    play()
    # A tenth of what usually happens: enough to know that it was looked at.
    for event, least in {
        "stored": 100,
        "stored under a parent": 30,
        "stored again": 20,
        "refused": 50,
        "removed": 30,
        "dumped": 100,
        "several workers matched": 50,
        "lower tiers matched": 50,
    }.items():
        assert seen[event] >= least, (event, seen)
