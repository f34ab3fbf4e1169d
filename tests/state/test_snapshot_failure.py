"""What a failing snapshot tells its owner."""

import asyncio
from typing import Any

import pytest

from kvflash.errors import TransportError
from kvflash.state.snapshot import Snapshots


class Checks:
    """A replica whose checks fail or not, one after the other; the last one never ends."""

    def __init__(self, outcomes: list[Exception | None]) -> None:
        self.name = "dynamo.backend"
        self.log = self.blobs = self.roster = self.sink = None
        self.outcomes = outcomes
        self.seen: list[str] = []
        self.snapshots: Snapshots | None = None

    async def wait_caught_up(self) -> None:
        pass

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
