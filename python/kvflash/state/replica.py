"""A replica of the index: restores the snapshot, follows the log, acknowledges what it applied."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvflash.errors import DecodeError, KvflashError, NotFoundError, TransportError
from kvflash.outage import Outage
from kvflash.state.discovered import DiscoveredRoster
from kvflash.state.frames import CatalogSink
from kvflash.transport.base import Message, Pointer
from kvflash.transport.jetstream import JetStreamLog, JetStreamReader
from kvflash.transport.jetstream_blobs import JetStreamBlobs

logger = logging.getLogger(__name__)

_FETCH_S = 1.0
_RETRY_S = 0.2
_RETRY_S_MAX = 5.0
# Unresponsive servers must not keep a process from ending.
_WITHDRAW_S_MAX = 2.0
# The snapshot that the pointer names does not exist: it has just been replaced, so look again.
_RESTORE_ATTEMPTS = 10
# Attempts, within half a minute, after which a snapshot that no router has replaced is lost.
_UNREADABLE_MAX = 10


@dataclass
class ReplicaStats:
    """Counters of a replica."""

    # Number of the last message applied.
    applied: int = 0
    restores_total: int = 0
    reopened_total: int = 0
    # Messages deleted before any snapshot contained them.
    lost_messages_total: int = 0
    # Failed attempts to reach a server.
    errors_total: int = 0
    # Whether the last snapshot was restored completely.
    is_complete: bool = True


class Replica:
    """Follows a component's log.

    Order of the start: join the roster, read the pointer, open the reader. A router that purges
    after a flip therefore either sees this replica listed without a floor and waits, or knows that
    it has read the new pointer.

    Its name, which is that of its reader, is unique per start.
    """

    def __init__(
        self,
        name: str,
        *,
        log: JetStreamLog,
        blobs: JetStreamBlobs,
        roster: DiscoveredRoster,
        sink: CatalogSink,
    ) -> None:
        self.name = name
        self.stats = ReplicaStats()
        self.log, self.blobs, self.roster, self.sink = log, blobs, roster, sink
        self._reader: JetStreamReader | None = None
        #: The log that it follows.
        self.incarnation = ""
        # The next message has not arrived.
        self._is_missing = False
        # Headers of the last message applied; None after a restore.
        self._newest: Mapping[str, str] | None = None
        # The log has another message under that number.
        self._is_forked = False
        #: The log gives numbers again that a snapshot may cover already.
        self.is_rolled_back = False
        #: The last message that was gone before this replica had it.
        self.lost_until = 0
        #: The snapshot that this replica has given up reading.
        self.lost_blob: str | None = ""
        # A snapshot that can't be read, and how often that was tried.
        self._unreadable, self._unreadable_times = "", 0
        #: Incremented whenever a snapshot replaces the state, or the log has lost its end.
        self.generation = 0
        self._moved = asyncio.Event()
        self._is_caught_up = asyncio.Event()
        self._outage = Outage(logger, f"state of {name}: the log is followed again")
        self._pause_s = _RETRY_S

    async def run(self) -> None:
        """Follow until cancelled; unreachable servers are retried."""
        while True:
            try:
                await self._follow()
                await asyncio.sleep(_RETRY_S)
            except Exception as error:
                self.stats.errors_total += 1
                # Continue also after an unexpected exception: an index that never changes again
                # would be worse.
                reason = str(error) or repr(error)
                self._outage.fails(f"state of {self.name}: {reason}; trying again", error)
                await self._close_reader()
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _RETRY_S_MAX)

    def _works(self) -> None:
        """The log was read: the next failure is a new outage."""
        self._outage.ends()
        self._pause_s = _RETRY_S

    async def stop(self) -> None:
        """Leave without a floor or a name. Call it after the task of :meth:`run` has ended."""
        try:
            await asyncio.wait_for(self._withdraw(), _WITHDRAW_S_MAX)
        except (KvflashError, asyncio.TimeoutError) as error:
            # The other routers notice when the lease ends. A TimeoutError has no text.
            reason = str(error) or f"no answer within {_WITHDRAW_S_MAX:g} s"
            logger.warning("state of %s: can't withdraw: %s", self.name, reason)

    async def _withdraw(self) -> None:
        await self._close_reader()
        await self.log.drop_reader(self.name)
        await self.roster.leave()

    async def wait_applied(self, sequence: int, incarnation: str, timeout_s: float) -> bool:
        """Wait until message ``sequence`` is applied; False after the timeout or in another log."""

        async def wait() -> None:
            while self.stats.applied < sequence and self.incarnation == incarnation:
                self._moved.clear()
                await self._moved.wait()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return self.incarnation == incarnation

    async def wait_caught_up(self) -> None:
        """Wait until it has applied the log's initial content."""
        await self._is_caught_up.wait()

    async def _follow(self) -> None:
        """Open, and continue until messages are missing or an error occurs."""
        await self.log.ensure()
        await self.blobs.ensure()
        await self.roster.join(self.name)
        logger.debug("state of %s: listed", self.name)
        await self._open()
        target = (await self.log.state()).last
        was_behind = False
        while True:
            reader = self._reader
            if reader is None:
                return
            if self.stats.applied >= target:
                self._is_caught_up.set()
            messages = await reader.fetch(_FETCH_S)
            if not messages:
                is_behind = await self._look_after()
                if not (is_behind and was_behind):
                    was_behind = is_behind
                    self._works()
                    continue
            was_behind = False
            if not messages or not await self._take(messages):
                # Deliveries or messages are missing; open() finds out which.
                self._is_missing = True
                self.stats.reopened_total += 1
                return
            logger.debug("state of %s: applied", self.name)
            await reader.ack(self.stats.applied)
            logger.debug("state of %s: acknowledged", self.name)
            self._works()

    async def _take(self, messages: Sequence[Message]) -> bool:
        """Apply the next messages. False if one is missing."""
        applied = self.stats.applied
        fresh: list[Message] = []
        for message in messages:
            if message.sequence == self.stats.applied:
                if self._newest is not None and message.headers != self._newest:
                    self._is_forked = True
                    raise TransportError(f"message {applied} of the log is not the one applied")
            elif message.sequence == applied + 1:
                fresh.append(message)
                applied += 1
            elif message.sequence > applied:
                break
        if fresh:
            # In a thread, so that the connection stays served meanwhile.
            await asyncio.to_thread(self.sink.apply, fresh)
            self.stats.applied, self._newest = applied, fresh[-1].headers
            self._moved.set()
        return not any(message.sequence > applied for message in messages)

    async def _look_after(self) -> bool:
        """While no messages arrive: check whether the log is still the same, and has no more.

        The reader may have lost its requests for them.
        """
        state, applied = await self.log.state(), self.stats.applied
        is_known = state.first <= applied + 1 and applied <= state.last
        if state.incarnation != self.incarnation or not is_known:
            raise TransportError(f"log {state.incarnation} is not the one that was followed")
        return state.last > applied

    async def _open(self) -> None:
        """Align the applied state with the log, then read on from there."""
        await self._close_reader()
        for _ in range(_RESTORE_ATTEMPTS):
            state = await self.log.state()
            pointer, _ = await self.blobs.pointer()
            if pointer is not None and self._is_given_up(pointer.blob):
                pointer = None
            is_same = state.incarnation == self.incarnation
            if not is_same:
                self.lost_until, self._newest, self._is_forked = 0, None, False
            applied = self.stats.applied if is_same else 0
            covered = pointer.covers(state.incarnation) if pointer is not None else 0
            # The pointer is newer than this look at the log, so it may cover more: look again.
            last = state.last if covered <= state.last else (await self.log.state()).last
            if self._is_forked or max(applied, covered) > last:
                # Power loss or an old backup. The numbers do not say which messages are known, but
                # applying one again changes nothing.
                logger.error(
                    "state of %s: the log has lost its newest messages, and ends at message %d; "
                    "applying it again from message %d on",
                    *(self.name, last, state.first),
                )
                self.is_rolled_back = True
                # A snapshot that is being taken claims numbers that are given again.
                self.generation += 1
                # Messages before the log's first one may be in the snapshot alone.
                applied, covered = min(applied, state.first - 1), min(covered, state.first - 1)
            is_behind = state.first > applied + 1 or not self.incarnation
            if pointer is not None and is_behind and (covered > applied or not self.incarnation):
                if not await self._restore(pointer):
                    continue
                applied = max(covered, applied)
            self.incarnation, self._is_forked = state.incarnation, False
            found = max(state.first, applied + 1)
            if found == applied + 1 and self._is_missing:
                found = await self._find(found, state.last)
                after = await self.log.state()
                if after.incarnation != state.incarnation or after.first > applied + 1:
                    # Purged meanwhile: a snapshot has them.
                    continue
            lost = found - 1 - applied
            if lost:
                # Deleted before a snapshot had them: expired, deleted by hand, lost in a crash of
                # the server, or purged by mistake.
                self.stats.lost_messages_total += lost
                logger.error("state of %s: %d messages are gone from the log", self.name, lost)
                applied += lost
                self.lost_until = applied
            if applied != self.stats.applied:
                self._newest = None
            self.stats.applied = applied
            self._moved.set()
            logger.debug("state of %s: restored", self.name)
            # From the last one applied on, if there is one: to see whether the log still has it.
            start = applied + (self._newest is None)
            self._reader = await self.log.open_reader(self.name, start)
            after = await self.log.state()
            if after.incarnation == state.incarnation and after.first <= applied + 1:
                self._is_missing = False
                return
            # Purged or recreated in between: look again.
            await self._close_reader()
        raise TransportError("the log is purged faster than snapshots can be restored")

    async def _find(self, sequence: int, last: int) -> int:
        """The first existing message from this one on; last + 1 if there is none."""
        while sequence <= last and await self.log.age_s(sequence) is None:
            sequence += 1
        return sequence

    async def _restore(self, pointer: Pointer) -> bool:
        """Restore a snapshot; False if another one has replaced it."""
        # A snapshot of this replica that is in progress is invalid from here on.
        self.generation += 1
        if pointer.blob is None:
            self.sink.clear()
            self.stats.is_complete = True
            return True
        try:
            chunks = [chunk async for chunk in self.blobs.read(pointer.blob)]
        except NotFoundError:
            current, _ = await self.blobs.pointer()
            if current is not None and current.blob == pointer.blob:
                self._cannot_read(pointer.blob)
                raise
            return False
        snapshot = b"".join(chunks)
        if hashlib.sha256(snapshot).hexdigest() != pointer.digest:
            self._cannot_read(pointer.blob)
            raise TransportError(f"snapshot {pointer.blob} is damaged: its digest differs")
        self._unreadable = ""
        try:
            reasons = await asyncio.to_thread(self.sink.restore, snapshot)
        except DecodeError as error:
            logger.error("state of %s: snapshot %s: %s", self.name, pointer.blob, error)
            self.stats.is_complete = False
            return True
        self.stats.is_complete = not reasons
        self.stats.restores_total += 1
        for reason in reasons:
            logger.error("state of %s: left out of the snapshot: %s", self.name, reason)
        return True

    def _cannot_read(self, blob: str) -> None:
        if blob != self._unreadable:
            self._unreadable, self._unreadable_times = blob, 0
        self._unreadable_times += 1

    def _is_given_up(self, blob: str | None) -> bool:
        """Whether a snapshot is lost, and to be done without."""
        if blob != self._unreadable or self._unreadable_times < _UNREADABLE_MAX:
            return False
        if blob != self.lost_blob:
            self.lost_blob = blob
            logger.error("state of %s: snapshot %s is lost; going on without it", self.name, blob)
        return True

    async def _close_reader(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            await reader.close()
