"""Events over NATS Core, with repair from the workers' own indexes.

A worker publishes to its component's subject and answers queries; the server stores nothing. A
router takes a dump of all that a worker holds, then follows. Missing batches are requested once,
and given up if the worker no longer has them; if it does not answer, a dump is taken once it does.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import nats.errors

from kvflash._core import Catalog
from kvflash.background import Background, cancel
from kvflash.errors import DecodeError, KvflashError, TransportError
from kvflash.nats_login import Client, reaching
from kvflash.outage import Outage
from kvflash.servers import NatsSettings
from kvflash.transport import names
from kvflash.transport.base import Order, frame, take_batches
from kvflash.transport.local_index import Answer, LocalIndex, join, question
from kvflash.transport.nats_connection import connect, message_bytes
from kvflash.transport.origin import Origin, parse_headers

logger = logging.getLogger(__name__)

#: Queries a worker, (instance id, dp rank), for batches start..=end, or for everything.
Ask = Callable[[int, int, int | None, int | None], Awaitable[Answer]]

_ASK_S_MAX = 5.0
_RETRY_S = 1.0
_RECONNECT_S = 2.0
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

    def __init__(self, catalog: Catalog, ask: Ask) -> None:
        self._catalog, self._ask = catalog, ask
        self._workers: dict[tuple[int, int], _Worker] = {}
        #: Counters of messages and queries.
        self.stats = dict.fromkeys(_COUNTS, 0)

    def join(self, publisher: int, instance_id: int, dp_rank: int) -> None:
        """Follow a newly registered worker: take its dump first."""
        self.leave(publisher)
        worker = _Worker(publisher, instance_id, dp_rank, asyncio.Queue(_WAITING_MESSAGES_MAX))
        self._workers[instance_id, dp_rank] = worker
        worker.task = asyncio.get_running_loop().create_task(self._follow(worker))

    def leave(self, publisher: int) -> None:
        for key, worker in list(self._workers.items()):
            if worker.publisher == publisher and worker.task is not None:
                worker.task.cancel()
                del self._workers[key]

    def report(self, reason: str) -> None:
        """Show in the catalog why no events arrive."""
        for worker in self._workers.values():
            self._catalog.set_status(worker.publisher, "pending", reason)

    async def close(self) -> None:
        await cancel([w.task for w in self._workers.values() if w.task is not None])

    def heard(self, headers: dict[str, str] | None, payload: bytes) -> None:
        """Handle a message. From an unregistered worker it is dropped: its dump will include it."""
        self.stats["messages"] += 1
        try:
            origin, sequence = parse_headers(headers or {})
        except DecodeError:
            self.stats["undecodable"] += 1
            return
        worker = self._workers.get(origin.worker)
        if worker is None:
            return
        if worker.waiting.full():
            # The dump that is taken instead contains all of them.
            self.stats["overflows"] += 1
            worker.has_overflowed = True
            while not worker.waiting.empty():
                worker.waiting.get_nowait()
        worker.waiting.put_nowait((origin.epoch, sequence, payload))

    async def _follow(self, worker: _Worker) -> None:
        while True:
            try:
                while not worker.is_known:
                    if not await self._take_dump(worker):
                        await asyncio.sleep(_RETRY_S)
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
                await asyncio.sleep(_RETRY_S)

    async def _take(self, worker: _Worker, epoch: int, sequence: int, payload: bytes) -> None:
        if worker.epoch is not None and epoch < worker.epoch:
            return
        if worker.epoch is not None and epoch > worker.epoch:
            self._catalog.restarted(worker.publisher)
        worker.epoch = epoch
        batch = frame(sequence, payload)
        _, outcome, first, last = self._catalog.take(worker.publisher, [batch], replayed=True)
        if outcome != "gap":
            return
        # Asked once: batches missing from the answer will not come.
        if not await self._repair(worker, first, last):
            # The query may have been lost. A dump contains everything.
            worker.is_known = False
            return
        self._apply(worker, [batch])

    def _apply(self, worker: _Worker, frames: list[list[bytes]]) -> None:
        self.stats["lost_batches"] += take_batches(self._catalog, worker.publisher, frames)

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
            # The worker may have lost some in between as well.
            self._apply(worker, [frame(number, data) for number, data in answer.batches])
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


async def ask_worker(client: Client, subject: str, start: int | None, end: int | None) -> Answer:
    """Query the worker that answers at ``subject``; TransportError without a valid answer."""
    inbox = client.new_inbox()
    parts: dict[int, dict[str, Any]] = {}
    async with reaching(subject):
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
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise TransportError(f"the answer at {subject} is invalid: {error!r}") from None
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()


class NatsCorePublisher:
    """The worker's side: publishes batches and answers queries about its index."""

    def __init__(self, client: Client, subject: str, index: LocalIndex) -> None:
        self._client, self._subject, self._index = client, subject, index
        self._query_subject = names.query_subject(subject, *index.origin.worker)

    async def ensure(self) -> None:
        """Answer queries from now on."""

        async def respond(message: Any) -> None:
            for part in self._index.respond(message.data):
                await message.respond(part)

        async with reaching(f"subject {self._query_subject}"):
            await self._client.subscribe(self._query_subject, cb=respond)

    async def send(self, origin: Origin, sequence: int, payload: bytes) -> None:
        """Publish a batch. Call in the order of the numbers."""
        if self._index.origin != origin:
            # The engine has restarted.
            self._index = LocalIndex(origin)
        # Into the index first: a reader that misses the message can query it.
        self._index.record(sequence, payload)
        headers = origin.headers(sequence)
        # A message above the limit would end the connection. Routers see the gap, as they do for
        # messages lost while the server is down, and take a dump.
        if message_bytes(headers, payload) <= self._client.max_payload:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.publish(self._subject, payload, headers=headers)


