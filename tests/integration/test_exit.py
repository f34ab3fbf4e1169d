"""A program that does not close its router or indexer ends as any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
