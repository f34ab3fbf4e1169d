"""Messages of other routers that are none of the protocol, or have numbers that no core holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvflash._core import Router
from kvflash.routing import replica_sync
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


def pass_on(sender: ReplicaSync, receiver: ReplicaSync, now_s: float) -> None:
    for data in sender.outgoing(now_s):
        receiver.received(data, now_s)


def forged_event(sequence: float) -> dict[str, Any]:
    worker = {"worker_id": 7, "dp_rank": 0}
    return {
        "router_id": 2,
        "sequence": sequence,
        "request_id": "none",
        "worker": worker,
        "data": "Free",
    }


def forged_state(sequence: float) -> dict[str, Any]:
    state = {"part": 0, "parts": 1, "requests": [["none", 7, 0, None, 8, 0, False]]}
    return {"router_id": 2, "sequence": sequence, "data": {"State": state}}


@pytest.mark.parametrize("forged", [forged_event, forged_state])
def test_a_forged_sequence_number_silences_its_router_for_two_digests_at_most(
    forged: Callable[[float], dict[str, Any]],
) -> None:
    one, two = ReplicaSync(1, Router().bookings), ReplicaSync(2, Router().bookings)
    two.add("a", (7, 0), None, 8, 0)
    pass_on(two, one, 0.0)
    one.received(json.dumps(forged(2**64 - 1)).encode(), 0.0)
    two.add("b", (7, 0), None, 8, 0)
    for now_s in (3.0, 6.0):
        assert one.digests()[2] != two.digests()[2]
        pass_on(two, one, now_s)
    pass_on(one, two, 6.0)
    pass_on(two, one, 6.0)
    assert one.digests()[2] == two.digests()[2]
    assert one.counts["sequence_resets"] == 1
    two.free("a")
    pass_on(two, one, 6.0)
    assert one.digests()[2] == two.digests()[2]


@pytest.mark.parametrize("sequence", [2**64, -1, 1e300])
def test_an_event_whose_sequence_number_no_router_sends_is_malformed(sequence: float) -> None:
    sync = ReplicaSync(1, Router().bookings)
    sync.received(json.dumps(forged_event(sequence)).encode(), 0.0)
    assert sync.counts["malformed"] == 1
    sync.received(json.dumps(forged_event(1)).encode(), 0.0)
    assert (sync.counts["malformed"], sync._peers[2].last) == (1, 1)


def test_a_state_in_transfer_keeps_no_more_requests_than_a_router_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_sync, "REQUESTS_MAX", 3)
    monkeypatch.setattr(replica_sync, "HASHES_MAX", 2)
    sync = ReplicaSync(1, Router().bookings)

    def part(at: int, parts: int) -> None:
        rows = [[f"{at}-{row}", 7, 0, [1, 2, 3], 8, 0, False] for row in range(2)]
        state = {"part": at, "parts": parts, "requests": rows}
        message = {"router_id": 2, "sequence": 1, "data": {"State": state}}
        sync.received(json.dumps(message).encode(), 0.0)

    for at in range(4):
        part(at, 2**63)
    kept = sync._peers[2].received.requests
    assert list(kept) == ["0-0", "0-1", "1-0"]
    assert {tuple(request.hashes or ()) for request in kept.values()} == {(1, 2)}
    assert sync.counts["refused_requests"] == 5
    part(4, 5)
    assert sync.digests()[2][0] == 3
    assert not sync._peers[2].received.requests


def test_blocks_of_a_router_have_a_limit_in_events_and_in_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = ReplicaSync(1, Router().bookings), ReplicaSync(2, Router().bookings)
    monkeypatch.setattr(replica_sync, "BLOCKS_MAX", 5)

    def hashes() -> list[int]:
        requests = one._peers[2].table.requests.values()
        return [len(request.hashes or ()) for request in requests]

    for name in ("a", "b", "c"):
        two.add(name, (7, 0), [1, 2], 32, 0)
    pass_on(two, one, 0.0)
    assert (hashes(), one.counts["requests_without_blocks"]) == ([2, 2, 0], 1)
    two.free("a")
    two.add("d", (7, 0), [1, 2], 32, 0)
    pass_on(two, one, 3.0)
    assert hashes() == [2, 0, 2]
    # The digests agree, so nothing is asked again.
    assert one.digests()[2] == two.digests()[2]
    late = ReplicaSync(3, Router().bookings)
    pass_on(late, two, 4.0)
    for data in two.outgoing(6.0):
        one.received(data, 6.0)
        late.received(data, 6.0)
    assert late.digests()[2] == two.digests()[2]
    assert late._peers[2].table.blocks == 4
    assert late.counts["requests_without_blocks"] == 1
