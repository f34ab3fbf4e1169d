"""Snapshot, purge, restore and gap repair in a world of faults: nothing acknowledged is ever lost.

A log may be deleted by somebody, and forgets what is too old. ``KVFLASH_SIM_SEED=7`` plays one seed
and tells of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import pytest
from engine import Engine
from seeds import ONE_SEED, SEEDS, play_all
from world import (
    LEASE_S,
    Faults,
    Node,
    SimBlobs,
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
from kvflash.state.snapshot import Outcome, Snapshots

CHUNKS = 10
BATCHES = 40
ROUTERS = 3
AGE_S = 30.0


class Router:
    """A replica with its snapshots, as a node of the world."""

    def __init__(
        self, world: World, name: str, *, is_resetting: bool = False, is_quiet: bool = False
    ) -> None:
        self.node = Node(world, name)
        self.catalog = Catalog(max_blocks=0)
        self.sink = CatalogSink(self.catalog)
        keys = SimKeys(self.node)
        shared = {
            "log": SimLog(self.node),
            "blobs": SimBlobs(self.node),
            "roster": DiscoveredRoster(keys, "ns", "c"),
            "sink": self.sink,
        }
        self.replica = Replica(name, **shared)
        self.snapshots = Snapshots(
            self.replica,
            lock=DiscoveredLock(keys, "v1/locks/ns/c/snapshot"),
            threshold_messages=None if is_quiet else 15,
            age_s_max=AGE_S if is_quiet else None,
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


def held(catalog: Catalog, gone: Collection[int] = frozenset()) -> list[tuple[int, int, int, int]]:
    """Entries of a catalog for existing workers, from any source."""
    return [
        (i, rank, blocks, digest)
        for _, i, rank, blocks, digest, _ in catalog.digests()
        if i not in gone and blocks
    ]


def truth(world: World, gone: Collection[int] = frozenset()) -> list[tuple[int, int, int, int]]:
    """Combined state of all acknowledged messages."""
    catalog = Catalog(max_blocks=0)
    CatalogSink(catalog).apply(world.history)
    return held(catalog, gone)


def recovered(world: World, gone: Collection[int] = frozenset()) -> list[tuple[int, int, int, int]]:
    """State that a new replica would find in the snapshot and the log."""
    catalog = Catalog(max_blocks=0)
    sink = CatalogSink(catalog)
    pointer, _ = world.flipped
    covered = 0
    if pointer is not None:
        if pointer.incarnation == world.incarnation:
            covered = pointer.sequence
        if pointer.blob is not None:
            assert sink.restore(b"".join(world.blobs[pointer.blob])) == []
    assert world.first <= covered + 1, "the log begins behind the snapshot"
    sink.apply([message for at, message in sorted(world.messages.items()) if at > covered])
    return held(catalog, gone)


def play(seed: int) -> Counter[str]:
    """One world from its first event to calm, with all that must hold."""
    world = World(seed)
    dice = world.dice
    seen: Counter[str] = Counter()
    routers: list[Router] = []
    wrong: list[str] = []
    engines = [Engine(instance_id) for instance_id in (1, 2)]
    gone: set[int] = set()
    is_quiet = dice.random() < 0.25
    leave = dice.choice([0, 0.05])
    deletions = dice.choice([0, 0, 0, 0.1])
    if is_quiet:
        world.max_age_s = 4 * AGE_S

    def new_router() -> None:
        seen["routers"] += 1
        is_resetting = seen["routers"] > 1 and dice.random() < 0.1
        router = Router(world, f"r{seen['routers']}", is_resetting=is_resetting, is_quiet=is_quiet)
        routers.append(router)
        for instance_id in gone:
            router.sink.leave(instance_id)

    def on_crash(node: Node) -> None:
        if any(router.node is node for router in routers):
            asyncio.get_running_loop().call_later(dice.uniform(0.1, 15), new_router)

    def on_purge() -> None:
        seen["purges"] += 1
        if seen["deletions"]:
            return
        # An exception raised in a node's task would go unnoticed.
        try:
            assert recovered(world, gone) == truth(world, gone), "a purge took what no snapshot has"
        except AssertionError as error:
            wrong.append(f"{world.now():.3f} {error}")

    def end_worker(engine: Engine) -> None:
        """Discovery tells everybody, each in its own time, that a worker is gone."""
        seen["ends"] += 1
        gone.add(engine.instance_id)
        engines[engines.index(engine)] = Engine(engine.instance_id + 2)
        for router in routers:
            late_s = dice.uniform(0, 3)
            asyncio.get_running_loop().call_later(late_s, router.sink.leave, engine.instance_id)

    async def settle() -> list[Router]:
        """Wait until all routers are there and have applied everything."""
        for _ in range(120):
            await asyncio.sleep(1)
            alive = [router for router in routers if not router.node.is_dead]
            is_calm = len(alive) == ROUTERS and all(
                router.replica.stats.applied == world.last
                and router.replica.incarnation == world.incarnation
                and not router.is_resetting
                for router in alive
            )
            if is_calm and set(world.readers) == {router.node.name for router in alive}:
                return alive
        said = [(r.node.name, r.node.is_dead, r.replica.stats.applied) for r in routers]
        raise AssertionError(f"seed {seed}: no calm: {said}, {world.readers}, {world.last}")

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
        publisher = Node(world, "engines")
        publisher.die = lambda: None  # type: ignore[method-assign]
        log = SimLog(publisher)
        for _ in range(CHUNKS):
            for _ in range(BATCHES // CHUNKS):
                engine = dice.choice(engines)
                if dice.random() < 0.03:
                    engine.restart()
                elif dice.random() < leave:
                    end_worker(engine)
                    continue
                await engine.publish(log, dice)
            if dice.random() < deletions:
                seen["deletions"] += 1
                losses = (world.delete_log, world.purge_by_hand, world.blobs.clear)
                dice.choice((*losses, lambda: world.lose_end(dice.randint(1, 30))))()
            await asyncio.sleep(dice.uniform(0, 4))
        world.faults = Faults()
        for node in world.nodes:
            node.cut_until = 0.0
        # All have been told who is gone.
        await asyncio.sleep(3)
        alive = await settle()
        if world.blind_purges:
            # Known, and told in ``state.snapshot``: all are there again, and that is all.
            seen["blind_purges"] += 1
            return
        if seen["deletions"]:
            # State that was only in there is lost until its engines publish it again.
            for engine in engines:
                engine.restart()
                await engine.publish(log, dice)
            alive = await settle()
            # Where every router has missed messages, the next snapshot that is due moves past them.
            # One that waits for messages that are lost holds the lock for 30 s.
            await asyncio.sleep(45)
            for router in alive:
                await router.snapshots.take()
        if is_quiet:
            # No engine publishes until the log has forgotten everything.
            await asyncio.sleep(world.max_age_s + 1)
            world.expire()
            assert world.first == world.last + 1
        assert not wrong, f"seed {seed}: {wrong}"
        wanted = recovered(world, gone) if seen["deletions"] else truth(world, gone)
        for router in alive:
            assert held(router.catalog, gone) == wanted, f"seed {seed}: {router.node.name} differs"
        assert recovered(world, gone) == wanted, f"seed {seed}: a new replica would differ"
        for router in alive:
            assert not gone & {instance_id for instance_id, _, _, _ in held(router.catalog)}
        is_reset = any("Kvflash-Kind" in message.headers for message in world.history)
        if not is_reset or seen["deletions"]:
            # Blocks that the engines hold, computed without our code.
            engines_hold = {engine.instance_id: len(engine.held) for engine in engines}
            said = {instance_id: blocks for instance_id, _, blocks, _ in wanted}
            assert said == {i: n for i, n in engines_hold.items() if n}, f"seed {seed}"

    run_world(live)
    seen["crashes"] = sum(node.is_dead for node in world.nodes)
    seen["flips"] = world.flipped[1]
    seen["quiet"] = is_quiet
    if ONE_SEED is not None:
        print("\n".join(world.trace))
    return seen


@pytest.mark.timeout(3_600)
def test_nothing_acknowledged_is_lost() -> None:
    seen: Counter[str] = Counter()
    for one in play_all(play, __file__):
        seen += one
    print(dict(seen))
    if ONE_SEED is None:
        # A world in which nothing happens proves nothing.
        assert min(seen["purges"], seen["crashes"], seen["flips"]) > SEEDS / 4
        assert seen["blind_purges"] <= max(2, SEEDS / 500)
        assert min(seen["deletions"], seen["ends"], seen["quiet"]) > SEEDS / 10


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


def happens_before(
    router: Router, step: str, event: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Once, just before a step of a router's snapshot."""
    blobs = router.snapshots._blobs
    work = getattr(blobs, step)

    async def work_after_it(*args: object) -> object:
        setattr(blobs, step, work)
        await event()
        return await work(*args)

    setattr(blobs, step, work_after_it)


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


