"""Events over a network that keeps nothing, repaired from the workers' own indexes.

Routers that follow hold in the end what the workers hold, whatever was lost, and ask no more.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from unittest.mock import patch

import msgpack
import pytest
from engine import BLOCK, Engine
from seeds import ONE_SEED, SEEDS, play_all
from world import run_world

from kvflash._core import Catalog
from kvflash.errors import TransportError
from kvflash.transport import nats_core
from kvflash.transport.local_index import Answer, LocalIndex, join, question
from kvflash.transport.nats_core import CoreFollower

STEPS = 60


class Link:
    """The network of all messages, queries and answers."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.lose = dice.choice([0, 0.02, 0.2])
        self.lose_answer = dice.choice([0, 0.1, 0.4])
        self.repeat = dice.choice([0, 0.1])
        self.late_s = dice.choice([0.001, 0.5])
        self.cut = dice.choice([0, 0.02])

    def calm(self) -> None:
        self.lose = self.lose_answer = self.repeat = self.cut = 0
        self.late_s = 0.001


class Worker:
    """A worker process: an engine, its index, and its place in the network. It may be killed."""

    def __init__(self, engine: Engine, ring: int) -> None:
        self.engine, self.ring = engine, ring
        self.is_dead = False
        self.index = self._new_index()

    def restart(self) -> None:
        """kill -9, and another process under the same name."""
        self.engine.restart()
        self.index = self._new_index()

    def _new_index(self) -> LocalIndex:
        return LocalIndex(self.engine.origin(), ring_batches=self.ring)

    def next_batch(self, dice: random.Random) -> tuple[dict[str, str], bytes]:
        engine = self.engine
        payload, sequence = engine.batch(dice), engine.sequence
        engine.sequence += 1
        self.index.record(sequence, payload)
        return engine.origin().headers(sequence), payload


class Router:
    """A router process: a catalog and its follower. Actions after its death have no effect."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut_until = 0.0
        self.is_dead = False
        self.questions = 0
        self.catalog = Catalog(max_blocks=0)
        self.publishers: dict[int, int] = {}
        self.follower = CoreFollower(self.catalog, self.ask)
        for instance_id in world.workers:
            self.join(instance_id)

    def join(self, instance_id: int) -> None:
        endpoint = f"nats://s/{instance_id}/0"
        publisher = self.catalog.register(instance_id, endpoint, model_name="m", block_size=BLOCK)
        self.publishers[instance_id] = publisher
        self.follower.join(publisher, instance_id, 0)

    def leave(self, instance_id: int) -> None:
        self.follower.leave(self.publishers.pop(instance_id))
        self.catalog.expel(instance_id)

    def die(self) -> None:
        self.is_dead = True
        for publisher in list(self.publishers.values()):
            self.follower.leave(publisher)

    async def ask(
        self, instance_id: int, dp_rank: int, start: int | None, end: int | None
    ) -> Answer:
        """A question and its answer; either may be lost, and the worker may die in between."""
        world, dice = self.world, self.world.dice
        self.questions += 1
        await world.travel()
        worker = world.workers.get(instance_id)
        if worker is None or self.cut_until > world.now() or dice.random() < world.link.lose_answer:
            await asyncio.sleep(dice.choice([0.001, 5.0]))
            raise TransportError("nobody answers")
        parts = worker.index.respond(question(start, end))
        await world.travel()
        if self.cut_until > world.now() or dice.random() < world.link.lose_answer:
            await asyncio.sleep(5.0)
            raise TransportError("the answer was lost")
        dice.shuffle(parts)
        return join([msgpack.unpackb(part) for part in parts])


class World:
    """Workers, routers and the link between them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.link = Link(self.dice)
        self.workers: dict[int, Worker] = {}
        self.routers: list[Router] = []
        self.next_id = 1
        self.ring = self.dice.choice([1, 4, 1024])
        self.seen: Counter[str] = Counter()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def travel(self) -> None:
        await asyncio.sleep(self.dice.uniform(0, self.link.late_s))

    def new_worker(self) -> None:
        self.workers[self.next_id] = Worker(Engine(self.next_id), self.ring)
        for router in self.routers:
            router.join(self.next_id)
        self.next_id += 1

    def publish(self, worker: Worker) -> None:
        headers, payload = worker.next_batch(self.dice)
        for router in self.routers:
            for _ in range(2 if self.dice.random() < self.link.repeat else 1):
                if self.dice.random() < self.link.lose or router.cut_until > self.now():
                    self.seen["lost"] += 1
                    continue
                # Each on its own way: they overtake one another.
                late_s = self.dice.uniform(0, self.link.late_s)
                asyncio.get_running_loop().call_later(
                    late_s, self._deliver, router, headers, payload
                )

    @staticmethod
    def _deliver(router: Router, headers: dict[str, str], payload: bytes) -> None:
        if not router.is_dead:
            router.follower.heard(headers, payload)

    def disturb(self) -> None:
        """Kill, start, or cut somebody off."""
        dice = self.dice
        roll = dice.random()
        if roll < 0.03:
            self.seen["restarts"] += 1
            dice.choice(list(self.workers.values())).restart()
        elif roll < 0.05 and len(self.workers) > 1:
            self.seen["ends"] += 1
            instance_id = dice.choice(list(self.workers))
            del self.workers[instance_id]
            for router in self.routers:
                router.leave(instance_id)
        elif roll < 0.08 and len(self.workers) < 4:
            self.new_worker()
        elif roll < 0.11:
            self.seen["deaths"] += 1
            doomed = dice.choice(self.routers)
            doomed.die()
            self.routers[self.routers.index(doomed)] = Router(self)
        if dice.random() < self.link.cut:
            self.seen["cuts"] += 1
            dice.choice(self.routers).cut_until = self.now() + dice.uniform(0.1, 12)


