"""kvflash.RadixTree against plain dictionaries: random events as JSON, every answer compared."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvflash import InvalidArgumentError, RadixTree

INSTANCES = st.integers(0, 3)
RANKS = st.integers(0, 1)
# Few names and few contents, so that blocks are shared, moved, evicted and stored again.
NAMES = st.integers(0, 12).map(lambda n: n * 7 + 2**63 * (n % 2))
LOCALS = st.integers(1, 4).map(lambda n: 2**64 - n)


class Worker:
    """What one worker holds, by first principles: name -> the contents from the prompt's start."""

    def __init__(self):
        self.held = {}
        self.evicted = {}

    def place(self, name):
        return self.held.get(name, self.evicted.get(name))

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
            chain = worker.place(parent) if worker else None
            if chain is None:
                return False
        worker = self.workers.setdefault(key, Worker())
        for name, local in blocks:
            chain = (*chain, local)
            worker.held[name] = chain
            worker.evicted.pop(name, None)
        return True

    def remove(self, key, names):
        worker = self.workers.get(key, Worker())
        for name in names:
            if name in worker.held:
                worker.evicted[name] = worker.held.pop(name)

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


class RadixTreeMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.tree, self.model = RadixTree(), Model()
        self.prompts = [()]

    @rule(
        instance=INSTANCES,
        rank=RANKS,
        parent=st.none() | NAMES,
        blocks=st.lists(st.tuples(NAMES, LOCALS), min_size=1, max_size=6),
    )
    def store(self, instance, rank, parent, blocks):
        data = {
            "stored": {
                "parent_hash": parent,
                "blocks": [
                    {"block_hash": name, "tokens_hash": local, "mm_extra_info": None}
                    for name, local in blocks
                ],
            }
        }
        if self.model.store((instance, rank), parent, blocks):
            self.tree.apply_event(instance, event(data, rank))
            self.prompts.append(self.model.workers[instance, rank].held[blocks[-1][0]])
        else:
            with pytest.raises(InvalidArgumentError):
                self.tree.apply_event(instance, event(data, rank))

    @rule(instance=INSTANCES, rank=RANKS, names=st.lists(NAMES, max_size=6))
    def remove(self, instance, rank, names):
        self.model.remove((instance, rank), names)
        self.tree.apply_event(instance, event({"removed": {"block_hashes": names}}, rank))

    @rule(instance=INSTANCES, rank=RANKS)
    def clear_by_event(self, instance, rank):
        self.model.clear((instance, rank))
        self.tree.apply_event(instance, event("cleared", rank))

    @rule(instance=INSTANCES, rank=st.none() | RANKS)
    def clear_by_call(self, instance, rank):
        keys = [key for key in self.model.workers if key[0] == instance and rank in (None, key[1])]
        dropped = sum(self.model.clear(key) for key in keys)
        assert self.tree.clear_all_blocks(instance, rank) == dropped

    @rule(instance=INSTANCES)
    def remove_worker(self, instance):
        keys = [key for key in self.model.workers if key[0] == instance]
        assert self.tree.remove_worker(instance) == len(keys)
        for key in keys:
            del self.model.workers[key]

    @rule(prompt=st.lists(LOCALS, max_size=8))
    def ask(self, prompt):
        self.compare(prompt)

    @rule()
    def restore_a_dump(self):
        """A dump replayed into an empty tree answers alike, holes included."""
        copy = RadixTree()
        for line in self.tree.dump_tree_as_events():
            dumped = json.loads(line)
            copy.apply_event(dumped["worker_id"], json.dumps(dumped["event"]).encode())
        for prompt in self.prompts[-10:]:
            assert copy.find_matches(list(prompt)).scores == self.model.scores(prompt)
        for (instance, rank), worker in self.model.workers.items():
            assert copy.block_count(instance, rank) == len(worker.held)
        assert sorted(copy.dump_tree_as_events()) == sorted(self.tree.dump_tree_as_events())

    @invariant()
    def same(self):
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


RadixTreeMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_random_events = RadixTreeMachine.TestCase
