"""kvflash.RadixTree against plain dictionaries: random events as JSON, every answer compared."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflash import InvalidArgumentError, RadixTree
from service import played

KEYS = st.sampled_from([(1, 0)] * 3 + [(1, 1), (2, 0)])
# Few names and few contents, so that blocks are shared, moved, evicted and stored again.
NAMES = st.integers(0, 24).map(lambda n: n * 7 + 2**63 * (n % 2))
LOCALS = st.integers(1, 4).map(lambda n: 2**64 - n)


class Worker:
    """Blocks of one worker, by first principles: name -> contents from the prompt's start."""

    def __init__(self):
        self.held = {}
        self.evicted = set()

    def depth(self, prompt):
        contents = set(self.held.values())
        depth = 0
        while depth < len(prompt) and tuple(prompt[: depth + 1]) in contents:
            depth += 1
        return depth


class Model:
    def __init__(self):
        self.workers = {}

    def store(self, key, parent, blocks):
        """True when the event is taken."""
        names = [name for name, _ in blocks]
        worker = self.workers.get(key)
        chain = ()
        if parent is not None:
            names.append(parent)
        if len(set(names)) < len(names):
            return False
        if parent is not None:
            chain = worker.held.get(parent) if worker else None
            if chain is None:
                return False
        worker = self.workers.setdefault(key, Worker())
        for name, local in blocks:
            chain = (*chain, local)
            worker.held[name] = chain
            worker.evicted.discard(name)
        return True

    def remove(self, key, names):
        worker = self.workers.get(key, Worker())
        for name in names:
            if name in worker.held:
                del worker.held[name]
                worker.evicted.add(name)

    def clear(self, key):
        if key not in self.workers:
            return 0
        dropped = len(self.workers[key].held)
        self.workers[key] = Worker()
        return dropped

    def scores(self, prompt):
        depths = {key: worker.depth(prompt) for key, worker in self.workers.items()}
        return {key: depth for key, depth in depths.items() if depth}

    def early_scores(self, prompt):
        found = self.scores(prompt)
        stops = (
            depth
            for depth in range(1, len(prompt) + 1)
            if sum(reached >= depth for reached in found.values()) == 1
        )
        stop = next(stops, len(prompt))
        return {key: min(depth, stop) for key, depth in found.items()}


def event(data, rank):
    return json.dumps({"event_id": 0, "data": data, "dp_rank": rank}).encode()