@pytest.mark.parametrize("again", [3, 5, 30])
@pytest.mark.parametrize("is_covered", [False, True])
def test_a_log_that_lost_its_newest_messages_is_read_again(*, is_covered: bool, again: int) -> None:
    """Their numbers are given again: to fewer messages, to as many, to more."""

    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        for router in (one, two):
            router.node.cut_until = 0.0
        assert await one.snapshots.take() == Outcome.DONE
        await publish(10)  # type: ignore[misc]
        if is_covered:
            assert await two.snapshots.take() == Outcome.DONE
            await publish(2)  # type: ignore[misc]
        world.lose_end(7)
        # Restarted servers have forgotten what readers wanted.
        one.node.cut_until = two.node.cut_until = world.now() + 5
        publishing = asyncio.ensure_future(publish(again))  # type: ignore[arg-type]
        await asyncio.sleep(60)
        await publishing
        for router in (one, two):
            assert router.replica.stats.applied == world.last
            assert held(router.catalog) == truth(world)
        await one.snapshots.tick()
        late = Router(world, "late")
        await late.replica.wait_caught_up()
        assert held(late.catalog) == truth(world)

    directed(script)


def test_a_router_that_was_behind_restores_what_a_shortened_log_no_longer_has() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        two.node.cut_until = world.now() + 60
        publishing = asyncio.ensure_future(publish(15))  # type: ignore[arg-type]
        await asyncio.sleep(2 * LEASE_S)
        # Nobody waits for the one that is away; a slow one keeps the newest messages.
        await one.replica.roster.join("slow")
        world.readers["slow"] = StoredReader(31, 30)
        await one.snapshots.tick()
        pointer, _ = world.flipped
        assert pointer is not None
        assert (pointer.sequence, world.first, two.replica.stats.applied) == (35, 31, 20)
        world.lose_end(3)
        await publish(1)  # type: ignore[misc]
        await publishing
        assert two.replica.is_rolled_back
        assert held(two.catalog) == truth(world)
        # It replaces the snapshot.
        await two.snapshots.tick()
        assert world.flipped[1] == 2

    directed(script)


