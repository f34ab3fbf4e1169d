"""Snapshot, purge, restore and gap repair in a world of faults: nothing acknowledged is ever lost.

``KVFLASH_SIM_SEEDS=10000`` plays more seeds, ``KVFLASH_SIM_SEED=7`` plays one and tells of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from world import (
    Engine,
    Faults,
    Node,
    SimBlobs,
    SimClock,
    SimKeys,
    SimLog,
    StoredReader,
    World,
    run_world,
)

from kvflash._core import Catalog
from kvflash.errors import TransportError
from kvflash.state.discovered import DiscoveredLock, DiscoveredRoster
from kvflash.state.frames import CatalogSink
from kvflash.state.replica import Replica
from kvflash.state.snapshot import Outcome, SnapshotOptions, Snapshots

SEEDS = int(os.environ.get("KVFLASH_SIM_SEEDS", "200"))
ONE_SEED = os.environ.get("KVFLASH_SIM_SEED")
CHUNKS = 10
BATCHES = 40
ROUTERS = 3


class Router:
    """A replica with its snapshots, as a node of the world."""

    def __init__(self, world: World, name: str, *, is_resetting: bool = False) -> None:
        self.node = Node(world, name)
        self.catalog = Catalog(max_blocks=0)
        self.sink = CatalogSink(self.catalog)
        keys = SimKeys(self.node)
        shared = {
            "log": SimLog(self.node),
            "blobs": SimBlobs(self.node),
            "roster": DiscoveredRoster(keys, "ns", "c"),
            "sink": self.sink,
            "clock": SimClock(self.node),
        }
        self.replica = Replica(name, **shared)
        self.snapshots = Snapshots(
            self.replica,
            **shared,
            lock=DiscoveredLock(keys, "v1/locks/ns/c/snapshot"),
            options=SnapshotOptions(threshold_messages=15, age_s_max=None),
        )
        self.is_resetting = is_resetting
        self.node.spawn(self.run())

    async def run(self) -> None:
        while self.is_resetting:
            try:
                await self.snapshots.reset()
            except TransportError:
                continue
            self.is_resetting = False
        self.node.spawn(self.snapshots.run())
        await self.replica.run()


def held(catalog: Catalog) -> list[tuple[int, int, int, int]]:
    """What a catalog holds, whatever the way it came there."""
    return [(i, rank, blocks, digest) for _, i, rank, blocks, digest, _ in catalog.digests()]


def truth(world: World) -> list[tuple[int, int, int, int]]:
    """What all that was ever acknowledged amounts to."""
    catalog = Catalog(max_blocks=0)
    CatalogSink(catalog).apply(world.history)
    return held(catalog)


def recovered(world: World) -> list[tuple[int, int, int, int]]:
    """What a new replica would find in the snapshot and the log."""
    catalog = Catalog(max_blocks=0)
    sink = CatalogSink(catalog)
    pointer, _ = world.flipped
    covered = 0
    if pointer is not None:
        covered = pointer.sequence
        if pointer.blob is not None:
            assert sink.restore(b"".join(world.blobs[pointer.blob])) == []
    assert world.first <= covered + 1, "the log begins behind the snapshot"
    sink.apply([message for at, message in sorted(world.messages.items()) if at > covered])
    return held(catalog)


def play(seed: int, *, spoil: Callable[[Router], None] = lambda _: None) -> World:
    """One world from its first event to calm, with all that must hold."""
    world = World(seed)
    dice = world.dice
    state = {"purges": 0, "name": 0}
    routers: list[Router] = []
    wrong: list[str] = []

    def new_router() -> None:
        state["name"] += 1
        is_resetting = state["name"] > 1 and dice.random() < 0.1
        router = Router(world, f"r{state['name']}", is_resetting=is_resetting)
        spoil(router)
        routers.append(router)

    def on_crash(node: Node) -> None:
        if any(router.node is node for router in routers):
            asyncio.get_running_loop().call_later(dice.uniform(0.1, 15), new_router)

    def on_purge() -> None:
        state["purges"] += 1
        # Raised in a node's task nobody would hear of it.
        try:
            assert recovered(world) == truth(world), "a purge took what no snapshot has"
        except AssertionError as error:
            wrong.append(f"{world.now():.3f} {error}")

    async def live() -> None:
        world.on_crash, world.on_purge = on_crash, on_purge
        world.faults = Faults(
            crash=dice.choice([0, 0.002, 0.01]),
            lose_request=dice.choice([0, 0.02]),
            lose_answer=dice.choice([0, 0.02]),
            lose_delivery=dice.choice([0, 0.01]),
            repeat_delivery=dice.choice([0, 0.05]),
            reorder_delivery=dice.choice([0, 0.05]),
            cut=dice.choice([0, 0.003]),
            stall=dice.choice([0, 0.003]),
        )
        for _ in range(ROUTERS):
            asyncio.get_running_loop().call_later(dice.uniform(0, 5), new_router)
        engines = [Engine(instance_id) for instance_id in (1, 2)]
        publisher = Node(world, "engines")
        publisher.die = lambda: None  # type: ignore[method-assign]
        log = SimLog(publisher)
        for _ in range(CHUNKS):
            for _ in range(BATCHES // CHUNKS):
                engine = dice.choice(engines)
                if dice.random() < 0.03:
                    engine.restart()
                await engine.publish(log, dice)
            await asyncio.sleep(dice.uniform(0, 4))
        world.faults = Faults()
        for node in world.nodes:
            node.cut_until = 0.0
        for _ in range(120):
            await asyncio.sleep(1)
            alive = [router for router in routers if not router.node.is_dead]
            is_calm = len(alive) == ROUTERS and all(
                router.replica.applied == world.last and not router.is_resetting for router in alive
            )
            if is_calm and set(world.readers) == {router.node.name for router in alive}:
                break
        else:
            seen = [(r.node.name, r.node.is_dead, r.replica.applied) for r in routers]
            raise AssertionError(f"seed {seed}: no calm: {seen}, {world.readers}, {world.last}")
        assert not wrong, f"seed {seed}: {wrong}"
        wanted = truth(world)
        for router in alive:
            assert held(router.catalog) == wanted, f"seed {seed}: {router.node.name} differs"
        assert recovered(world) == wanted, f"seed {seed}: a new replica would differ"
        if not any("Kvflash-Kind" in message.headers for message in world.history):
            # What the engines hold, without any code of ours.
            engines_hold = {engine.instance_id: len(engine.held) for engine in engines}
            said = {instance_id: blocks for instance_id, _, blocks, _ in wanted}
            assert said == {i: n for i, n in engines_hold.items() if n}, f"seed {seed}"

    run_world(live)
    world.purges = state["purges"]  # type: ignore[attr-defined]
    return world


def replay(seed: int) -> World:
    """Play a seed; if it fails, say how to see it again."""
    try:
        return play(seed)
    except BaseException:
        print(f"again: KVFLASH_SIM_SEED={seed} pytest {__file__} -s")
        raise


@pytest.mark.timeout(3_600)
def test_nothing_acknowledged_is_lost() -> None:
    seeds = [int(ONE_SEED)] if ONE_SEED else range(SEEDS)
    purges = crashes = flips = 0
    for seed in seeds:
        world = replay(seed)
        purges += world.purges  # type: ignore[attr-defined]
        crashes += sum(node.is_dead for node in world.nodes)
        flips += world.flipped[1]
        if ONE_SEED:
            print("\n".join(world.trace))
    print(f"{len(seeds)} seeds: {crashes} crashes, {flips} flips, {purges} purges")
    if not ONE_SEED:
        # A world in which nothing happens proves nothing.
        assert min(purges, crashes, flips) > len(seeds) / 4


Publish = Callable[[int], Coroutine[Any, Any, None]]
Script = Callable[[World, Router, Router, Publish], Coroutine[Any, Any, None]]


def directed(script: Script) -> World:
    """Two routers that follow, but snapshot only when the script says so."""
    world = World(1)

    async def live() -> None:
        routers = [Router(world, f"r{at}") for at in range(2)]
        for router in routers:
            router.node.tasks[0].cancel()
            router.node.spawn(router.replica.run())
        engine, log = Engine(1), SimLog(Node(world, "engine"))

        async def publish(count: int) -> None:
            for _ in range(count):
                await engine.publish(log, world.dice)
            for router in routers:
                await router.replica.wait_applied(world.last, world.incarnation, 60)

        await publish(20)
        await script(world, routers[0], routers[1], publish)
        assert recovered(world) == truth(world)

    run_world(live)
    return world


@pytest.mark.parametrize("is_swept", [False, True])
def test_a_holder_that_stood_still_is_fenced(is_swept: bool) -> None:
    """Its lock ran out while it uploaded; another one has snapshotted and purged beyond it."""

    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        blobs = one.snapshots._blobs
        upload = blobs.put

        async def put_slowly(name: str, chunks: object) -> str:
            digest = await upload(name, chunks)  # type: ignore[arg-type]
            for key in [key for key in world.keys if key.startswith("v1/locks/")]:
                del world.keys[key]
            await publish(20)
            if not is_swept:
                # As if it had died just then.
                two.snapshots._delete_others = nothing  # type: ignore[method-assign]
            assert await two.snapshots.take() == Outcome.DONE
            assert world.first > 20
            return digest

        blobs.put = put_slowly  # type: ignore[method-assign]
        assert await one.snapshots.take() == Outcome.FENCED
        pointer, _ = world.flipped
        assert pointer is not None
        assert pointer.sequence == 40
        assert list(world.blobs) == [pointer.blob]

    async def nothing() -> None:
        return

    directed(script)


def test_a_snapshot_of_a_replica_that_was_given_another_state_is_thrown_away() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        blobs = one.snapshots._blobs
        upload = blobs.put

        async def put_while_restored(name: str, chunks: object) -> str:
            one.replica.generation += 1
            one.sink.clear()
            return await upload(name, chunks)  # type: ignore[arg-type]

        blobs.put = put_while_restored  # type: ignore[method-assign]
        assert await one.snapshots.take() == Outcome.BEHIND
        assert world.flipped == (None, 0)
        assert world.blobs == {}
        assert world.first == 1

    directed(script)


def test_nothing_is_purged_while_somebody_is_starting() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        # Listed, and about to read the log from a pointer that is old by now.
        await one.replica._roster.join("new")
        assert await one.snapshots.take() == Outcome.DONE
        assert world.first == 1
        world.readers["new"] = StoredReader(8, 7)
        await one.snapshots._purge()
        assert world.first == 8

    directed(script)
