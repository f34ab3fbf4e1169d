"""Snapshot and purge: no message leaves the log before a valid snapshot contains it.

Steps of a snapshot; stopping after any of them is harmless:

1. lock, so that replicas do not do it twice;
2. S = the log's last message; wait until this replica has applied it;
3. upload the snapshot under a unique name;
4. read it back and compare;
5. flip the pointer, unless it has changed meanwhile: this is the fence, whatever the lock says;
6. purge the log up to the lowest of S and the floors of all live routers;
7. delete other snapshots;
8. unlock.

If the router dies before 5, the old pointer is valid and the log still has everything since. After
5, messages that are both in the snapshot and in the log are applied twice, which changes nothing.

A purge does not identify the log: if a router stalls between looking and purging while the log is
deleted and recreated, it purges the new log. Replicas that start later count these messages as
lost.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvflash.discovery import Lease
from kvflash.errors import NotFoundError, TransportError
from kvflash.outage import Outage
from kvflash.state.discovered import DiscoveredLock
from kvflash.state.frames import reset_headers
from kvflash.state.replica import Replica
from kvflash.transport.base import LogState, Pointer

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_APPLY_S_MAX = 30.0
# Share of the log's own limits above which it is full: at 1 it drops what no snapshot has.
_FILL_MAX = 0.5
# Attempts of a reset to get the lock, and then to move the pointer, with the pause between them.
_RESET_ATTEMPTS, _RESET_PAUSE_S = 300, 0.1


class Outcome(Enum):
    """Outcome of an attempt."""

    DONE = "done"
    HELD = "held by another"
    BEHIND = "not applied in time"
    FENCED = "another one was faster"
    INCOMPLETE = (
        "this replica is incomplete, so others take them: the log says above which messages or "
        "parts of a snapshot it refused"
    )
    EMPTY = "nothing new"


@dataclass
class SnapshotStats:
    """Counters: flipped pointers, messages deleted from the log, readers of dead routers."""

    snapshots_total: int = 0
    purged_messages_total: int = 0
    orphans_total: int = 0


class Snapshots:
    """Takes snapshots of a replica, purges its log, and deletes the readers of dead routers.

    One is taken above ``threshold_messages`` in the log or half of the log's own limits, if the
    oldest message that no snapshot has is older than ``age_s_max`` (None: not for that reason) or
    a quarter of what the log keeps, and at once if the current one is gone or does not reach up to
    the log; none is taken unless ``is_complete`` says that the sink accepted everything.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        lock: DiscoveredLock,
        threshold_messages: int | None,
        age_s_max: float | None,
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stats = SnapshotStats()
        #: Why the last check failed; empty if it did not.
        self.failure = ""
        self._said: Outcome | None = None
        self._replica, self._name = replica, replica.name
        self._log, self._blobs, self._roster = replica.log, replica.blobs, replica.roster
        self._sink, self._lock = replica.sink, lock
        self._threshold_messages, self._age_s_max = threshold_messages, age_s_max
        self._is_complete = is_complete

    async def run(self) -> None:
        """Check once a second until cancelled; unreachable servers are retried."""
        await self._replica.wait_caught_up()
        outage = Outage(logger, f"snapshots of {self._name}: checks succeed again")
        while True:
            try:
                if self.failure:
                    # A bucket may have been deleted.
                    await self._blobs.ensure()
                await self.tick()
                self.failure = ""
                outage.ends()
            except Exception as error:
                self.failure = str(error) or repr(error)
                outage.fails(f"snapshots of {self._name}: {self.failure}; trying again", error)
            await asyncio.sleep(_TICK_S)

    async def tick(self) -> None:
        """Do what is due now."""
        await self._look_at_routers()
        state = await self._log.state()
        if await self._is_due(state):
            outcome = await self.take()
            # What keeps it from taking any does so at every check.
            if outcome is Outcome.DONE or outcome is not self._said:
                logger.info("snapshots of %s: %s", self._name, outcome.value)
            self._said = outcome
        elif self._is_full(state):
            # A reader that was behind at the last snapshot may have caught up.
            await self._purge()

    async def take(self) -> Outcome:
        """Take a snapshot now, unless another router is taking one; an error loses no data."""
        async with self._lock.hold() as grant:
            if grant is None:
                return Outcome.HELD
            logger.debug("state of %s: locked", self._name)
            outcome = await self._take(grant)
        logger.debug("state of %s: unlocked", self._name)
        return outcome

    async def reset(self) -> None:
        """Discard everything, here and at all replicas, which read of it in the log, in order.

        Raises TransportError if a server can't be reached, or if after 300 attempts the lock is
        still held, or others still move the pointer.
        """
        await self._log.ensure()
        await self._blobs.ensure()
        for _ in range(_RESET_ATTEMPTS):
            async with self._lock.hold() as grant:
                if grant is not None:
                    return await self._reset()
            await asyncio.sleep(_RESET_PAUSE_S)
        raise TransportError(
            f"--router-reset-states: the snapshot lock was held at {_RESET_ATTEMPTS} attempts"
        )

    async def _reset(self) -> None:
        incarnation, sequence = await self._tell_reset()
        logger.debug("state of %s: reset-told", self._name)
        for _ in range(_RESET_ATTEMPTS):
            pointer, revision = await self._blobs.pointer()
            token = pointer.token + 1 if pointer else 1
            if pointer is not None and pointer.covers(incarnation) >= sequence:
                # Another router has already seen the reset, and taken a snapshot since.
                break
            empty = Pointer(sequence, incarnation, None, token=token, taken_s=time.time())
            if await self._blobs.flip(empty, revision):
                break
            await asyncio.sleep(_RESET_PAUSE_S)
        else:
            raise TransportError(
                f"--router-reset-states: the pointer changed at {_RESET_ATTEMPTS} attempts"
            )
        logger.debug("state of %s: reset-flipped", self._name)
        if (await self._log.state()).incarnation == incarnation:
            await self._log.purge(sequence - 1)
        logger.debug("state of %s: reset-purged", self._name)
        await self._delete_others()

    async def _tell_reset(self) -> tuple[str, int]:
        """Write the reset marker; returns its log and position."""
        while True:
            before = (await self._log.state()).incarnation
            key = f"reset-{secrets.token_hex(8)}"
            sequence = await self._log.append(reset_headers(), b"", key=key)
            if (await self._log.state()).incarnation == before:
                return before, sequence
            # Deleted and recreated meanwhile: the number may belong to either log.

    async def _look_at_routers(self) -> None:
        """Delete readers of dead routers, and list this one again after a lost lease."""
        # Readers first: their routers were listed before.
        readers = await self._log.floors()
        members = await self._roster.members()
        if self._name not in members:
            # Others may have purged messages meanwhile, which the replica detects.
            await self._roster.join(self._name)
        for name in sorted(set(readers) - members - {self._name}):
            await self._log.drop_reader(name)
            self.stats.orphans_total += 1
            logger.info("router %s is gone; its reader is deleted", name)

    async def _is_due(self, state: LogState) -> bool:
        pointer, _ = await self._blobs.pointer()
        covered = pointer.covers(state.incarnation) if pointer else 0
        if self._replica.is_rolled_back or self._replica.lost_until <= covered < state.first - 1:
            # Only routers that have applied messages that are gone can save them for others.
            return True
        if pointer is not None and pointer.blob:
            is_lost = pointer.blob == self._replica.lost_blob
            if is_lost or not await self._blobs.has(pointer.blob):
                return True
        fresh = state.last - max(covered, state.first - 1)
        if fresh <= 0:
            return False
        enough = min(self._threshold_messages or state.messages, state.messages)
        if self._is_full(state) and state.last - covered > enough // 4:
            return True
        if self._age_s_max is None:
            return False
        age_s = await self._log.age_s(max(covered + 1, state.first))
        # A deleted message has no age: a snapshot moves past it.
        return age_s is None or age_s > min(self._age_s_max, state.max_age_s / 4)

    def _is_full(self, state: LogState) -> bool:
        threshold = self._threshold_messages
        is_above = threshold is not None and state.messages > threshold
        return is_above or state.fill > _FILL_MAX

    async def _take(self, grant: Lease) -> Outcome:
        replica = self._replica
        pointer, revision = await self._blobs.pointer()
        state = await self._log.state()
        is_covered = pointer is not None and pointer.covers(state.incarnation) >= state.last
        if is_covered and not await self._is_due(state):
            return Outcome.EMPTY
        if not await replica.wait_applied(state.last, state.incarnation, _APPLY_S_MAX):
            return Outcome.BEHIND
        if not (replica.stats.is_complete and self._is_complete()):
            # Its snapshot would lack for all replicas what it lacks itself.
            return Outcome.INCOMPLETE
        logger.debug("state of %s: caught-up", self._name)
        # Later changes may or may not be in the snapshot; earlier ones are.
        covered, generation = replica.stats.applied, replica.generation
        token = pointer.token + 1 if pointer else 1
        name = f"radix-state-{covered:020d}-{token}-{secrets.token_hex(4)}"
        digest = await self._blobs.put(name, self._sink.snapshot())
        logger.debug("state of %s: uploaded", self._name)
        read = hashlib.sha256()
        try:
            async for chunk in self._blobs.read(name):
                read.update(chunk)
        except NotFoundError:
            # Deleted by a router with a snapshot that covers more.
            return Outcome.FENCED
        if read.hexdigest() != digest:
            raise TransportError(f"snapshot {name} does not read as it was written")
        logger.debug("state of %s: verified", self._name)
        if replica.generation != generation or replica.incarnation != state.incarnation:
            # The state was replaced while this one was being read.
            await self._blobs.delete(name)
            return Outcome.BEHIND
        if grant.lost.is_set():
            await self._blobs.delete(name)
            return Outcome.FENCED
        fresh = Pointer(covered, state.incarnation, name, digest, token=token, taken_s=time.time())
        if not await self._blobs.flip(fresh, revision):
            current, _ = await self._blobs.pointer()
            if current is None or current.blob != name:
                await self._blobs.delete(name)
                return Outcome.FENCED
        if replica.generation == generation:
            replica.is_rolled_back = False
        self.stats.snapshots_total += 1
        logger.debug("state of %s: flipped", self._name)
        await self._purge()
        logger.debug("state of %s: purged", self._name)
        await self._delete_others()
        logger.debug("state of %s: swept", self._name)
        return Outcome.DONE

    async def _purge(self) -> None:
        """Purge what the pointer covers and all live routers have applied."""
        pointer, _ = await self._blobs.pointer()
        if pointer is None:
            return
        # After the flip: a router that is not listed yet will read this pointer or a later one.
        members = await self._roster.members()
        floors = await self._log.floors()
        # Listed without a floor: it is starting, from an unknown pointer.
        last = min([pointer.sequence, *(floors.get(name, 0) for name in members)])
        state = await self._log.state()
        if state.incarnation != pointer.incarnation or last < state.first:
            return
        logger.debug("state of %s: purging", self._name)
        await self._log.purge(last)
        self.stats.purged_messages_total += last - state.first + 1

    async def _delete_others(self) -> None:
        """Delete older snapshots than the pointer's, which can't become current any more."""
        pointer, _ = await self._blobs.pointer()
        if pointer is None:
            return
        for name in await self._blobs.names():
            # Names sort by the message they cover. One above the pointer's may be in progress.
            is_older = name < f"radix-state-{pointer.sequence:020d}"
            if name != pointer.blob and name.startswith("radix-state-") and is_older:
                await self._blobs.delete(name)
