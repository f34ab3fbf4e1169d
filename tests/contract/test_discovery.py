"""The contract of every discovery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvflash import ClosedError, InvalidArgumentError
from kvflash.discovery import Delete, Discovery, Put, Synced, Watch
from kvflash.discovery.base import KEY_BYTES_MAX, VALUE_BYTES_MAX
from support_runtime import eventually, run

Open = Callable[[str], Discovery]


async def told(watch: Watch, count: int) -> list[Put | Delete | Synced]:
    return [await asyncio.wait_for(anext(watch), 20) for _ in range(count)]


def test_put_get_create_delete(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        mine, other = opened(discovery_kind), opened(discovery_kind)
        assert await mine.get_prefix("a/") == {}
        await mine.put("a/1", b"one\nline")
        await mine.put("a/2 ü%/x", b"")
        await mine.put("ab", b"not below a/")
        assert await other.get_prefix("a/") == {"a/1": b"one\nline", "a/2 ü%/x": b""}
        assert not await other.create("a/1", b"late")
        await other.put("a/1", b"again")
        assert await mine.get_prefix("a/1") == {"a/1": b"again"}
        assert await mine.delete("a/1")
        assert not await other.delete("a/1")
        assert await other.create("a/1", b"new")
        assert sorted(await mine.get_prefix("")) == ["a/1", "a/2 ü%/x", "ab"]
        for key in ("a/1", "a/2 ü%/x", "ab"):
            await mine.delete(key)
        await mine.close()
        await other.close()

    run(scenario())


def test_a_watch_tells_what_is_there_then_what_changes_each_once(
    discovery_kind: str, opened: Open
) -> None:
    async def scenario() -> None:
        mine, other = opened(discovery_kind), opened(discovery_kind)
        await other.put("w/1", b"a")
        await other.put("w/2", b"b")
        watch = mine.watch("w/")
        first = await told(watch, 3)
        assert sorted(first[:2], key=str) == [Put("w/1", b"a"), Put("w/2", b"b")]
        assert first[2] == Synced()
        await other.put("w/3", b"c")
        assert await told(watch, 1) == [Put("w/3", b"c")]
        await other.put("elsewhere", b"")
        await other.put("w/1", b"A")
        assert await told(watch, 1) == [Put("w/1", b"A")]
        await mine.delete("w/2")
        assert await told(watch, 1) == [Delete("w/2")]
        # Many at once: none is missed, none comes twice.
        for number in range(100):
            await other.put(f"w/n{number}", b"%d" % number)
        events = await told(watch, 100)
        wanted = {Put(f"w/n{number}", b"%d" % number) for number in range(100)}
        assert set(events) == wanted
        await other.put("w/last", b"")
        assert await told(watch, 1) == [Put("w/last", b"")]
        await watch.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        for key in await mine.get_prefix(""):
            await mine.delete(key)
        await mine.close()
        await other.close()

    run(scenario())


def test_a_watch_of_nothing_is_synced_at_once(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        mine = opened(discovery_kind)
        watch = mine.watch("nothing/")
        assert await told(watch, 1) == [Synced()]
        await mine.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(watch), 20)

    run(scenario())


def test_what_a_slow_reader_has_not_read_does_not_grow(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        mine, other = opened(discovery_kind), opened(discovery_kind)
        watch = mine.watch("s/")
        assert await told(watch, 1) == [Synced()]
        for number in range(200):
            await other.put("s/x", b"%d" % number)
        last = Put("s/x", b"199")

        async def read() -> bool:
            return await anext(watch) == last

        await eventually(read, "the last value")
        assert len(watch._waiting) == 0
        await other.delete("s/x")
        await mine.close()
        await other.close()

    run(scenario())


def test_keys_go_with_their_lease(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        mine, other = opened(discovery_kind), opened(discovery_kind)
        lease, second = await mine.lease(), await mine.lease()
        assert lease.id != second.id
        assert 0 < lease.id < 2**63
        await mine.put("l/1", b"1", lease)
        assert await mine.create("l/2", b"2", lease)
        await mine.put("l/3", b"3", second)
        await mine.put("l/4", b"4")
        watch = other.watch("l/")
        assert (await told(watch, 5))[4] == Synced()
        await lease.revoke()
        await lease.revoke()
        assert set(await told(watch, 2)) == {Delete("l/1"), Delete("l/2")}
        assert sorted(await mine.get_prefix("l/")) == ["l/3", "l/4"]
        with pytest.raises(InvalidArgumentError, match=r"lease \d+ has expired"):
            await mine.put("l/1", b"1", lease)
        # The end of the discovery is the end of its leases.
        await mine.close()
        assert await told(watch, 1) == [Delete("l/3")]
        assert not lease.lost.is_set()
        await other.delete("l/4")
        await other.close()

    run(scenario())


def test_of_many_that_create_a_key_one_does(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        many = [opened(discovery_kind) for _ in range(8)]
        for round_number in range(5):
            key = f"race/{round_number}"
            leases = [await one.lease() for one in many]
            won = await asyncio.gather(
                *(
                    one.create(key, b"%d" % number, lease)
                    for number, (one, lease) in enumerate(zip(many, leases, strict=True))
                )
            )
            assert sum(won) == 1
            assert await many[0].get_prefix(key) == {key: b"%d" % won.index(True)}
            # Its end makes room for another.
            await leases[won.index(True)].revoke()
            assert await many[-1].create(key, b"next")
            await many[0].delete(key)
        for one in many:
            await one.close()

    run(scenario())


def test_a_lease_can_be_had_again_by_its_number(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        mine = opened(discovery_kind)
        lease = await mine.lease()
        number = lease.id
        await lease.revoke()
        again = await mine.lease(lease_id=number)
        assert again.id == number
        await mine.put("again", b"", again)
        assert await mine.get_prefix("again") == {"again": b""}
        await mine.close()

    run(scenario())


def test_limits_and_closed(discovery_kind: str, opened: Open) -> None:
    async def scenario() -> None:
        mine = opened(discovery_kind)
        with pytest.raises(InvalidArgumentError, match=r"1\.\.=200 bytes, got 201"):
            await mine.put("k" * (KEY_BYTES_MAX + 1), b"")
        with pytest.raises(InvalidArgumentError, match=r"1\.\.=200 bytes, got 0"):
            await mine.create("", b"")
        with pytest.raises(InvalidArgumentError, match="at most 1048576 bytes, got 1048577"):
            await mine.put("k", b"x" * (VALUE_BYTES_MAX + 1))
        await mine.put("k" * KEY_BYTES_MAX, b"x" * VALUE_BYTES_MAX)
        await mine.delete("k" * KEY_BYTES_MAX)
        await mine.close()
        for call in (mine.lease(), mine.put("k", b""), mine.create("k", b""), mine.delete("k")):
            with pytest.raises(ClosedError, match="discovery is closed"):
                await call
        with pytest.raises(ClosedError):
            mine.watch("")

    run(scenario())
