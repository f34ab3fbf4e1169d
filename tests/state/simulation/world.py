"""A world with one seed: virtual time, a server that keeps logs, blobs and keys, and nodes.

They reach it over a network that loses, repeats, reorders and cuts, and they die at any await.

A node that has died never comes back from the call it was in, and nothing that it does afterwards
has an effect; its leases run out. What the server did stays done.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvflash.errors import NotFoundError, TransportError
from kvflash.transport.base import LogState, Message, Pointer

T = TypeVar("T")
LEASE_S = 10.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(self, executor, function, *args):  # type: ignore[no-untyped-def]
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if not self._ready and not self._scheduled:
            raise RuntimeError("nothing will ever happen in this world")
        if not self._ready:
            self._virtual_s = max(self._virtual_s, self._scheduled[0].when())
        super()._run_once()


@dataclass
class Faults:
    """How likely each is, per call; 0 when the world is calm."""

    crash: float = 0.0
    lose_request: float = 0.0
    lose_answer: float = 0.0
    lose_delivery: float = 0.0
    repeat_delivery: float = 0.0
    reorder_delivery: float = 0.0
    cut: float = 0.0
    stall: float = 0.0


@dataclass
class StoredReader:
    position: int
    floor: int


class World:
    """The server, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.faults = Faults()
        self.messages: dict[int, Message] = {}
        self.history: list[Message] = []
        self.keys_seen: dict[str, int] = {}
        self.first, self.last = 1, 0
        self.incarnation = "a"
        self.max_age_s = float("inf")
        self.stored_s: dict[int, float] = {}
        self.blind_purges = 0
        self.readers: dict[str, StoredReader] = {}
        self.blobs: dict[str, list[bytes]] = {}
        self.flipped: tuple[Pointer | None, int] = (None, 0)
        self.keys: dict[str, tuple[bytes, Lease | None]] = {}
        self.nodes: list[Node] = []
        self.on_purge: Callable[[], None] = lambda: None
        self.on_crash: Callable[[Node], None] = lambda _: None
        self.trace: list[str] = []

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now():8.3f} {text}")

    def chance(self, likely: float) -> bool:
        return self.dice.random() < likely

    def expire(self) -> None:
        """Forget what is older than the log keeps."""
        while self.first <= self.last and self.now() - self.stored_s[self.first] > self.max_age_s:
            self.messages.pop(self.first)
            self.first += 1

    def delete(self, sequence: int) -> None:
        """Somebody deletes one message amid the others."""
        assert self.first < sequence <= self.last
        del self.messages[sequence]
        self.history = [message for message in self.history if message.sequence != sequence]

    def lose_end(self, messages: int) -> None:
        """The server loses its newest messages, and gives their numbers again."""
        self.note(f"the newest {messages} messages are lost")
        end = max(self.first - 1, self.last - messages)
        for sequence in range(end + 1, self.last + 1):
            self.messages.pop(sequence, None)
        self.last = end
        self.keys_seen = {key: at for key, at in self.keys_seen.items() if at <= end}

    def purge_by_hand(self) -> None:
        """Somebody purges the log."""
        self.note("the log is purged")
        self.messages.clear()
        self.first = self.last + 1

    def delete_log(self) -> None:
        """Delete the stream; a process that finds it missing creates a new one."""
        self.note("the log is deleted")
        self.incarnation += "a"
        self.first, self.last = 1, 0
        for stored in (self.messages, self.stored_s, self.keys_seen, self.readers):
            stored.clear()

    def living(self, key: str) -> bool:
        lease = self.keys[key][1]
        return lease is None or lease.is_living

    def sweep(self) -> None:
        for key in [key for key in self.keys if not self.living(key)]:
            del self.keys[key]