@pytest.mark.parametrize("step", ["put", "flip"])
def test_a_snapshot_that_was_begun_before_a_rollback_is_not_kept(step: str) -> None:
    """It claims messages under numbers that the log gives again."""

    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        async def roll_back() -> None:
            world.lose_end(5)
            # Restarted servers have forgotten what readers wanted.
            one.node.cut_until = two.node.cut_until = world.now() + 5
            await publish(3)  # type: ignore[misc]
            await asyncio.sleep(10)
            assert one.replica.is_rolled_back

        happens_before(one, step, roll_back)
        outcome = await one.snapshots.take()
        assert outcome == {"put": Outcome.BEHIND, "flip": Outcome.DONE}[step]
        await one.snapshots.tick()
        pointer, _ = world.flipped
        assert pointer is not None
        assert pointer.sequence == world.last == 18
        assert not one.replica.is_rolled_back
        late = Router(world, "late")
        await late.replica.wait_caught_up()
        assert held(late.catalog) == truth(world)

    directed(script)


def test_a_snapshot_saves_what_was_purged_before_one_had_it() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        assert await one.snapshots.take() == Outcome.DONE
        await publish(5)  # type: ignore[misc]
        world.purge_by_hand()
        # A router that has lost them itself leaves it to one that has not.
        late = Router(world, "late", is_quiet=True)
        await late.replica.wait_caught_up()
        assert late.replica.stats.lost_messages_total == 5
        late.snapshots._age_s_max = None
        await late.snapshots.tick()
        assert world.flipped[1] == 1
        late.node.die()
        await two.snapshots.tick()
        assert world.flipped[1] == 2

    directed(script)