class Pair:
    """The tree and its model, played alike."""

    def __init__(self, seen):
        self.tree, self.model = RadixTree(), Model()
        self.prompts, self.seen = [()], seen

    def store(self, key, parent, blocks):
        kind, pick = parent
        worker = self.model.workers.get(key, Worker())
        known = sorted({"held": worker.held, "evicted": worker.evicted}.get(kind, ()))
        name = {"root": None, "any": pick}.get(kind)
        if known:
            name = known[pick % len(known)]
        elif kind != "any":
            kind = "root"
        data = {
            "stored": {
                "parent_hash": name,
                "blocks": [
                    {"block_hash": each, "tokens_hash": local, "mm_extra_info": None}
                    for each, local in blocks
                ],
            }
        }
        if self.model.store(key, name, blocks):
            self.tree.apply_event(key[0], event(data, key[1]))
            self.prompts.append(self.model.workers[key].held[blocks[-1][0]])
            self.seen[f"stored under {kind}"] += 1
        else:
            with pytest.raises(InvalidArgumentError):
                self.tree.apply_event(key[0], event(data, key[1]))
            self.seen["refused"] += 1
            self.seen[f"refused under {kind}"] += 1

    def remove(self, key, picks):
        held = sorted(self.model.workers.get(key, Worker()).held)
        names = [held[pick % len(held)] if held and pick < 10 else pick for pick in picks]
        self.seen["removed"] += len(set(names) & set(held))
        self.model.remove(key, names)
        self.tree.apply_event(key[0], event({"removed": {"block_hashes": names}}, key[1]))

    def clear_by_event(self, key):
        self.model.clear(key)
        self.tree.apply_event(key[0], event("cleared", key[1]))

    def clear_by_call(self, key, is_one_rank):
        keys = [each for each in self.model.workers if each[0] == key[0]]
        keys = [each for each in keys if not is_one_rank or each == key]
        dropped = sum(self.model.clear(each) for each in keys)
        assert self.tree.clear_all_blocks(key[0], key[1] if is_one_rank else None) == dropped

    def remove_worker(self, key):
        keys = [each for each in self.model.workers if each[0] == key[0]]
        assert self.tree.remove_worker(key[0]) == len(keys)
        for each in keys:
            del self.model.workers[each]

    def ask(self, prompt):
        self.compare(prompt)

    def restore_a_dump(self):
        """A dump replayed into an empty tree answers alike, holes included."""
        copy = RadixTree()
        dump = list(map(json.loads, self.tree.dump_tree_as_events()))
        for dumped in dump:
            copy.apply_event(dumped["worker_id"], json.dumps(dumped["event"]).encode())
            self.seen["dumped behind a hole"] += "removed" in dumped["event"]["data"]
        for prompt in self.prompts[-10:]:
            assert copy.find_matches(list(prompt)).scores == self.model.scores(prompt)
        for (instance, rank), worker in self.model.workers.items():
            assert copy.block_count(instance, rank) == len(worker.held)
        assert played(map(json.loads, copy.dump_tree_as_events())) == played(dump)

    def check(self):
        for prompt in self.prompts[-6:]:
            self.compare(prompt)
        for (instance, rank), worker in self.model.workers.items():
            assert self.tree.block_count(instance, rank) == len(worker.held)

    def compare(self, prompt):
        found = self.tree.find_matches(list(prompt))
        assert found.scores == self.model.scores(prompt)
        assert len(found) == len(found.scores)
        early = self.tree.find_matches(list(prompt), early_exit=True).scores
        assert early == self.model.early_scores(prompt)
        self.seen["several workers matched"] += len(found) > 1


PARENTS = st.one_of(
    st.just(("root", 0)),
    st.tuples(st.just("held"), st.integers(0, 12)),
    st.tuples(st.just("held"), st.integers(0, 12)),
    st.tuples(st.just("evicted"), st.integers(0, 12)),
    st.tuples(st.just("any"), NAMES),
)
BLOCKS = st.lists(st.tuples(NAMES, LOCALS), min_size=1, max_size=5, unique_by=lambda b: b[0])
ANY_BLOCKS = st.lists(st.tuples(NAMES, LOCALS), min_size=1, max_size=5)
CALLS = {
    "store": (KEYS, PARENTS, st.one_of(BLOCKS, BLOCKS, BLOCKS, ANY_BLOCKS)),
    "remove": (KEYS, st.lists(st.integers(0, 12), min_size=1, max_size=5)),
    "clear_by_event": (KEYS,),
    "clear_by_call": (KEYS, st.booleans()),
    "remove_worker": (KEYS,),
    "ask": (st.lists(LOCALS, max_size=8),),
    "restore_a_dump": (),
}
OFTEN = ["store"] * 9 + ["remove"] * 5 + ["restore_a_dump"] * 2 + sorted(CALLS)
CALL = st.sampled_from(OFTEN).flatmap(lambda name: st.tuples(st.just(name), *CALLS[name]))


def test_random_events():
    seen = Counter()

    @settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(CALL, min_size=20, max_size=50))
    def play(calls):
        pair = Pair(seen)
        for name, *arguments in calls:
            getattr(pair, name)(*arguments)
            pair.check()

    play()
    # A tenth of what usually happens: enough to know that it was looked at.
    for event, least in {
        "stored under root": 50,
        "stored under held": 30,
        "refused under evicted": 3,
        "refused": 50,
        "removed": 50,
        "dumped behind a hole": 20,
        "several workers matched": 50,
    }.items():
        assert seen[event] >= least, (event, seen)
