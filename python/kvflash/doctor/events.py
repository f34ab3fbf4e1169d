"""Checks engines' event sockets: answers of the replay socket, batches of the event socket."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped,unused-ignore]
import zmq

from kvflash.transport.zmq_socket import MESSAGE_BYTES_MAX, dial

#: Sockets that are open at once.
SOCKETS_MAX = 256
_END = b"\xff" * 8
#: An engine that keeps no batch from this number on answers with its end mark only. That is
#: enough for an engine whose position is unknown.
NOWHERE = 2**63 - 1
# Fields of a stored event that is an array, in order; later fields are ignored.
_STORED_FIELDS = (
    "hashes",
    "parent",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
# How long event sockets may take to accept a subscription, and how many are asked at once: each
# takes four descriptors, of which a process may have 1,024 only.
_HANDSHAKE_S = 2.0
_MONITORED_MAX = 128
#: Messages of one worker that are decoded.
_LOOKED_INTO_MAX = 1_000


@dataclass
class Contents:
    """Contents of event batches; ``fault`` describes the last message that is not a batch.

    Adapters and cache salts are counted by stored event, salts as far as they are visible.
    """

    batches: int = 0
    undecodable: int = 0
    fault: str = ""
    block_sizes: set[int] = field(default_factory=set)
    stored: int = 0
    named_adapters: int = 0
    numbered_adapters: int = 0
    salted: int = 0

    def take(self, payload: bytes) -> float | None:
        """Read one batch; returns its timestamp by the engine's clock."""
        try:
            batch = msgpack.unpackb(payload, strict_map_key=False, unicode_errors="replace")
            if isinstance(batch, dict):
                batch = [batch.get("ts"), batch["events"]]
            ts, events = batch[0], list(batch[1])
        except Exception as error:  # msgpack raises about a dozen kinds.
            self.undecodable += 1
            self.fault = f"{type(error).__name__}: {error}"[:200]
            return None
        self.batches += 1
        for event in events:
            self._take_event(event)
        return float(ts) if isinstance(ts, int | float) and not isinstance(ts, bool) else None

    def _take_event(self, event: Any) -> None:
        if isinstance(event, list | tuple) and event and event[0] == "BlockStored":
            event = dict(zip(_STORED_FIELDS, event[1:], strict=False))
        elif not (isinstance(event, dict) and event.get("type") == "BlockStored"):
            return
        self.stored += 1
        size = event.get("block_size")
        # Offloading connectors name blocks without tokens, with a block size of 0.
        if isinstance(size, int) and size > 0:
            self.block_sizes.add(size)
        if event.get("lora_name"):
            self.named_adapters += 1
        elif event.get("lora_id"):
            self.numbered_adapters += 1
        keys = event.get("extra_keys")
        first = keys[0] if isinstance(keys, list | tuple) and keys else None
        texts = [key for key in first or () if isinstance(key, str)]
        self.salted += bool(event.get("cache_salt") or set(texts) - {event.get("lora_name")})


@dataclass
class Replayed:
    """The answer of a replay socket: the number and the contents of its first batch."""

    has_answered: bool = False
    first: int | None = None
    contents: Contents = field(default_factory=Contents)
    error: str = ""


@dataclass
class Heard:
    """What an event socket sent while this process listened, by the numbers of its batches.

    ``malformed`` messages have no number, ``holes`` are numbers that did not come. ``skew_s`` is
    how far the engine's clock is ahead of ours, by the last batch; it includes the transfer time.
    Without messages, ``is_connected`` says whether there is an event socket at all.
    """

    is_connected: bool = True
    messages: int = 0
    malformed: int = 0
    first: int | None = None
    last: int | None = None
    holes: int = 0
    skew_s: float | None = None
    contents: Contents = field(default_factory=Contents)
    error: str = ""

    def take(self, parts: list[bytes]) -> None:
        """Take one message."""
        self.messages += 1
        if len(parts) < 2 or len(parts[-2]) != 8:
            self.malformed += 1
            return
        number = int.from_bytes(parts[-2], "big")
        if self.last is not None and number > self.last:
            self.holes += number - self.last - 1
        self.first = number if self.first is None else self.first
        self.last = number
        if self.messages <= _LOOKED_INTO_MAX:
            ts = self.contents.take(parts[-1])
            self.skew_s = None if ts is None else ts - time.time()