class Lease:
    """Lives as long as its node does and reaches the server."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lost = asyncio.Event()
        self.is_revoked = False
        self.kept_until: float | None = None

    @property
    def is_living(self) -> bool:
        if self.is_revoked or self.lost.is_set():
            return False
        if self.kept_until is not None and self.node.world.now() > self.kept_until:
            return False
        silent_since = self.node.silent_since
        if silent_since is not None and self.node.world.now() - silent_since > LEASE_S:
            self.lost.set()
            return False
        return True

    async def revoke(self) -> None:
        def end() -> None:
            self.is_revoked = True

        # No longer kept alive, whether the server hears of it or not.
        self.kept_until = self.node.world.now() + LEASE_S
        await self.node.call(end)


class Node:
    """One process: its log, blobs and keys, over its own link."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.silent_since: float | None = None
        self.cut_until = 0.0
        self.tasks: list[asyncio.Task[Any]] = []
        world.nodes.append(self)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def die(self) -> None:
        if not self.is_dead:
            self.world.note(f"{self.name} dies")
            self.is_dead = True
            if self.silent_since is None:
                self.silent_since = self.world.now()
            self.world.on_crash(self)

    async def pause(self, seconds: float) -> None:
        """An await of a node: it may not come back."""
        await asyncio.sleep(seconds)
        if self.is_dead:
            await asyncio.get_running_loop().create_future()

    async def call(self, effect: Callable[[], T]) -> T:
        """Do something at the server, or not, or without hearing of it."""
        world, faults = self.world, self.world.faults
        await self.pause(world.dice.expovariate(1 / 0.002))
        if world.chance(faults.crash):
            if world.chance(0.5):
                effect()
            self.die()
            await self.pause(0)
        if world.chance(faults.cut) and self.cut_until < world.now():
            self.cut_until = world.now() + world.dice.uniform(0.5, 25)
            world.note(f"{self.name} is cut off until {self.cut_until:.3f}")
        if self.cut_until > world.now():
            if self.silent_since is None:
                self.silent_since = world.now()
            await self.pause(0.5)
            raise TransportError("cut off")
        self._be_heard()
        if world.chance(faults.stall):
            # The process stands still, its leases run out, and then it does what it was about to.
            self.silent_since = world.now()
            world.note(f"{self.name} stands still")
            await self.pause(world.dice.uniform(5, 40))
            self._be_heard()
        if world.chance(faults.lose_request):
            await self.pause(0.5)
            raise TransportError("request lost")
        answer = effect()
        if world.chance(faults.lose_answer):
            await self.pause(0.5)
            raise TransportError("answer lost")
        await self.pause(world.dice.expovariate(1 / 0.002))
        return answer

    def _be_heard(self) -> None:
        world = self.world
        for key in [k for k, (_, lease) in world.keys.items() if lease and lease.node is self]:
            # Too late for leases that ran out meanwhile.
            world.living(key)
        self.silent_since = None


class SimLog:
    def __init__(self, node: Node) -> None:
        self.node = node
        self._seen = ""

    async def ensure(self) -> None:
        await self.node.call(lambda: None)

    async def state(self) -> LogState:
        world = self.node.world

        def look() -> LogState:
            world.expire()
            self._seen = world.incarnation
            return LogState(world.incarnation, world.first, world.last)

        return await self.node.call(look)

    async def append(self, headers: Mapping[str, str], payload: bytes, *, key: str) -> int:
        world = self.node.world

        def store() -> int:
            if key not in world.keys_seen:
                world.last += 1
                world.keys_seen[key] = world.last
                message = Message(world.last, dict(headers), payload)
                world.messages[world.last] = message
                world.stored_s[world.last] = world.now()
                world.history.append(message)
            return world.keys_seen[key]

        return await self.node.call(store)

    async def open_reader(self, name: str, start: int) -> SimReader:
        world = self.node.world

        def make() -> None:
            world.readers[name] = StoredReader(start, start - 1)

        await self.node.call(make)
        return SimReader(self.node, name)

    async def floors(self) -> dict[str, int]:
        world = self.node.world
        return await self.node.call(lambda: {n: r.floor for n, r in world.readers.items()})

    async def drop_reader(self, name: str) -> None:
        await self.node.call(lambda: self.node.world.readers.pop(name, None))

    async def age_s(self, sequence: int) -> float | None:
        world = self.node.world

        def look() -> float | None:
            is_there = sequence in world.messages
            return world.now() - world.stored_s[sequence] if is_there else None

        return await self.node.call(look)

    async def purge(self, last: int) -> None:
        world = self.node.world

        def purge() -> None:
            # The one thing that no server fences: another log than the one that was looked at.
            world.blind_purges += self._seen != world.incarnation
            for sequence in range(world.first, min(last, world.last) + 1):
                world.messages.pop(sequence, None)
            world.first = max(world.first, min(last, world.last) + 1)
            world.note(f"{self.node.name} purges up to {last}")
            world.on_purge()

        await self.node.call(purge)