class NatsCoreReceiver(Background):
    """The router's side: receives from endpoints ``nats://SUBJECT/INSTANCE/RANK``.

    ``subject`` is that of the component's events. It keeps trying to connect; until then queries to
    workers wait.
    """

    def __init__(
        self, catalog: Catalog, subject: str, settings: NatsSettings | None = None
    ) -> None:
        self._subject = subject
        self._settings = settings or NatsSettings.from_env()
        self._follower = CoreFollower(catalog, self._ask)
        #: Counters of messages and queries.
        self.stats = self._follower.stats
        self._client: Client
        self._is_connected = asyncio.Event()
        super().__init__("kvflash-core-receiver", self._serve, is_cancelled=False)

    def obey(self, order: Order) -> None:
        """Orders to hold or pause are for sockets and have no effect."""
        kind, publisher, endpoint, _ = order
        if kind in ("subscribe", "hold"):
            place = names.parse_endpoint(endpoint)
            assert place is not None, "its subject has been read from it"
            self.call_soon(partial(self._follower.join, publisher, *place[1:]))
        elif kind == "unsubscribe":
            self.call_soon(partial(self._follower.leave, publisher))

    async def _ask(
        self, instance_id: int, dp_rank: int, start: int | None, end: int | None
    ) -> Answer:
        await self._is_connected.wait()
        subject = names.query_subject(self._subject, instance_id, dp_rank)
        return await ask_worker(self._client, subject, start, end)

    async def _serve(self) -> None:
        async def hear(message: Any) -> None:
            self._follower.heard(message.headers, message.data)

        client = None
        outage = Outage(logger, f"events of {self._subject}: NATS answers")
        while client is None and not self.ending.is_set():
            try:
                client = self._client = await connect(self._settings, name="kvflash-core-receiver")
            except KvflashError as error:
                outage.lasts(f"events of {self._subject}: {error}; trying again")
                self._follower.report(str(error))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), _RECONNECT_S)
        if client is not None:
            outage.ends()
            # Before the first query on this connection, so that nothing is missed after a dump.
            await client.subscribe(self._subject, cb=hear)
            self._is_connected.set()
            await self.ending.wait()
        await self._follower.close()
        if client is not None:
            await client.close()
