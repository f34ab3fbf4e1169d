"""Events over NATS Core, with repair from the workers' own indexes.

A worker publishes to its component's subject and answers queries; the server stores nothing. When a
router learns of a worker, it takes a dump of everything that the worker holds, then follows.
Missing batches are requested once, and given up if the worker no longer has them. If the worker
does not answer, a dump is taken as soon as it does.
"""

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import nats.errors

from kvflash._core import Catalog
from kvflash.background import cancel
from kvflash.errors import KvflashError, TransportError
from kvflash.nats_login import Client
from kvflash.servers import NatsSettings
from kvflash.transport.base import Order
from kvflash.transport.jetstream import reaching
from kvflash.transport.local_index import Answer, LocalIndex, join, question
from kvflash.transport.nats_connection import connect, message_bytes

logger = logging.getLogger(__name__)

PUBLISHER = "Kvflash-Publisher"
SEQUENCE = "Kvflash-Sequence"

#: Queries a worker, (instance id, dp rank), for batches start..=end, or for everything.
Ask = Callable[[int, int, int | None, int | None], Awaitable[Answer]]

_ASK_S_MAX = 5.0
_RETRY_S = 1.0
_WAITING_MESSAGES_MAX = 10_000

_COUNTS = (
    *("messages", "undecodable", "dumps", "ranges"),
    *("failed_questions", "lost_batches", "overflows"),
)


@dataclass
class _Worker:
    publisher: int
    instance_id: int
    dp_rank: int
    waiting: asyncio.Queue[tuple[int, int, bytes]]
    epoch: int | None = None
    is_known: bool = False
    has_overflowed: bool = False
    task: asyncio.Task[None] | None = None