_Socket = zmq.Socket[bytes]
_Result = TypeVar("_Result", Replayed, Heard)


def ask_replays(targets: Sequence[tuple[str, int]], timeout_s: float) -> list[Replayed]:
    """Request batches from many replay sockets at once, each from a given number on.

    Only the start of each answer is read: it shows where the ring begins. The time limit is for the
    sockets of one round.
    """
    answers = [Replayed() for _ in targets]
    for at in range(0, len(targets), SOCKETS_MAX):
        one_round = zip(targets[at : at + SOCKETS_MAX], answers[at:], strict=False)
        with _dialed(zmq.DEALER, one_round) as (waiting, poller):
            deadline = time.monotonic() + timeout_s
            while waiting and (ready := _ready(poller, deadline)):
                for socket in ready:
                    _take_answer(waiting.pop(socket), socket.recv_multipart())
                    poller.unregister(socket)
                    socket.close(0)
    return answers


def _take_answer(answer: Replayed, parts: list[bytes]) -> None:
    answer.has_answered = True
    if len(parts) < 2 or len(parts[-2]) != 8:
        answer.contents.undecodable += 1
        answer.contents.fault = f"a message of {len(parts)} parts without a sequence number"
    elif parts[-2] != _END and parts[-1]:
        answer.first = int.from_bytes(parts[-2], "big")
        answer.contents.take(parts[-1])


def listen(endpoints: Sequence[str], seconds: float) -> list[Heard]:
    """What event sockets send in a while, of at most :data:`SOCKETS_MAX` of them."""
    all_heard = [Heard() for _ in endpoints[:SOCKETS_MAX]]
    targets = [(endpoint, None) for endpoint in endpoints]
    with _dialed(zmq.SUB, zip(targets, all_heard, strict=False)) as (sockets, poller):
        deadline = time.monotonic() + seconds
        while sockets and (ready := _ready(poller, deadline)):
            for socket in ready:
                sockets[socket].take(socket.recv_multipart())
    silent = zip(endpoints, all_heard, strict=False)
    _find_connected([one for one in silent if not one[1].messages and not one[1].error])
    return all_heard


def _find_connected(silent: Sequence[tuple[str, Heard]]) -> None:
    """Note which of these endpoints accept a subscription."""
    for at in range(0, len(silent), _MONITORED_MAX):
        targets = [
            ((endpoint, None), heard) for endpoint, heard in silent[at : at + _MONITORED_MAX]
        ]
        with _dialed(zmq.SUB, targets, is_monitored=True) as (sockets, _):
            deadline = time.monotonic() + _HANDSHAKE_S
            for socket, heard in sockets.items():
                left_ms = max(0, int((deadline - time.monotonic()) * 1000))
                heard.is_connected = bool(socket.get_monitor_socket().poll(left_ms))


def _ready(poller: zmq.Poller, deadline: float) -> list[_Socket]:
    """The sockets with a message, once there is one; none after the deadline."""
    left_ms = int((deadline - time.monotonic()) * 1000)
    return [socket for socket, _ in poller.poll(left_ms)] if left_ms > 0 else []


@contextlib.contextmanager
def _dialed(
    kind: int,
    targets: Iterable[tuple[tuple[str, int | None], _Result]],
    *,
    is_monitored: bool = False,
) -> Iterator[tuple[dict[_Socket, _Result], zmq.Poller]]:
    """Sockets to all endpoints, each asked for batches from its number on; results get errors."""
    context: zmq.Context[_Socket] = zmq.Context()
    sockets: dict[_Socket, _Result] = {}
    poller = zmq.Poller()
    try:
        for (endpoint, first), result in targets:
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            # An overflow here would look as if the engine had skipped batches.
            socket.setsockopt(zmq.RCVHWM, 20_000)
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            if kind == zmq.SUB:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            if is_monitored:
                # Before it connects, so as to miss nothing; later calls return the same monitor.
                socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            try:
                dial(socket, endpoint)
                if first is not None:
                    socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                result.error = str(error)
                socket.close(0)
                continue
            sockets[socket] = result
            poller.register(socket, zmq.POLLIN)
        yield sockets, poller
    finally:
        context.destroy(0)