def test_a_snapshot_that_is_gone_is_replaced() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        assert await one.snapshots.take() == Outcome.DONE
        world.blobs.clear()
        late = Router(world, "late", is_quiet=True)
        await asyncio.sleep(10)
        assert not late.catalog.workers()
        await two.snapshots.tick()
        await late.replica.wait_caught_up()
        assert held(late.catalog) == truth(world)

    directed(script)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_replica_goes_on_without_a_snapshot_that_is_lost(
    *, is_damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        # It keeps the messages.
        await one.replica.roster.join("slow")
        assert await one.snapshots.take() == Outcome.DONE
        one.node.die()
        two.node.die()
        for chunks in world.blobs.values():
            chunks[0] = b"damaged"
        if not is_damaged:
            world.blobs.clear()
        late = Router(world, "late")
        await asyncio.sleep(60)
        assert held(late.catalog) == truth(world)
        # With its own snapshot the next one does not wait.
        assert late.snapshots.stats.snapshots_total == 1

    directed(script)
    assert sum("is lost; going on without it" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("gone", [[23], [23, 24], [23, 26, 30], [30]])
def test_messages_that_are_gone_from_amid_the_log_are_counted_and_left_behind(
    gone: list[int],
) -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        one.node.cut_until = two.node.cut_until = world.now() + 90
        publishing = asyncio.ensure_future(publish(10))  # type: ignore[arg-type]
        await asyncio.sleep(60)
        assert world.last == 30
        for sequence in gone:
            world.delete(sequence)
        for router in (one, two):
            assert await router.replica.wait_applied(30, world.incarnation, 120)
            assert router.replica.stats.lost_messages_total == len(gone)
            assert router.replica.stats.reopened_total <= 2 * len(gone)
            assert held(router.catalog) == truth(world)
        await publishing
        await publish(5)
        assert one.replica.stats.applied == 35

    directed(script)


def test_a_message_that_was_deleted_hides_no_age() -> None:
    """Behind the snapshot, while the log begins before that: somebody is slow."""

    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        await one.replica.roster.join("slow")
        world.readers["slow"] = StoredReader(8, 7)
        assert await one.snapshots.take() == Outcome.DONE
        await publish(5)  # type: ignore[misc]
        assert (world.first, world.last) == (8, 25)
        # Deleted, and applied before.
        del world.messages[21]
        one.snapshots._threshold_messages, one.snapshots._age_s_max = None, AGE_S
        await asyncio.sleep(AGE_S + 1)
        await one.snapshots.tick()
        pointer, _ = world.flipped
        assert pointer is not None
        assert pointer.sequence == 25

    directed(script)


def test_what_nobody_thought_of_ends_neither_the_following_nor_the_snapshots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(work: Callable[..., Any], times: int) -> Callable[..., Any]:
        left = iter(range(times))

        async def fail(*args: Any) -> Any:
            if next(left, None) is not None:
                failed.append(work)
                raise OSError("no space left on device")
            return await work(*args)

        return fail

    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        log = one.replica.log
        log.state = failing(log.state, 3)  # type: ignore[method-assign]
        one.snapshots.tick = failing(one.snapshots.tick, 3)  # type: ignore[method-assign]
        one.node.spawn(one.snapshots.run())
        # Nothing comes: it looks whether that is so.
        await asyncio.sleep(60)
        await publish(5)  # type: ignore[misc]
        assert one.replica.stats.applied == 25
        assert one.snapshots.stats.snapshots_total > 0

    failed: list[Callable[..., Any]] = []
    directed(script)
    assert len(failed) == 6
    told = [record for record in caplog.records if "no space left" in record.message]
    assert [bool(record.exc_info) for record in told] == [True, True], "each with its traceback"
    assert {record.name for record in told} == {"kvflash.state.replica", "kvflash.state.snapshot"}


def test_a_snapshot_of_a_replica_that_was_given_another_state_is_thrown_away() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        async def restore() -> None:
            one.replica.generation += 1
            one.sink.clear()

        happens_before(one, "put", restore)
        assert await one.snapshots.take() == Outcome.BEHIND
        assert world.flipped == (None, 0)
        assert world.blobs == {}
        assert world.first == 1

    directed(script)


def test_a_reset_gives_up_on_a_pointer_that_never_holds_still() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        async def fail(*_: object) -> bool:
            return False

        one.snapshots._blobs.flip = fail  # type: ignore[method-assign]
        with pytest.raises(TransportError, match="the pointer changed at 300 attempts"):
            await one.snapshots.reset()
        # The lock is free.
        await two.snapshots.reset()

    directed(script)


def test_nothing_is_purged_while_somebody_is_starting() -> None:
    async def script(
        world: World, one: Router, two: Router, publish: Callable[..., object]
    ) -> None:
        # Listed, and about to read the log from a pointer that is old by now.
        await one.replica.roster.join("new")
        assert await one.snapshots.take() == Outcome.DONE
        assert world.first == 1
        world.readers["new"] = StoredReader(8, 7)
        await one.snapshots._purge()
        assert world.first == 8

    directed(script)