def held(catalog: Catalog) -> list[tuple[int, int, int]]:
    """Worker, blocks and digest of all that hold something."""
    return [(i, blocks, digest) for _, i, _, blocks, digest, _ in catalog.digests() if blocks]


def play(seed: int) -> Counter[str]:
    """One world until it is calm, with all that must hold then."""
    world = World(seed)
    dice = world.dice

    async def live() -> None:
        for _ in range(2):
            world.new_worker()
        world.routers += [Router(world), Router(world)]
        for _ in range(STEPS):
            for _ in range(dice.choice([0, 1, 1, 6])):
                world.publish(dice.choice(list(world.workers.values())))
            world.disturb()
            await asyncio.sleep(dice.uniform(0, 0.4))
        world.link.calm()
        for router in world.routers:
            router.cut_until = 0.0
        # A question that is under way may take its five seconds, and be asked again.
        await asyncio.sleep(30)
        # The loss of the very last batch shows with the next one.
        for worker in world.workers.values():
            world.publish(worker)
        await asyncio.sleep(5)
        asked = [router.questions for router in world.routers]
        for router in world.routers:
            assert router.catalog.workers() == [(i, 0) for i in sorted(world.workers)]
            for instance_id, worker in world.workers.items():
                own = held(worker.index._catalog)
                known = [one for one in held(router.catalog) if one[0] == instance_id]
                assert known == own, f"seed {seed}: worker {instance_id}"
                # Blocks that the engine holds, computed without our code.
                assert sum(blocks for _, blocks, _ in own) == len(worker.engine.held)
        for _ in range(3):
            for worker in world.workers.values():
                world.publish(worker)
            await asyncio.sleep(20)
        assert [router.questions for router in world.routers] == asked, f"seed {seed}: a loop"
        for router in world.routers:
            world.seen.update(router.follower.stats)
            await router.follower.close()

    # So that a few messages are too many.
    with patch.object(nats_core, "_WAITING_MESSAGES_MAX", dice.choice([3, 10_000])):
        run_world(live)
    return world.seen


@pytest.mark.timeout(3_600)
def test_routers_hold_in_the_end_what_workers_hold() -> None:
    seen: Counter[str] = Counter()
    for one in play_all(play, __file__):
        seen += one
    print(dict(seen))
    if ONE_SEED is None:
        for kind in ("lost", "restarts", "ends", "deaths", "dumps", "ranges", "failed_questions"):
            assert seen[kind] > SEEDS / 4, f"a world without {kind} proves nothing"
        assert min(seen["overflows"], seen["cuts"]) > 0