class SimReader:
    def __init__(self, node: Node, name: str) -> None:
        self.node, self.name = node, name

    def _stored(self) -> StoredReader:
        stored = self.node.world.readers.get(self.name)
        if stored is None:
            raise TransportError(f"reader {self.name} is gone")
        return stored

    async def fetch(self, timeout_s: float) -> Sequence[Message]:
        world = self.node.world
        faults = world.faults

        def take() -> list[Message]:
            stored = self._stored()
            world.expire()
            stored.position = max(stored.position, world.first)
            end = min(world.last, stored.position + world.dice.randint(0, 20))
            wanted = range(stored.position, end + 1)
            taken = [world.messages[at] for at in wanted if at in world.messages]
            stored.position = end + 1
            return taken

        taken = await self.node.call(take)
        if not taken:
            await self.node.pause(timeout_s)
            return []
        arrived: list[Message] = []
        for message in taken:
            if world.chance(faults.lose_delivery):
                continue
            arrived.append(message)
            if world.chance(faults.repeat_delivery):
                arrived.append(message)
        if world.chance(faults.reorder_delivery):
            world.dice.shuffle(arrived)
        return arrived

    async def ack(self, sequence: int) -> None:
        def acknowledge() -> None:
            stored = self._stored()
            stored.floor = max(stored.floor, sequence)

        await self.node.call(acknowledge)

    async def close(self) -> None:
        return


class SimBlobs:
    def __init__(self, node: Node) -> None:
        self.node = node

    async def ensure(self) -> None:
        await self.node.call(lambda: None)

    async def put(self, name: str, chunks: Iterable[bytes]) -> str:
        digest = hashlib.sha256()
        stored: list[bytes] = []
        for chunk in chunks:
            # Each chunk is a call of its own: what is applied in between may be in the rest.
            await self.node.call(lambda chunk=chunk: stored.append(chunk))
            digest.update(chunk)
        await self.node.call(lambda: self.node.world.blobs.__setitem__(name, stored))
        return digest.hexdigest()

    async def read(self, name: str) -> AsyncIterator[bytes]:
        world = self.node.world
        chunks = await self.node.call(lambda: list(world.blobs.get(name, [])))
        if not chunks:
            raise NotFoundError(f"no blob {name}")
        for chunk in chunks:
            yield chunk
            if name not in world.blobs:
                raise NotFoundError(f"no blob {name}")

    async def has(self, name: str) -> bool:
        return await self.node.call(lambda: name in self.node.world.blobs)

    async def names(self) -> list[str]:
        return await self.node.call(lambda: sorted(self.node.world.blobs))

    async def delete(self, name: str) -> None:
        await self.node.call(lambda: self.node.world.blobs.pop(name, None))

    async def pointer(self) -> tuple[Pointer | None, int]:
        return await self.node.call(lambda: self.node.world.flipped)

    async def flip(self, pointer: Pointer, revision: int) -> bool:
        world = self.node.world

        def flip() -> bool:
            if world.flipped[1] != revision:
                return False
            world.flipped = (pointer, revision + 1)
            world.note(f"{self.node.name} flips to {pointer.sequence}")
            return True

        return await self.node.call(flip)


class SimKeys:
    """A discovery."""

    def __init__(self, node: Node) -> None:
        self.node = node

    async def lease(self, ttl_s: float = LEASE_S) -> Lease:
        return await self.node.call(lambda: Lease(self.node))

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        await self.node.call(lambda: self._set(key, value, lease))

    async def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        def create() -> bool:
            self.node.world.sweep()
            if key in self.node.world.keys:
                return False
            self._set(key, value, lease)
            return True

        return await self.node.call(create)

    async def delete(self, key: str) -> bool:
        return await self.node.call(lambda: self.node.world.keys.pop(key, None) is not None)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        def find() -> dict[str, bytes]:
            world = self.node.world
            world.sweep()
            return {k: value for k, (value, _) in world.keys.items() if k.startswith(prefix)}

        return await self.node.call(find)

    def _set(self, key: str, value: bytes, lease: Lease | None) -> None:
        if lease is not None and not lease.is_living:
            raise TransportError("the lease is gone")
        self.node.world.keys[key] = (value, lease)


def run_world(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run in virtual time; what is left at the end is dropped without a word."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work())
    finally:
        # The cleanup of a dead node waits for ever again, so it is cancelled repeatedly.
        while left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=1))
        loop.close()
