"""How router replicas share their active requests: the protocol, without a network.

Each router sends the three events of NVIDIA Dynamo's routers, numbered per router, and in addition:

- a **digest** of its active requests every DIGEST_S, so that a replica notices missed events;
- its whole **state** on request, to a replica that has just started or has noticed a gap.

A router that leaves the roster is dropped at once, with its load.

Events are sent after the fact and never waited for. The next digest repairs a lost or dropped
event.
"""

import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflash._core import Bookings

logger = logging.getLogger(__name__)

DIGEST_S = 2.0
# Pause between two requests for the same router's state.
_ASK_S = 1.0
# How long a sender that is missing from the roster is accepted: the roster may lag behind.
_UNLISTED_S = 10.0
# Events waiting to be sent; above it new ones are dropped, and the digest repairs that.
WAITING_EVENTS_MAX = 100_000
# Tracked active requests per router; further ones are ignored.
REQUESTS_MAX = 100_000
# Blocks of another router's requests; of further requests only the tokens count.
BLOCKS_MAX = 8_388_608
# Other routers; messages of further ones are ignored.
ROUTERS_MAX = 256
# Size of one message of a state, unless a single request is larger.
STATE_PART_BYTES = 256 * 1024
# The longest number in it, 64 bits, with a separator.
_NUMBER_BYTES = 21
# Blocks sent and kept per request, so that it fits into a message on any channel.
HASHES_MAX = 40_000
_GONE_MAX = 4_096
_U64_MAX = (1 << 64) - 1
# What reading a message raises where it is not one of the protocol.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_COUNTS = (
    *("sent_events", "dropped_events", "received_events", "malformed", "gaps"),
    *("digests_differed", "resyncs", "refused_requests", "dropped_routers", "ignored_messages"),
    *("sequence_resets", "requests_without_blocks"),
)

#: Instance id and dp rank.
Worker = tuple[int, int]


@dataclass
class _Request:
    worker: Worker
    # Sequence hashes of its blocks; None if blocks are not tracked.
    hashes: list[int] | None
    isl: int
    overlap: int
    is_prefilled: bool = False

    def mark(self, request_id: str) -> int:
        """The request's contribution to a digest; differs between its states."""
        return _hash_of(f"{request_id}|{self.worker[0]}|{self.worker[1]}|{int(self.is_prefilled)}")


def _hash_of(text: str) -> int:
    """FNV-1a, 64 bits: equal in every process, and enough to detect a difference."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & _U64_MAX
    return value


@dataclass
class _Table:
    """A router's active requests, with a digest that is independent of their order."""

    requests: dict[str, _Request] = field(default_factory=dict)
    digest: int = 0
    blocks: int = 0

    def add(self, request_id: str, request: _Request) -> None:
        self.digest ^= request.mark(request_id)
        self.requests[request_id] = request
        self.blocks += len(request.hashes or ())

    def mark(self, request_id: str) -> _Request | None:
        """The request, if this changes it."""
        request = self.requests.get(request_id)
        if request is None or request.is_prefilled:
            return None
        self.digest ^= request.mark(request_id)
        request.is_prefilled = True
        self.digest ^= request.mark(request_id)
        return request

    def free(self, request_id: str) -> _Request | None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.digest ^= request.mark(request_id)
            self.blocks -= len(request.hashes or ())
        return request


@dataclass
class _Peer:
    table: _Table = field(default_factory=_Table)
    last: int | None = None
    # What ``last`` was when the latest digest was below it.
    last_above_digest: int | None = None
    is_wrong: bool = True
    asked_s: float = float("-inf")
    unlisted_since: float | None = None
    # A state in transfer: its number, how many parts have arrived, and their requests.
    state_at: int | None = None
    parts: int = 0
    received: _Table = field(default_factory=_Table)

    def end_state(self) -> _Table:
        """End the transfer of a state; returns the requests that arrived."""
        received, self.received = self.received, _Table()
        self.state_at, self.parts = None, 0
        return received

    def forget_last(self) -> None:
        """Accept any sequence number again, and ask for the state."""
        self.last, self.last_above_digest, self.is_wrong = None, None, True
        self.end_state()


