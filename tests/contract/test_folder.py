"""Tests for the folder only: locks that forks do not keep, sweeping, permissions."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvflash import ConfigError, DistributedRuntime, TransportError
from kvflash.discovery import Delete, FileDiscovery, Put, Synced
from kvflash.discovery.file import POLL_S, POLL_S_MAX, default_folder
from support_runtime import eventually, run

# Holds a lease with a key, forks a child that outlives it, and says the child's number.
HOLDER = """
import asyncio, os, sys
from kvflash.discovery import FileDiscovery
async def main():
    discovery = FileDiscovery(sys.argv[1])
    lease = await discovery.lease()
    await discovery.put("held", b"1", lease)
    child = os.fork()
    if child == 0:
        import time
        time.sleep(600)
    print(child, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_forked_child_does_not_keep_a_dead_process_alive(tmp_path: Path) -> None:
    async def scenario() -> None:
        mine = FileDiscovery(tmp_path)
        watch = mine.watch("held")
        assert await anext(watch) == Synced()
        holder = hold(tmp_path)
        assert holder.stdout is not None
        try:
            assert await asyncio.wait_for(anext(watch), 30) == Put("held", b"1")
            child = int(holder.stdout.readline())
            holder.kill()
            holder.wait()
            os.kill(child, 0)
            assert await asyncio.wait_for(anext(watch), 30) == Delete("held")
            os.kill(child, 9)

            async def is_swept() -> bool:
                return not [*(tmp_path / "keys").iterdir(), *(tmp_path / "leases").iterdir()]

            await eventually(is_swept, "what the dead left to be swept")
        finally:
            holder.kill()
            holder.communicate()
        await mine.close()

    run(scenario())


def test_a_lease_is_lost_when_somebody_empties_the_folder(tmp_path: Path) -> None:
    async def scenario() -> None:
        mine = FileDiscovery(tmp_path)
        lease = await mine.lease()
        await mine.put("k", b"", lease)
        for name in ("keys", "leases"):
            for path in (tmp_path / name).iterdir():
                path.unlink()
        await asyncio.wait_for(lease.lost.wait(), 30)
        await mine.close()

    run(scenario())


def test_a_number_that_is_taken_again_survives_the_sweep_of_its_last_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        mine, other = FileDiscovery(tmp_path), FileDiscovery(tmp_path)
        mine._leases.pop(await mine.lease(lease_id=7)).release()
        async with other._locked():
            # Between a sweep's look at the file and its deletion.
            assert not other._folder.is_alive(7)
            taking = asyncio.create_task(mine.lease(lease_id=7))
            await asyncio.sleep(0)
            with monkeypatch.context() as patch:
                patch.setattr(other._folder, "is_alive", lambda _: False)
                other._folder.sweep()
        lease = await taking
        await mine.put("k", b"1", lease)
        assert await other.get_prefix("") == {"k": b"1"}
        assert not lease.lost.is_set()
        await mine.close()
        await other.close()

    run(scenario())


def test_a_lock_that_is_never_given_back_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        mine, other = FileDiscovery(tmp_path), FileDiscovery(tmp_path)
        monkeypatch.setattr("kvflash.discovery.file.LOCK_TIMEOUT_S", 0.1)
        held = other._folder.try_lock()
        assert held is not None
        with pytest.raises(TransportError, match=r"its lock has been held for more than 0\.1 s"):
            await mine.put("k", b"")
        held.close()
        await mine.put("k", b"")
        await mine.close()
        await other.close()

    run(scenario())


def test_a_watch_goes_on_while_somebody_has_the_lock_that_sweeping_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash.discovery.file.LOCK_TIMEOUT_S", 3_600.0)

    async def scenario() -> None:
        mine, dead, other = (FileDiscovery(tmp_path) for _ in range(3))
        watch = mine.watch("k/")
        assert await anext(watch) == Synced()
        lease = await dead.lease()
        await dead.put("k/dead", b"1", lease)
        assert await asyncio.wait_for(anext(watch), 30) == Put("k/dead", b"1")
        held = other._folder.try_lock()
        assert held is not None
        (file,) = dead._leases.values()
        file.release()
        assert await asyncio.wait_for(anext(watch), 30) == Delete("k/dead")
        # Changes by the process with the lock are seen nevertheless.
        other._folder.write("k/new", b"2", 0)
        assert await asyncio.wait_for(anext(watch), 30) == Put("k/new", b"2")
        assert len([*(tmp_path / "keys").iterdir()]) == 2
        held.close()

        async def is_swept() -> bool:
            return len([*(tmp_path / "keys").iterdir()]) == 1

        await eventually(is_swept, "what the dead left to be swept")
        for one in (mine, dead, other):
            await one.close()

    run(scenario())


@pytest.mark.parametrize(("clock", "pause_s"), [("monotonic", POLL_S), ("thread_time", POLL_S_MAX)])
def test_a_folder_is_looked_at_less_often_for_what_looking_takes_and_for_nothing_else(
    clock: str, pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock leaps by 10 s whenever it is asked."""
    clocks = {"monotonic": time.monotonic, "thread_time": time.thread_time}
    clocks[clock] = itertools.count(0.0, 10.0).__next__
    sleep, pauses = asyncio.sleep, list[float]()

    async def note(delay_s: float) -> None:
        pauses.append(delay_s)
        await sleep(0.0)

    async def scenario() -> None:
        mine = FileDiscovery(tmp_path)
        watch = mine.watch("k")
        monkeypatch.setattr("kvflash.discovery.file.time", SimpleNamespace(**clocks))
        monkeypatch.setattr(asyncio, "sleep", note)
        assert await anext(watch) == Synced()
        while len(pauses) < 3:
            await sleep(0.0)
        monkeypatch.undo()
        await mine.close()

    run(scenario())
    assert set(pauses) == {pause_s}


def test_what_files_can_not_do_is_told_as_a_discovery_does_and_got_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.discovery.file")

    async def scenario() -> None:
        mine = FileDiscovery(tmp_path)
        watch = mine.watch("k")
        assert await anext(watch) == Synced()
        lease, given_back = await mine.lease(), await mine.lease()
        await mine.put("k", b"0", lease)
        assert await asyncio.wait_for(anext(watch), 30) == Put("k", b"0")
        new = tmp_path / "new"
        new.rmdir()
        new.write_bytes(b"in the way")
        for work in (
            mine.lease(),
            mine.put("k", b"1", lease),
            mine.create("l", b"1"),
            mine.delete("k"),
            mine.get_prefix(""),
        ):
            with pytest.raises(TransportError, match=r"discovery folder .* File exists"):
                await work
        await given_back.revoke()

        async def is_said() -> bool:
            return caplog.text.count("File exists") == 2

        await eventually(is_said, "the lease and the watch to say so")
        new.unlink()
        await mine.put("k", b"2", lease)
        assert await asyncio.wait_for(anext(watch), 30) == Put("k", b"2")
        assert not list(new.iterdir())
        assert caplog.text.count("can be used again after") == 1
        await mine.close()

    run(scenario())


def test_who_announced_is_back_when_somebody_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "discovery"

    async def scenario() -> None:
        mine, other = FileDiscovery(folder), FileDiscovery(folder)
        watch = other.watch("k")
        assert await anext(watch) == Synced()
        async with DistributedRuntime(mine) as runtime:
            await runtime.announce("k", 1)
            assert await asyncio.wait_for(anext(watch), 30) == Put("k", b"1")
            shutil.rmtree(folder)

            async def is_back() -> bool:
                return await other.get_prefix("k") == {"k": b"1"}

            await eventually(is_back, "the key to be announced again")
        await mine.close()
        await other.close()

    run(scenario())


def test_foreign_files_are_passed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        mine = FileDiscovery(tmp_path)
        (tmp_path / "keys" / "odd").write_bytes(b"no head")
        (tmp_path / "leases" / "odd").write_bytes(b"")
        await mine.put("k", b"1")
        assert await mine.get_prefix("") == {"k": b"1"}
        await (await mine.lease()).revoke()
        await mine.close()

    run(scenario())


def test_the_folder_must_be_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileDiscovery(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"others; its owner is .* mode 0777: change that, or set KVFLASH"
    ):
        FileDiscovery(tmp_path / "open")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"discovery folder .*file.*: set KVFLASH_DISCOVERY_DIR"):
        FileDiscovery(tmp_path / "file")
    # Nothing is made where something else is.
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"must be empty or created by kvflash; it contains"):
        FileDiscovery(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    # Of its own a folder may be half made, and hold what others put there.
    (tmp_path / "half" / "leases").mkdir(parents=True)
    (tmp_path / "half" / "odd").write_bytes(b"")
    FileDiscovery(tmp_path / "half")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", "/somewhere")
    assert default_folder() == Path("/somewhere")
    monkeypatch.delenv("KVFLASH_DISCOVERY_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_folder() == Path(f"/run/user/7/kvflash-{os.getuid()}/discovery")


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (errno.EMFILE, "Too many open files: raise the limit of open files"),
        (errno.ENOSPC, "No space left on device: free space there, or set KVFLASH_DISCOVERY_DIR"),
        (errno.EACCES, "Permission denied: set KVFLASH_DISCOVERY_DIR to a folder that this user"),
    ],
)
def test_a_folder_that_fails_says_what_helps(
    number: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(ConfigError, match=step):
        FileDiscovery(tmp_path / "new")


def test_a_folder_that_is_refused_at_the_close_keeps_no_lease_alive(tmp_path: Path) -> None:
    folder = tmp_path / "discovery"

    async def scenario() -> None:
        mine = FileDiscovery(folder)
        for key in ("a", "b"):
            await mine.put(key, b"1", await mine.lease())
        folder.chmod(0o777)
        await mine.close()
        folder.chmod(0o700)
        other = FileDiscovery(folder)
        assert await other.get_prefix("") == {}
        await other.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    # Without a task of its own for a time limit: the poller would be another task.
    asyncio.run(scenario())


def test_nobody_else_can_put_another_folder_in_its_place(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    FileDiscovery(shared / "kvflash-0" / "discovery")
    made = [shared / "kvflash-0", shared / "kvflash-0" / "discovery"]
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700, 0o700]
    # Somebody else was there first.
    made[0].chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"kvflash-0 belongs to \d+ with mode 0777, so other users"
    ):
        FileDiscovery(made[1])
    made[0].chmod(0o700)
    (shared / "link").symlink_to(made[0])
    with pytest.raises(ConfigError, match=r"link is a link, so other users"):
        FileDiscovery(shared / "link" / "discovery")
    (tmp_path / "leaf").symlink_to(made[1])
    with pytest.raises(
        ConfigError, match=r"leaf is a symbolic link: name the folder that it points to"
    ):
        FileDiscovery(tmp_path / "leaf")
