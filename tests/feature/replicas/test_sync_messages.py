"""Messages of other routers that are none of the protocol, or have numbers that no core holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvflash._core import Router
from kvflash.routing.replica_sync import ReplicaSync


def test_a_booking_that_the_core_cannot_hold_keeps_no_other_from_counting() -> None:
    router = Router()
    sync = ReplicaSync(1, router.bookings)
    for sequence, (name, isl) in enumerate([("odd", 2**64), ("plain", 100)], start=1):
        message: dict[str, Any] = {
            "request_id": name,
            "worker": {"worker_id": 7, "dp_rank": 0},
            "data": {"AddRequest": {"token_sequence": None, "isl": isl, "overlap": 0}},
            "router_id": 2,
            "sequence": sequence,
        }
        sync.received(json.dumps(message).encode(), 0.0)
    assert sync.digests()[2][0] == 2, "the other router's digest has both"
    worker = {"model_name": "m", "worker_id": 7, "block_size": 4}
    router.call("POST", "/workers", json.dumps(worker).encode())
    sync.worker_joined(7)
    assert router.bookings.stats()["remote_requests"] == 1
    assert sync.counts["malformed"] == 2


@pytest.mark.parametrize(
    "data",
    [
        b'{"router_id": -1, "request_id": "a", "data": "Free"}',
        b'{"router_id": 18446744073709551616, "request_id": "a", "data": "Free"}',
        b"[" * 100_000,
    ],
    ids=["below the numbers of routers", "above them", "too deep to read"],
)
def test_a_malformed_message_is_counted_and_changes_nothing(data: bytes) -> None:
    sync = ReplicaSync(1, Router().bookings)
    sync.listed(set(), 0.0)
    sync.received(data, 0.0)
    assert sync.counts["malformed"] == 1
    assert set(sync.digests()) == {1}
    # By now a router that discovery does not list is dropped.
    sync.outgoing(100.0)
