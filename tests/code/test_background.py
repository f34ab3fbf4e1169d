"""Work beside a service: one thread for all of it, which ends with the last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from kvflash.background import Background
from service import until

NAME = "kvflash-background"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_all_work_shares_a_thread_that_ends_with_the_last() -> None:
    seen: list[str] = []

    async def work() -> None:
        seen.append(threading.current_thread().name)
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cleaned up")

    one, other = Background("one", work), Background("other", work)
    one.stop()
    one.start()
    other.start()
    until(lambda: len(seen) == 2, "both")
    assert seen == [NAME, NAME]
    (thread,) = threads()
    one.stop()
    one.stop()
    assert seen[2:] == ["cleaned up"]
    assert thread.is_alive()
    other.stop()
    assert seen[3:] == ["cleaned up"]
    assert not threads()


def test_work_that_ends_by_itself_is_waited_for() -> None:
    async def work() -> None:
        background.ready()
        await background.ending.wait()

    async def answer() -> int:
        return 7

    background = Background("it", work, is_cancelled=False)
    background.start_and_wait()
    assert background.call(answer()) == 7
    background.stop()
    assert not threads()


# Python runs what atexit registers after it has closed the executors.
PROGRAM = """\
import asyncio, atexit, threading
from kvflash.background import Background

ended = threading.Event()

async def work():
    try:
        background.ready()
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(None, int)
            except Exception as error:
                print("failed:", error)
                return
    finally:
        print("cleaned up")
        ended.set()

background = Background("it", work)
background.start_and_wait()
atexit.register(ended.wait, 30)
"""


def test_work_is_cancelled_when_its_program_ends_without_a_stop() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ran.stdout, ran.stderr) == ("cleaned up\n", "")


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    async def rest() -> None:
        await asyncio.sleep(3600)

    async def work() -> None:
        childs.ready()

    parents, childs = Background("the parent's", rest), Background("the child's", work)
    parents.start()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            childs.start_and_wait()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    parents.stop()


def test_a_failure_before_it_is_ready_is_raised_and_a_later_one_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def early() -> None:
        raise ValueError("no server")

    background = Background("early", early)
    with pytest.raises(ValueError, match="no server"):
        background.start_and_wait()
    background.stop()
    assert not caplog.records
    # Nobody waits for this one.
    background = Background("the search", early)
    background.start()
    until(lambda: caplog.records, "the log")
    background.stop()
    assert [record.message for record in caplog.records] == ["the search failed"]
    caplog.clear()

    async def late() -> None:
        failing.ready()
        raise ValueError("gone")

    failing = Background("the watch", late)
    failing.start_and_wait()
    with caplog.at_level(logging.ERROR):
        failing.stop()
    until(lambda: caplog.records, "the log")
    assert [record.message for record in caplog.records] == ["the watch failed"]
    assert not threads()
