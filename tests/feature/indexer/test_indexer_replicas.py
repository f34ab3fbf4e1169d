"""Two replica processes under churn: frames are lost, replicas and an engine killed; at the
end they hold what the engines hold."""

from __future__ import annotations

import contextlib
import random

import pytest

from replica import LossyProxy, Replica
from service import Engine, batch, cleared, dumped_blocks, listener, removed, stored, until

SIZE = 4
MODEL = "m"
MODEL_KEY = "m:default"


class Churn:
    """An engine's double that stores and evicts at random, and knows what it holds."""

    def __init__(self, engine, instance, seed):
        self.engine, self.instance = engine, instance
        self.held = {}  # name -> parent
        self._rng = random.Random(seed)
        self._next = instance * 1_000_000 + 1

    def step(self):
        rng = self._rng
        if rng.random() < 0.01:
            self.held.clear()
            return self.engine.publish(batch(cleared()))
        events = []
        for _ in range(rng.randint(1, 3)):
            leaves = [name for name in self.held if name not in set(self.held.values())]
            if len(leaves) > 8 or (leaves and rng.random() < 0.35):
                gone = rng.choice(leaves)
                del self.held[gone]
                events.append(removed([gone]))
                continue
            parent = rng.choice([None, *self.held])
            names = list(range(self._next, self._next + rng.randint(1, 4)))
            self._next = names[-1] + 1
            tokens = [name * SIZE + n for name in names for n in range(SIZE)]
            events.append(stored(names, tokens, parent, block_size=SIZE))
            for name in names:
                self.held[name] = parent
                parent = name
        return self.engine.publish(batch(*events))

    def restart(self):
        self.held.clear()
        self.engine.restart()


def names(replica, instance):
    return {fact[3] for fact in dumped_blocks(replica.http, MODEL_KEY) if fact[0] == instance}


@pytest.fixture
def closing():
    """Closes what is made in it, also behind a failure: an open socket would hold the process."""
    with contextlib.ExitStack() as stack:
        yield lambda made: stack.enter_context(contextlib.closing(made))


@pytest.mark.parametrize("seed", [1, 2])
def test_replicas_converge_under_churn_losses_and_kills(run, closing, seed):
    engines = [closing(Engine(is_shared=True)) for _ in range(2)]
    churns = [Churn(engine, n + 1, seed * 10 + n) for n, engine in enumerate(engines)]
    proxies = [
        [closing(LossyProxy(engine.endpoint, seed * 100 + 10 * n + m, 0.05)) for m in range(2)]
        for n, engine in enumerate(engines)
    ]

    def workers(replica):
        return [
            {
                "instance_id": churn.instance,
                "endpoint": proxies[n][replica].endpoint,
                "replay_endpoint": churn.engine.replay_endpoint,
                "model_name": MODEL,
                "block_size": SIZE,
            }
            for n, churn in enumerate(churns)
        ]

    def work(steps):
        for _ in range(steps):
            for churn in churns:
                churn.step()

    a = Replica(run, workers(0))
    work(100)
    b = Replica(run, workers(1), [a.url])
    work(100)
    b.kill()
    work(50)
    b = Replica(run, workers(1), [a.url])
    work(50)
    churns[0].restart()
    work(50)
    a.kill()
    work(50)
    a = Replica(run, workers(0), [b.url])
    work(100)

    assert sum(proxy.lost for pair in proxies for proxy in pair) > 0, "nothing was lost"
    for proxy in (proxy for pair in proxies for proxy in pair):
        proxy.share = 0.0

    def converged():
        # The loss of the last frame shows only with the next one.
        for churn in churns:
            churn.engine.publish(batch())
        digests = [
            {(w["instance_id"], w["digest"]) for m in r.http.get("/digest") for w in m["workers"]}
            for r in (a, b)
        ]
        return digests[0] == digests[1] and all(
            names(replica, churn.instance) == set(churn.held)
            for replica in (a, b)
            for churn in churns
        )

    until(converged, "the replicas to hold what the engines hold")
    for replica in (a, b):
        # The other engine took along, when it died, what was still to be repaired.
        events = listener(replica.http, churns[1].instance)["events"]
        assert (events["lost_batches"], events["orphaned"]) == (0, 0)
        replica.kill()
