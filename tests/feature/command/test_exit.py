"""How programs end: with a router or indexer that they do not close, and by signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ports import free_port
from service import Process, until

# Its end takes a while: what still runs beside it then has the time to do harm.
SLOW = """
import asyncio, time
from kvflash import DistributedRuntime, KvPushRouter, KvRouterConfig
from kvflash.indexer import IndexerService

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

slow = Slow()
"""
ROUTER = """
async def main():
    runtime = DistributedRuntime.detached()
    router = KvPushRouter(runtime.endpoint("a.b.c"), 16, KvRouterConfig(use_kv_events=EVENTS))
    await router.get_potential_loads([1])

asyncio.run(main())
"""
INDEXER = """
service = IndexerService(port=0)
service.start()
"""


def test_nothing_is_logged_after_the_reason_why_a_service_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Every one of their failures is logged.
        engines = [f"http://127.0.0.1:{free_port()}/{number}" for number in range(64)]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--worker", *engines]
        main = f"from kvflash.frontend.app import main\nstatus = main({flags})\n"
        ran = subprocess.run(
            [sys.executable, "-c", SLOW + main + "raise SystemExit(status)"],
            env={**os.environ, "KVFLASH_DISCOVERY_DIR": str(tmp_path / "discovery")},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ran.returncode == 2
    assert f"error: can't listen on 127.0.0.1:{port}" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "program",
    [ROUTER.replace("EVENTS", "True"), ROUTER.replace("EVENTS", "False"), INDEXER],
    ids=["router", "router without events", "indexer"],
)
def test_what_is_not_closed_ends_with_its_program(tmp_path: Path, program: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SLOW + program],
        env={**os.environ, "KVFLASH_DISCOVERY_DIR": str(tmp_path / "discovery")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# Its SIGINT handler stays, even where a runtime serves in its loop.
OWN_HANDLER = """
import asyncio, json, os, signal
from kvflash import DistributedRuntime

async def echo(request):
    yield request

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    runtime = DistributedRuntime("mem")
    serving = asyncio.create_task(runtime.endpoint("a.b.c").serve_endpoint(echo))
    while not await runtime.discovery.get_prefix("v1/instances/"):
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    await stop.wait()
    print(serving.done())
    await runtime.close()
    await serving

asyncio.run(main())
"""


def test_a_runtime_leaves_a_program_its_own_handler_of_ctrl_c() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", OWN_HANDLER],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_mocker_of_the_runtime(number: signal.Signals, tmp_path: Path) -> None:
    env = {"KVFLASH_DISCOVERY": "file", "KVFLASH_DISCOVERY_DIR": str(tmp_path / "discovery")}
    flags = ("--endpoint", "a.b.c", "--no-kv-events", "--num-workers", "2")
    mocker = Process("kvflash.mocker", *flags, env=env)
    try:
        mocker.ready()
        mocker.popen.send_signal(number)
        assert mocker.popen.wait(30) == 0
    finally:
        mocker.close()
    assert "Traceback" not in "".join(mocker.errors)


def test_a_second_ctrl_c_ends_a_mocker_at_once() -> None:
    # Slow enough to be running for minutes.
    mocker = Process("kvflash.mocker", "--port", "0", "--speedup-ratio", "0.001")
    try:
        address = urlsplit(mocker.ready()["url"])
        asking, looking = (HTTPConnection(str(address.netloc), timeout=60) for _ in range(2))
        asking.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))

        def is_running() -> bool:
            looking.request("GET", "/metrics")
            lines = looking.getresponse().read().decode().splitlines()
            [line] = [line for line in lines if line.startswith("vllm:num_requests_running{")]
            return line.endswith("} 1")

        until(is_running, "the request to run")
        mocker.popen.send_signal(signal.SIGINT)
        until(lambda: any("draining" in line for line in mocker.errors), "the drain")
        mocker.popen.send_signal(signal.SIGINT)
        assert mocker.popen.wait(30) == -signal.SIGINT
        asking.close()
        looking.close()
    finally:
        mocker.close()
    assert "Traceback" not in "".join(mocker.errors)


@pytest.mark.parametrize("service", ["frontend", "indexer", "mocker", "router"])
def test_the_interpreter_of_a_service_ends(service: str, tmp_path: Path) -> None:
    # A variable that Python reads at its start: a forked process ends without its interpreter.
    env = {"PYTHONFAULTHANDLER": "1", "KVFLASH_DISCOVERY_DIR": str(tmp_path / "discovery")}
    process = Process(f"kvflash.{service}", "--port", "0", env=env)
    try:
        assert isinstance(process.popen, subprocess.Popen)
        process.ready()
        assert process.terminate() == 0
        process.rest()
    finally:
        process.close()
    assert not re.search("Traceback|Fatal|Error|panicked", "".join(process.errors))
