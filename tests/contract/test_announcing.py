"""A runtime's announcements and withdrawals while discovery fails or is slow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvflash import DistributedRuntime, TransportError
from kvflash.discovery import Lease, MemoryDiscovery, announcer
from kvflash.discovery.announcer import Announcer
from support_runtime import eventually, run

ENDPOINT = "t.workers.run"


class Shaky(MemoryDiscovery):
    """Fails on request, and answers when its gate is open."""

    def __init__(self) -> None:
        super().__init__(is_shared=False)
        self.is_away = False
        # It grants leases, and accepts no key.
        self.is_full = False
        self.puts_refused = self.leases_granted = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting: list[str] = []

    async def lease(self, *args: Any, **options: Any) -> Lease:
        await self._answer("lease")
        self.leases_granted += 1
        return await super().lease(*args, **options)

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        if self.is_away:
            raise TransportError("it is away")
        if self.is_full:
            self.puts_refused += 1
            raise TransportError("it is full")
        # The answer is late: what was asked for is done.
        await super().put(key, value, lease)
        await self._answer(key)

    async def delete(self, key: str) -> bool:
        await self._answer(key)
        return await super().delete(key)

    async def _answer(self, what: str) -> None:
        if self.is_away:
            raise TransportError("it is away")
        self.waiting.append(what)
        await self.gate.wait()
        self.waiting.remove(what)

    async def waited_for(self, what: str) -> None:
        async def is_so() -> bool:
            return what in self.waiting

        await eventually(is_so, what)

    async def has(self, *keys: str) -> None:
        async def is_so() -> bool:
            return set(await self.get_prefix("")) == set(keys)

        await eventually(is_so, f"{keys} and no others")


async def lose(runtime: DistributedRuntime) -> None:
    """Its lease runs out."""
    lease = await runtime._announcer.lease()
    await lease.revoke()
    lease.lost.set()


def test_what_could_not_be_withdrawn_is_withdrawn_later() -> None:
    async def scenario() -> None:
        discovery = Shaky()
        async with DistributedRuntime(discovery) as runtime:
            await runtime.announce("a", 1)
            await runtime.announce("b", 1)
            discovery.is_away = True
            for _ in range(2):
                with pytest.raises(TransportError):
                    await runtime.withdraw("a")
            assert list(runtime.announced("")) == ["b"]
            discovery.is_away = False
            await discovery.has("b")
            # Announced anew it stays.
            discovery.is_away = True
            with pytest.raises(TransportError):
                await runtime.withdraw("b")
            discovery.is_away = False
            await runtime.announce("b", 2)
            await eventually(lambda: _done(runtime._announcer._settler), "the attempts to end")
            assert await discovery.get_prefix("") == {"b": b"2"}
            await runtime.withdraw("never announced")

    run(scenario())


async def _done(task: Any) -> bool:
    return bool(task.done())


def test_whoever_is_cancelled_while_it_announces_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        discovery = Shaky()

        async def handle(_request: Any) -> AsyncIterator[int]:
            yield 1

        async with DistributedRuntime(discovery) as runtime:
            key = f"v1/instances/t/workers/run/{runtime.instance_id}"
            await runtime.announce("a", 1)
            discovery.gate.clear()
            serving = asyncio.create_task(runtime.endpoint(ENDPOINT).serve_endpoint(handle))
            await discovery.waited_for(key)
            serving.cancel()
            discovery.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await serving
            await discovery.has("a")
            # It may be served again.
            serving = asyncio.create_task(runtime.endpoint(ENDPOINT).serve_endpoint(handle))
            await discovery.has("a", key)
            # Also where discovery is away just then.
            discovery.is_away = True
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            discovery.is_away = False
            await discovery.has("a")

    run(scenario())


def test_a_value_that_was_not_announced_gives_way_to_the_one_before() -> None:
    async def scenario() -> None:
        discovery = Shaky()
        async with DistributedRuntime(discovery) as runtime:
            await runtime.announce("a", 1)
            discovery.gate.clear()
            announcing = asyncio.create_task(runtime.announce("a", 2))
            await discovery.waited_for("a")
            assert await discovery.get_prefix("") == {"a": b"2"}
            announcing.cancel()
            discovery.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await announcing
            assert runtime.announced("") == {"a": 1}

            async def is_back() -> bool:
                return await discovery.get_prefix("") == {"a": b"1"}

            await eventually(is_back, "the value before")

    run(scenario())


def test_what_is_withdrawn_while_all_is_announced_again_stays_away() -> None:
    async def scenario() -> None:
        discovery = Shaky()
        async with DistributedRuntime(discovery) as runtime:
            await runtime.announce("a", 1)
            await runtime.announce("b", 1)
            discovery.gate.clear()
            await lose(runtime)
            await discovery.waited_for("lease")
            # Between two leases: it comes with the next.
            await runtime.announce("c", 1)
            discovery.gate.set()
            await discovery.has("a", "b", "c")
            discovery.gate.clear()
            await lose(runtime)
            await discovery.waited_for("lease")
            discovery.gate.set()
            discovery.gate.clear()
            await discovery.waited_for("a")
            withdrawing = asyncio.create_task(runtime.withdraw("b"))
            await asyncio.sleep(0)
            discovery.gate.set()
            await withdrawing
            await discovery.has("a", "c")

    run(scenario())


def test_a_new_lease_is_kept_until_all_is_announced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer, "PAUSE_S", (0.0, 0.0))

    async def scenario() -> None:
        discovery = Shaky()
        async with DistributedRuntime(discovery) as runtime:
            await runtime.announce("a", 1)
            discovery.is_full = True
            await lose(runtime)

            async def is_retried() -> bool:
                return discovery.puts_refused > 2

            await eventually(is_retried, "several attempts")
            assert discovery.leases_granted == 2
            discovery.is_full = False
            await discovery.has("a")
            assert discovery.leases_granted == 2

    run(scenario())


def test_an_announcement_that_is_given_up_in_the_line_leaves_nothing() -> None:
    """Another call settles its key while it waits for its turn."""

    class Slow(Shaky):
        def __init__(self) -> None:
            super().__init__()
            self.is_put, self.goes_on = asyncio.Event(), asyncio.Event()

        async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
            await super().put(key, value, lease)
            if key == "k":
                self.is_put.set()
                await self.goes_on.wait()

    async def scenario() -> None:
        discovery = Slow()
        async with DistributedRuntime(discovery) as runtime:
            await runtime.announce("first", 0)
            discovery.gate.clear()
            other = asyncio.create_task(runtime.announce("other", 1))
            await discovery.waited_for("other")
            withdrawing = asyncio.create_task(runtime.withdraw("k"))
            await asyncio.sleep(0)
            announcing = asyncio.create_task(runtime.announce("k", 1))
            await asyncio.sleep(0)
            discovery.gate.set()
            await discovery.is_put.wait()
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            discovery.goes_on.set()
            await asyncio.gather(other, withdrawing)
            assert set(runtime.announced("")) == {"first", "other"}

            async def are_the_same() -> bool:
                return set(await discovery.get_prefix("")) == {"first", "other"}

            await eventually(are_the_same, "what is announced and no more")

    run(scenario())


def test_a_key_that_cannot_be_deleted_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "PAUSE_S", (0.01, 0.01))

    class Refusing(Shaky):
        async def delete(self, key: str) -> bool:
            if key == "a":
                raise TransportError("not allowed")
            return await super().delete(key)

    async def scenario() -> None:
        discovery = Refusing()
        async with DistributedRuntime(discovery) as runtime:
            keys = ["a", *(f"k{number}" for number in range(50))]
            for key in keys:
                await runtime.announce(key, 1)
            discovery.is_away = True
            for key in keys:
                with pytest.raises(TransportError):
                    await runtime.withdraw(key)
            discovery.is_away = False

            async def is_left_alone() -> bool:
                return set(await discovery.get_prefix("")) == {"a"}

            await eventually(is_left_alone, "all others to be deleted")

    run(scenario())


def test_the_log_names_the_key_that_is_not_up_to_date(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, announcer.__name__)
    monkeypatch.setattr(announcer, "PAUSE_S", (0.0, 0.0))

    async def scenario() -> None:
        discovery = Shaky()
        made = Announcer(discovery, "instance 7")
        await made.announce("a", b"1")

        async def fails_at(key: str) -> None:
            text = f"can't update the announcements of instance 7: {key}it is away; trying again"

            async def is_told() -> bool:
                return [record.getMessage() for record in caplog.records] == [text]

            await eventually(is_told, text)
            discovery.is_away = False
            await eventually(lambda: _done(made._settler), "the attempts to end")
            back = "the announcements of instance 7 are up to date after at least "
            assert caplog.messages[1].startswith(back)
            assert len(caplog.messages) == 2
            caplog.clear()

        discovery.is_away = True
        with pytest.raises(TransportError):
            await made.withdraw("a")
        await fails_at("a: ")
        discovery.is_away = True
        made.announce_soon("b", b"1")
        await fails_at("b: ")
        await made.close()
        # Without a lease no key is tried.
        discovery.is_away = True
        made = Announcer(discovery, "instance 7")
        made.announce_soon("c", b"1")
        await fails_at("")
        await made.close()

    run(scenario())


def test_an_unexpected_error_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "PAUSE_S", (0.0, 0.0))
    failures: list[Exception] = [TransportError(), KeyError("x"), KeyError("x")]

    class Broken(MemoryDiscovery):
        async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
            if failures:
                raise failures.pop()
            await super().put(key, value, lease)

    async def scenario() -> None:
        discovery = Broken(is_shared=False)
        made = Announcer(discovery, "instance 7")
        made.announce_soon("a", b"1")
        await eventually(lambda: _done(made._settler), "the attempts to end")
        assert await discovery.get_prefix("") == {"a": b"1"}
        await made.close()

    run(scenario())
    text = "can't update the announcements of instance 7: a: {}; trying again"
    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        (text.format("KeyError('x')"), True),
        (text.format("TransportError()"), False),
    ]
    assert "in put" in caplog.text


def test_a_closed_announcer_leaves_no_attempt_behind() -> None:
    class Stubborn(MemoryDiscovery):
        """Fails when it is cancelled, as asyncio.wait_for may before Python 3.12."""

        def __init__(self) -> None:
            super().__init__(is_shared=False)
            self.is_asked = asyncio.Event()
            self.puts = 0

        async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
            self.puts += 1
            self.is_asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise TransportError("it is away") from None

    async def scenario() -> None:
        discovery = Stubborn()
        announcer = Announcer(discovery, "it")
        announcer.announce_soon("a", b"1")
        await discovery.is_asked.wait()
        tasks = [announcer._keeper, announcer._settler]
        await announcer.close()
        assert all(task is not None and task.done() for task in tasks)
        assert not discovery._leases
        assert discovery.puts == 1

    run(scenario())