class ReplicaSync:
    """One router's side of the protocol, safe to use from many threads.

    It counts other routers' requests in ``bookings``; ``local_of`` maps shared worker numbers to
    this router's where the two differ. ``router_id`` is random and new at each start. The view of
    another router equals that router's state at some earlier moment; it is up to date once messages
    have arrived for DIGEST_S + a round trip.
    """

    def __init__(
        self, router_id: int, bookings: Bookings, local_of: Mapping[int, int] | None = None
    ) -> None:
        self.router_id = router_id
        self._bookings, self._local_of = bookings, {} if local_of is None else local_of
        self._lock = threading.RLock()
        self._own = _Table()
        self._sequence = 0
        self._outbox: deque[dict[str, Any]] = deque()
        self._peers: dict[int, _Peer] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()
        # None before discovery has answered.
        self._listed: set[int] | None = None
        self._digest_s = float("-inf")
        self._has_asked_all = False
        self._wants_state = False
        self.counts = dict.fromkeys(_COUNTS, 0)

    # -- of this router's own requests

    def add(
        self, request_id: str, worker: Worker, hashes: Sequence[int] | None, isl: int, overlap: int
    ) -> None:
        """This router has booked a request."""
        kept = None if hashes is None else list(hashes[:HASHES_MAX])
        data = {
            "AddRequest": {
                "token_sequence": kept,
                "isl": isl,
                "overlap": overlap,
                "expected_output_tokens": None,
            }
        }
        with self._lock:
            if request_id in self._own.requests:
                return
            self._own.add(request_id, _Request(worker, kept, isl, overlap))
            self._tell(request_id, worker, data)

    def mark_prefill_completed(self, request_id: str) -> None:
        """The request's prompt is computed; unknown requests are ignored."""
        with self._lock:
            request = self._own.mark(request_id)
            if request is not None:
                self._tell(request_id, request.worker, "MarkPrefillCompleted")

    def free(self, request_id: str) -> None:
        """The request has ended; unknown requests are ignored."""
        with self._lock:
            request = self._own.free(request_id)
            if request is not None:
                self._tell(request_id, request.worker, "Free")

    # -- of the network

    def outgoing(self, now_s: float, limit: int = 256) -> list[bytes]:
        """Messages to send now, in order: at most ``limit`` events, and what else is due.

        To call now and then without news, too: it drops routers that were not listed for a while.
        """
        with self._lock:
            for router_id, peer in list(self._peers.items()):
                if peer.unlisted_since is not None and now_s - peer.unlisted_since > _UNLISTED_S:
                    self._drop(router_id)
            messages: list[dict[str, Any]] = []
            if not self._has_asked_all:
                self._has_asked_all = True
                messages.append(self._message({"Resync": {"of": None}}))
            while self._outbox and len(messages) < limit:
                messages.append(self._outbox.popleft())
                self.counts["sent_events"] += 1
            if self._outbox:
                # A digest or a state summarizes all events before it.
                return [_encode(message) for message in messages]
            if now_s - self._digest_s >= DIGEST_S:
                self._digest_s = now_s
                told = {"count": len(self._own.requests), "hash": self._own.digest}
                messages.append(self._message({"Digest": told}))
            for router_id, peer in self._peers.items():
                if peer.is_wrong and now_s - peer.asked_s >= _ASK_S:
                    peer.asked_s = now_s
                    self.counts["resyncs"] += 1
                    messages.append(self._message({"Resync": {"of": router_id}}))
            if self._wants_state:
                self._wants_state = False
                # Sent last: it is long and must not delay anything else.
                messages += self._state()
            return [_encode(message) for message in messages]

    def received(self, data: bytes, now_s: float) -> None:
        """Process a message; this router's own and invalid messages are ignored."""
        with self._lock:
            try:
                message = json.loads(data)
                router_id = _number(message, "router_id")
                if router_id != self.router_id:
                    self._receive(router_id, message, now_s)
            except _MALFORMED:
                self.counts["malformed"] += 1

    def listed(self, router_ids: set[int], now_s: float) -> None:
        """Set the live routers, by their leases; one that leaves is dropped, with its load."""
        with self._lock:
            before = self._listed or set()
            self._listed = set(router_ids)
            for router_id in before - router_ids:
                self._drop(router_id)
            for router_id in router_ids - before:
                self._gone.pop(router_id, None)
                if router_id in self._peers:
                    self._peers[router_id].is_wrong = True
            for router_id, peer in self._peers.items():
                if router_id in router_ids:
                    peer.unlisted_since = None
                elif peer.unlisted_since is None:
                    peer.unlisted_since = now_s

    def worker_joined(self, instance_id: int) -> None:
        """A worker is now known: count other routers' requests at it."""
        with self._lock:
            for router_id, peer in self._peers.items():
                for name, request in peer.table.requests.items():
                    if request.worker[0] == instance_id:
                        self._count(router_id, name, request)

    def drop_waiting(self) -> None:
        """Drop the events that wait to be sent; digests make up for them."""
        with self._lock:
            self.counts["dropped_events"] += len(self._outbox)
            self._outbox.clear()

    def digests(self) -> dict[int, tuple[int, int]]:
        """(requests, digest) by router, this one included; equal at replicas that agree."""
        with self._lock:
            tables = {router_id: peer.table for router_id, peer in self._peers.items()}
            tables[self.router_id] = self._own
            return {at: (len(table.requests), table.digest) for at, table in tables.items()}

    # -- below: the lock is held

    def _tell(self, request_id: str, worker: Worker, data: Any) -> None:
        self._sequence += 1
        if len(self._outbox) >= WAITING_EVENTS_MAX:
            self.counts["dropped_events"] += 1
            return
        event = {
            "request_id": request_id,
            "worker": {"worker_id": worker[0], "dp_rank": worker[1]},
            "lora_name": None,
        }
        self._outbox.append(event | self._message(data))

    def _message(self, data: Any) -> dict[str, Any]:
        return {"router_id": self.router_id, "sequence": self._sequence, "data": data}

    def _state(self) -> list[dict[str, Any]]:
        """Parts of the state; the same parts for every peer until the next event."""
        parts: list[list[list[Any]]] = [[]]
        part_bytes = 0
        for name, request in self._own.requests.items():
            row_bytes = len(_encode(name)) + _NUMBER_BYTES * (5 + len(request.hashes or ()))
            if parts[-1] and part_bytes + row_bytes > STATE_PART_BYTES:
                parts.append([])
                part_bytes = 0
            parts[-1].append(
                [name, *request.worker, request.hashes, request.isl, request.overlap,
                 request.is_prefilled]
            )  # fmt: skip
            part_bytes += row_bytes
        return [
            self._message({"State": {"part": at, "parts": len(parts), "requests": rows}})
            for at, rows in enumerate(parts)
        ]

    def _receive(self, router_id: int, message: dict[str, Any], now_s: float) -> None:
        data = message["data"]
        kind = next(iter(data), None) if isinstance(data, dict) else data
        if kind == "Resync" and data["Resync"]["of"] in (None, self.router_id):
            self._wants_state = True
        peer = self._peer(router_id, now_s)
        if peer is None or kind == "Resync":
            return
        if kind == "Digest":
            if self._is_equal(peer, _number(message, "sequence"), data["Digest"]):
                self._bookings.remote_heard(router_id)
        elif kind == "State":
            self._take_part(router_id, peer, _number(message, "sequence"), data["State"])
        else:
            self.counts["received_events"] += 1
            if message.get("sequence") is None:
                # Events from peers without sequence numbers are taken as they come.
                peer.is_wrong = False
            else:
                sequence = _number(message, "sequence")
                if peer.last is not None and sequence <= peer.last:
                    return
                if peer.last is None or sequence > peer.last + 1:
                    self.counts["gaps"] += 1
                    peer.is_wrong = True
                peer.last = sequence
                peer.end_state()
            self._apply(router_id, peer, message)

    def _peer(self, router_id: int, now_s: float) -> _Peer | None:
        """A router, unless it has left or is beyond the limit."""
        peer = self._peers.get(router_id)
        if peer is not None or router_id in self._gone:
            return peer
        if len(self._peers) >= ROUTERS_MAX:
            self.counts["ignored_messages"] += 1
            if self.counts["ignored_messages"] == 1:
                logger.warning(
                    "replica sync: router %d is ignored, and its load is not counted: %d other "
                    "routers are tracked, the maximum", router_id, ROUTERS_MAX,
                )  # fmt: skip
            return None
        peer = self._peers[router_id] = _Peer()
        if self._listed is not None and router_id not in self._listed:
            peer.unlisted_since = now_s
        return peer

    def _apply(self, router_id: int, peer: _Peer, message: dict[str, Any]) -> None:
        data, request_id = message["data"], str(message["request_id"])
        if data == "Free":
            if peer.table.free(request_id) is not None:
                self._bookings.remote_free(router_id, request_id)
        elif data == "MarkPrefillCompleted":
            if peer.table.mark(request_id) is not None:
                self._bookings.remote_prefilled(router_id, request_id)
        else:
            added, worker = data["AddRequest"], message["worker"]
            place = (worker["worker_id"], worker["dp_rank"])
            size = (added.get("isl", 0), added.get("overlap", 0))
            request = _request_of((*place, added.get("token_sequence"), *size, False))
            if self._keep(peer.table, request_id, request):
                self._count(router_id, request_id, request)

    def _keep(self, table: _Table, request_id: str, request: _Request) -> bool:
        """Add to another router's requests, within limits; False if it is there or refused."""
        if request_id in table.requests:
            return False
        if len(table.requests) >= REQUESTS_MAX:
            self.counts["refused_requests"] += 1
            return False
        if table.blocks + len(request.hashes or ()) > BLOCKS_MAX:
            self.counts["requests_without_blocks"] += 1
            request.hashes = None
        table.add(request_id, request)
        return True

    def _count(self, router_id: int, request_id: str, request: _Request) -> None:
        """Count another router's request; at a worker that is unknown here it does not count.

        Neither does one with a value that the core cannot hold. The table keeps it, so that the
        digests agree.
        """
        instance_id, dp_rank = request.worker
        worker = (self._local_of.get(instance_id, instance_id), dp_rank)
        try:
            self._bookings.remote_add(
                router_id, request_id, worker, request.hashes, request.isl, request.overlap
            )
            if request.is_prefilled:
                self._bookings.remote_prefilled(router_id, request_id)
        except (TypeError, ValueError, OverflowError):
            self.counts["malformed"] += 1

    def _is_equal(self, peer: _Peer, sequence: int, told: dict[str, Any]) -> bool:
        if peer.last is not None and sequence < peer.last:
            # Two digests below a number that no event moved on: the number was forged or corrupt.
            # Believing it would silence the router.
            if peer.last_above_digest == peer.last:
                self.counts["sequence_resets"] += 1
                peer.forget_last()
            else:
                peer.last_above_digest = peer.last
            return False
        peer.last_above_digest = None
        if peer.last != sequence:
            # Missed, or early with the missing events still to come: asking is cheap.
            peer.is_wrong = True
            return False
        is_equal = (len(peer.table.requests), peer.table.digest) == (told["count"], told["hash"])
        if not is_equal:
            self.counts["digests_differed"] += 1
        peer.is_wrong = not is_equal
        return is_equal

    def _take_part(self, router_id: int, peer: _Peer, sequence: int, state: dict[str, Any]) -> None:
        """Take a part if it follows the last one, without an event in between."""
        part = int(state["part"])
        if part == 0:
            last, is_newest = peer.last, peer.last == sequence and not peer.is_wrong
            # Later events are here already, or it is meant for another router.
            is_useless = last is not None and (sequence < last or is_newest)
            peer.end_state()
            peer.state_at = None if is_useless else sequence
        if peer.state_at != sequence or part != peer.parts:
            return
        for name, *fields in state["requests"]:
            self._keep(peer.received, str(name), _request_of(fields))
        peer.parts += 1
        if peer.parts < int(state["parts"]):
            return
        peer.table = peer.end_state()
        self._bookings.remote_drop_router(router_id)
        for name, request in peer.table.requests.items():
            self._count(router_id, name, request)
        peer.last, peer.is_wrong = sequence, False

    def _drop(self, router_id: int) -> None:
        if self._peers.pop(router_id, None) is not None:
            self.counts["dropped_routers"] += 1
            self._bookings.remote_drop_router(router_id)
        if router_id != self.router_id:
            self._gone[router_id] = None
            if len(self._gone) > _GONE_MAX:
                self._gone.popitem(last=False)


def _number(message: Mapping[str, Any], name: str) -> int:
    number = int(message[name])
    if not 0 <= number <= _U64_MAX:
        raise ValueError(f"{name} must be in 0..={_U64_MAX}, got {number}")
    return number


def _request_of(fields: Sequence[Any]) -> _Request:
    """A request, of the fields after the name in a row of a state."""
    instance_id, dp_rank, hashes, isl, overlap, is_prefilled = fields
    kept = None if hashes is None else [int(one) for one in hashes[:HASHES_MAX]]
    worker = (int(instance_id), int(dp_rank))
    return _Request(worker, kept, int(isl), int(overlap), bool(is_prefilled))


def _encode(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