class CoreFollower:
    """Follows workers with a local index: the protocol, without a network.

    It is bound to one event loop, and applies one worker's messages in order, one at a time.
    """

    def __init__(
        self, catalog: Catalog, ask: Ask, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._catalog, self._ask, self._sleep = catalog, ask, sleep
        self._workers: dict[tuple[int, int], _Worker] = {}
        self._of: dict[int, tuple[int, int]] = {}
        #: Counters of messages and queries.
        self.stats = dict.fromkeys(_COUNTS, 0)

    def join(self, publisher: int, instance_id: int, dp_rank: int) -> None:
        """Follow a newly registered worker: take its dump first."""
        self.leave(publisher)
        worker = _Worker(publisher, instance_id, dp_rank, asyncio.Queue(_WAITING_MESSAGES_MAX))
        self._workers[instance_id, dp_rank] = worker
        self._of[publisher] = (instance_id, dp_rank)
        worker.task = asyncio.get_running_loop().create_task(self._follow(worker))

    def leave(self, publisher: int) -> None:
        """Stop following an unregistered worker."""
        worker = self._workers.pop(self._of.pop(publisher, (-1, -1)), None)
        if worker is not None and worker.task is not None:
            worker.task.cancel()

    async def close(self) -> None:
        """Stop following all workers."""
        await cancel([w.task for w in self._workers.values() if w.task is not None])

    def heard(self, headers: dict[str, str] | None, payload: bytes) -> None:
        """Handle a message. From an unregistered worker it is dropped: its dump will include it."""
        self.stats["messages"] += 1
        try:
            instance_id, dp_rank, epoch = map(int, (headers or {})[PUBLISHER].split("/"))
            sequence = int((headers or {})[SEQUENCE])
            if not 0 <= sequence < 1 << 64:
                raise ValueError
        except (KeyError, ValueError):
            self.stats["undecodable"] += 1
            return
        worker = self._workers.get((instance_id, dp_rank))
        if worker is None:
            return
        try:
            worker.waiting.put_nowait((epoch, sequence, payload))
        except asyncio.QueueFull:
            # The dump that is taken instead contains all of them.
            self.stats["overflows"] += 1
            worker.has_overflowed = True
            while not worker.waiting.empty():
                worker.waiting.get_nowait()
            worker.waiting.put_nowait((epoch, sequence, payload))

    async def _follow(self, worker: _Worker) -> None:
        while True:
            try:
                while not worker.is_known:
                    if not await self._take_dump(worker):
                        await self._sleep(_RETRY_S)
                        continue
                    self._catalog.set_status(worker.publisher, "active")
                epoch, sequence, payload = await worker.waiting.get()
                if worker.has_overflowed:
                    worker.has_overflowed = worker.is_known = False
                    continue
                await self._take(worker, epoch, sequence, payload)
            except Exception:
                logger.exception("following worker %d failed; going on", worker.instance_id)
                # A dump contains all of it.
                worker.is_known = False
                await self._sleep(_RETRY_S)

    async def _take(self, worker: _Worker, epoch: int, sequence: int, payload: bytes) -> None:
        if worker.epoch is not None and epoch < worker.epoch:
            return
        if worker.epoch is not None and epoch > worker.epoch:
            self._catalog.restarted(worker.publisher)
        worker.epoch = epoch
        frame = [sequence.to_bytes(8, "big"), payload]
        gap = self._offer(worker, [frame])
        if gap is None:
            return
        # Asked once: batches missing from the answer will not come.
        if not await self._repair(worker, *gap):
            # The query may have been lost. A dump contains everything.
            worker.is_known = False
            return
        gap = self._offer(worker, [frame])
        if gap is not None:
            self.stats["lost_batches"] += gap[1] - gap[0] + 1
            self._catalog.give_up(worker.publisher, gap[1] + 1)
            self._offer(worker, [frame])

    def _offer(self, worker: _Worker, frames: list[list[bytes]]) -> tuple[int, int] | None:
        """Pass frames to the catalog; returns the gap before one of them, if any."""
        _, outcome, first, last = self._catalog.take(worker.publisher, frames, replayed=True)
        return (first, last) if outcome == "gap" else None

    async def _repair(self, worker: _Worker, first: int, last: int) -> bool:
        """Request missing batches; False without an answer."""
        answer = await self._ask_worker(worker, first, last)
        if answer is None:
            return False
        if answer.epoch != worker.epoch:
            # An answer of another epoch: that epoch's events will show it.
            return True
        if answer.kind == "events":
            self.stats["ranges"] += 1
            self._offer(worker, [[n.to_bytes(8, "big"), data] for n, data in answer.batches])
        elif answer.kind == "dump":
            self._restore(worker, answer)
        else:
            self.stats["failed_questions"] += 1
        return True

    async def _take_dump(self, worker: _Worker) -> bool:
        answer = await self._ask_worker(worker, None, None)
        if answer is None or answer.kind != "dump":
            return False
        self._restore(worker, answer)
        worker.epoch = answer.epoch
        worker.is_known = True
        return True

    def _restore(self, worker: _Worker, answer: Answer) -> None:
        self.stats["dumps"] += 1
        self._catalog.forget(worker.instance_id, worker.dp_rank)
        if answer.last is not None:
            # The dump includes the position, so that duplicates are dropped and gaps are seen.
            # Without a position it is empty: restoring it would make any next batch the position.
            self._catalog.restore(answer.data)

    async def _ask_worker(
        self, worker: _Worker, start: int | None, end: int | None
    ) -> Answer | None:
        try:
            return await self._ask(worker.instance_id, worker.dp_rank, start, end)
        except KvflashError as error:
            self.stats["failed_questions"] += 1
            message = f"its index does not answer: {error}"
            self._catalog.set_status(worker.publisher, "pending", message)
            return None


def nats_ask(client: Client, subject_of: Callable[[int, int], str]) -> Ask:
    """Make a function that queries workers over NATS, each at its ``subject_of``."""

    async def ask(instance_id: int, dp_rank: int, start: int | None, end: int | None) -> Answer:
        subject = subject_of(instance_id, dp_rank)
        inbox = client.new_inbox()
        parts: dict[int, dict[str, Any]] = {}
        async with reaching(f"worker {instance_id}"):
            subscription = await client.subscribe(inbox)
            try:
                await client.publish(subject, question(start, end), reply=inbox)
                while True:
                    message = await subscription.next_msg(timeout=_ASK_S_MAX)
                    if not message.data:
                        raise TransportError(f"no answer at {subject}")
                    part = msgpack.unpackb(message.data)
                    parts[int(part["part"])] = part
                    if len(parts) == int(part["parts"]):
                        return join(list(parts.values()))
            except (ValueError, KeyError, TypeError) as error:
                raise TransportError(
                    f"worker {instance_id} sent an invalid answer: {error!r}"
                ) from None
            finally:
                with contextlib.suppress(nats.errors.Error, OSError):
                    await subscription.unsubscribe()

    return ask


class _Looped(ABC):
    """A thread with an event loop and a connection."""

    def __init__(self, settings: NatsSettings | None, name: str) -> None:
        self._settings = settings or NatsSettings.from_env()
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._ready: Future[None] = Future()
        self._end: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Connect, and run in the background.

        Raises:
            TransportError: NATS does not answer; the message says what to start.
        """
        self._thread.start()
        self._ready.result()

    def stop(self) -> None:
        """Stop; blocks until done."""
        if self._thread.is_alive() and self._end is not None:
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                logger.exception("%s failed", self._name)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        client = await connect(self._settings, name=self._name)
        try:
            async with reaching(self._name):
                await self._opened(client)
                await client.flush()
            self._ready.set_result(None)
            await self._end.wait()
            await self._closing(client)
        finally:
            await client.close()

    @abstractmethod
    async def _opened(self, client: Client) -> None:
        """Subscribe."""

    @abstractmethod
    async def _closing(self, client: Client) -> None:
        """Stop what was started; the connection is closed afterwards."""


class NatsCorePublisher(_Looped):
    """The worker's side: publishes batches and answers queries about its index."""

    def __init__(
        self,
        subject: str,
        query_subject: str,
        index: LocalIndex,
        *,
        headers: Callable[[int], dict[str, str]],
        settings: NatsSettings | None = None,
    ) -> None:
        super().__init__(settings, "kvflash-core-publisher")
        self._subject, self._query_subject = subject, query_subject
        self._index, self._headers = index, headers
        self._client: Client | None = None
        self.counts: dict[str, int] = {}

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Nothing is stored, so there is nothing to wait for."""
        return True

    def close(self) -> None:
        """Stop; blocks until done."""
        self.stop()

    def put(self, sequence: int, payload: bytes) -> None:
        """Publish a batch; returns at once. Call in the order of the numbers, from any thread."""
        # Into the index first: a reader that misses the message can query it.
        self._index.record(sequence, payload)
        asyncio.run_coroutine_threadsafe(self._publish(sequence, payload), self._loop)

    async def _opened(self, client: Client) -> None:
        """Start answering."""
        self._client = client

        async def respond(message: Any) -> None:
            for part in self._index.respond(message.data):
                await message.respond(part)

        await client.subscribe(self._query_subject, cb=respond)

    async def _closing(self, client: Client) -> None:
        """Send queued batches."""
        with contextlib.suppress(nats.errors.Error, OSError):
            await client.flush()

    async def _publish(self, sequence: int, payload: bytes) -> None:
        headers, client = self._headers(sequence), self._client
        # A message above the limit would end the connection. Routers see the gap, as they do for
        # messages lost while the server is down, and take a dump.
        if client is not None and message_bytes(headers, payload) <= client.max_payload:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.publish(self._subject, payload, headers=headers)


class NatsCoreReceiver(_Looped):
    """The router's side: a :class:`Receiver` of endpoints ``nats://SUBJECT/INSTANCE/RANK``.

    ``subject`` is that of the component's events, ``subject_of`` makes the subject of queries.
    """

    def __init__(
        self,
        catalog: Catalog,
        subject: str,
        subject_of: Callable[[int, int], str],
        settings: NatsSettings | None = None,
    ) -> None:
        super().__init__(settings, "kvflash-core-receiver")
        self._catalog, self._subject, self._subject_of = catalog, subject, subject_of
        self._follower: CoreFollower | None = None

    @property
    def stats(self) -> dict[str, int]:
        """Counters."""
        return {} if self._follower is None else dict(self._follower.stats)

    def obey(self, order: Order) -> None:
        """See :meth:`Receiver.obey`. Orders to hold or pause are for sockets and have no effect."""
        kind, publisher, endpoint, _ = order
        if kind in ("subscribe", "hold"):
            self._loop.call_soon_threadsafe(self._join, publisher, endpoint)
        elif kind == "unsubscribe":
            self._loop.call_soon_threadsafe(self._leave, publisher)

    async def _opened(self, client: Client) -> None:
        """Start receiving."""
        follower = CoreFollower(self._catalog, nats_ask(client, self._subject_of))
        self._follower = follower

        async def hear(message: Any) -> None:
            follower.heard(message.headers, message.data)

        await client.subscribe(self._subject, cb=hear)

    async def _closing(self, client: Client) -> None:
        """Stop following all workers."""
        if self._follower is not None:
            await self._follower.close()

    def _join(self, publisher: int, endpoint: str) -> None:
        parts = endpoint.rsplit("/", 2)
        if self._follower is None or len(parts) != 3 or not all(map(str.isdigit, parts[1:])):
            message = f"endpoint must be nats://subject/instance/rank, got {endpoint!r}"
            self._catalog.set_status(publisher, "failed", message)
            return
        self._follower.join(publisher, int(parts[1]), int(parts[2]))

    def _leave(self, publisher: int) -> None:
        if self._follower is not None:
            self._follower.leave(publisher)
