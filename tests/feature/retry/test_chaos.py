"""kill -9 of every kind of process in turn, under load: all are answered, all know the same.

``KVFLASH_CHAOS_SECONDS=600`` goes on for that long (``make soak``); default: one round.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from support_chaos import ChaosCluster, Load

SECONDS = float(os.environ.get("KVFLASH_CHAOS_SECONDS", "0"))
CALM_S_MAX = 5.0
# Answers between two steps.
ANSWERS = 20


@pytest.mark.timeout(SECONDS + 240)
def test_killed_in_turn_under_load(tmp_path: Path) -> None:
    cluster = ChaosCluster(tmp_path)
    load = Load(cluster, seed=1)
    settled_s = []
    try:
        end = time.monotonic() + SECONDS
        meanwhile = partial(load.wait_ended, ANSWERS)
        while not settled_s or time.monotonic() < end:
            turn = len(settled_s)
            with load.running():
                meanwhile()
                for kill in (
                    cluster.kill_nats,
                    cluster.kill_etcd,
                    partial(cluster.kill_frontend, at=turn % 2),
                    partial(cluster.kill_worker, at=turn % len(cluster.workers)),
                ):
                    kill(meanwhile)
                    meanwhile()
            settled_s.append(cluster.wait_equal())
            cluster.wait_idle()
            print(f"round {turn + 1}: settled after {settled_s[-1]:.2f} s; {dict(load.counts)}")
            assert load.wrong == []
    finally:
        load.close()
        cluster.close()
    assert load.counts["whole"] >= 9 * ANSWERS * len(settled_s)
    assert load.counts["refused"] > 0, "nobody asked a dead frontend"
    if SECONDS:
        assert max(settled_s) < CALM_S_MAX, settled_s
