"""What a failing snapshot tells its owner."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvflash.errors import TransportError
from kvflash.state.replica import Replica
from kvflash.state.snapshot import Snapshots
from kvflash.transport.base import LogState


class Checks:
    """A replica whose checks fail or not, one after the other; the last one never ends."""

    def __init__(self, outcomes: list[Exception | None]) -> None:
        self.name = "dynamo.backend"
        self.log = self.roster = self.sink = None
        self.blobs = self
        self.outcomes = outcomes
        self.seen: list[str] = []
        self.ensured = 0
        self.snapshots: Snapshots | None = None

    async def wait_caught_up(self) -> None:
        pass

    async def ensure(self) -> None:
        self.ensured += 1

    async def check(self) -> None:
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome

    async def sleep(self, _seconds: float) -> None:
        assert self.snapshots is not None
        self.seen.append(self.snapshots.failure)
        if not self.outcomes:
            raise asyncio.CancelledError


def test_the_last_failure_is_known_until_a_check_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica: Any = Checks([TransportError("no space left"), None])
    lock: Any = None
    snapshots = Snapshots(replica, lock=lock, threshold_messages=None, age_s_max=None)
    replica.snapshots = snapshots
    monkeypatch.setattr(snapshots, "tick", replica.check)
    monkeypatch.setattr("kvflash.state.snapshot.asyncio.sleep", replica.sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(snapshots.run())
    assert replica.seen == ["no space left", ""]
    # What a failed check missed may have been deleted.
    assert replica.ensured == 1


class Parts:
    """What a replica of a log of ten messages reads, in place of the servers."""

    name, incarnation, generation, sink = "r", "i", 0, None
    is_rolled_back, lost_until, lost_blob = False, 0, ""

    def __init__(self) -> None:
        self.log = self.blobs = self.roster = self.stats = self
        self.applied, self.is_complete, self.locked = 10, False, 0

    async def wait_caught_up(self) -> None:
        pass

    async def wait_applied(self, *_: Any) -> bool:
        return True

    async def state(self) -> LogState:
        return LogState("i", 1, 10)

    async def ensure(self) -> None:
        pass

    async def floors(self) -> dict[str, int]:
        return {}

    async def members(self) -> set[str]:
        return {"r"}

    async def pointer(self) -> tuple[None, int]:
        return None, 0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[Any]:
        self.locked += 1
        yield self


def test_what_keeps_happening_at_each_check_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.state")
    parts: Any = Parts()
    snapshots = Snapshots(parts, lock=parts, threshold_messages=5, age_s_max=None)
    checks = 0

    async def sleep(_seconds: float) -> None:
        nonlocal checks
        checks += 1
        if checks == 100:

            def away(*_: Any) -> None:
                raise TransportError("NATS can't be reached")

            parts.members = away
        if checks == 200:
            del parts.members
        if checks == 202:
            raise asyncio.CancelledError

    monkeypatch.setattr("kvflash.state.snapshot.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(snapshots.run())
    assert parts.locked == 102
    incomplete, away, back = caplog.messages
    assert incomplete.startswith(
        "snapshots of r: this replica is incomplete, so others take them: "
    )
    assert away == "snapshots of r: NATS can't be reached; trying again"
    assert back.startswith("snapshots of r: checks succeed again after at least ")


def test_a_replica_logs_an_outage_once_and_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.state")
    pauses: list[float] = []

    class Log:
        """Away, there for a read, and away again."""

        async def ensure(self) -> None:
            if len(pauses) != 20:
                raise TransportError("NATS can't be reached")

        async def state(self) -> LogState:
            return LogState("i", 1, 0)

        async def join(self, _name: str) -> None:
            pass

        async def pointer(self) -> tuple[None, int]:
            return None, 0

        async def open_reader(self, _name: str, _first: int) -> Any:
            return self

        async def fetch(self, _timeout_s: float) -> list[Any]:
            reads.append(None)
            if len(reads) > 1:
                raise TransportError("NATS can't be reached")
            return []

        async def close(self) -> None:
            pass

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 23:
            raise asyncio.CancelledError

    reads: list[None] = []
    log: Any = Log()
    replica = Replica("r", log=log, blobs=log, roster=log, sink=log)
    monkeypatch.setattr("kvflash.state.replica.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(replica.run())
    away = "state of r: NATS can't be reached; trying again"
    back = "state of r: the log is followed again after at least 0.0 s"
    assert caplog.messages == [away, back, away]
    # After a read the pauses begin anew.
    assert (pauses[19], pauses[20:]) == (5.0, [0.2, 0.4, 0.8])


def test_a_replica_ends_while_no_server_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Log:
        async def drop_reader(self, _name: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("kvflash.state.replica._WITHDRAW_S_MAX", 0.01)
    log: Any = Log()
    asyncio.run(Replica("r", log=log, blobs=log, roster=log, sink=log).stop())
    assert caplog.messages == ["state of r: can't withdraw: no answer within 0.01 s"]
