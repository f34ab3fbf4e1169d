"""Checks engines' event sockets: answers of the replay socket, batches of the event socket."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import zmq

from kvflash.transport.zmq_socket import dial

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
_FRAME_BYTES_MAX = 16 * 1024 * 1024
#: Messages of one worker that are decoded.
_LOOKED_INTO_MAX = 1_000


@dataclass
class Contents:
    """Contents of event batches.

    Attributes:
        batches: Batches that could be read.
        undecodable: Messages that are not batches; ``fault`` describes the last one.
        block_sizes: Tokens in a block, from stored events that have it.
        stored: Stored events.
        named_adapters: Stored events with an adapter's name.
        numbered_adapters: Stored events with an adapter's number only.
        salted: Stored events with a cache salt, as far as that is visible.
    """

    batches: int = 0
    undecodable: int = 0
    fault: str = ""
    block_sizes: dict[int, int] = field(default_factory=dict)
    stored: int = 0
    named_adapters: int = 0
    numbered_adapters: int = 0
    salted: int = 0

    def take(self, payload: bytes) -> float | None:
        """Read one batch; returns its timestamp by the engine's clock."""
        try:
            batch = msgpack.unpackb(
                payload, raw=False, strict_map_key=False, unicode_errors="replace"
            )
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
            self.block_sizes[size] = self.block_sizes.get(size, 0) + 1
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
    """The answer of a replay socket.

    Attributes:
        has_answered: Whether anything arrived.
        has_ended: Whether the end mark arrived.
        first: Number of the first batch in the answer.
        contents: Contents of the batches.
        error: Why the socket can't be used.
    """

    has_answered: bool = False
    has_ended: bool = False
    first: int | None = None
    contents: Contents = field(default_factory=Contents)
    error: str = ""


@dataclass
class Heard:
    """What an event socket sent while this process listened.

    Attributes:
        messages: Number of messages; ``malformed`` of them have no sequence number.
        first: Number of the first batch.
        last: Number of the last batch.
        holes: Numbers missing in between.
        skew_s: How far the engine's clock is ahead of ours, by the last batch; includes the
            transfer time.
        contents: Contents of the batches.
        error: Why the socket can't be used.
    """

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


def ask_replays(targets: Sequence[tuple[str, int]], timeout_s: float) -> list[Replayed]:
    """Request batches from many replay sockets at once, each from a given number on.

    Only the start of each answer is read: it shows where the ring begins.

    Args:
        targets: Endpoint and first requested number of each.
        timeout_s: Time limit for the sockets of one round.
    """
    answers: list[Replayed] = []
    for at in range(0, len(targets), SOCKETS_MAX):
        answers += _ask_round(targets[at : at + SOCKETS_MAX], timeout_s)
    return answers


def _ask_round(targets: Sequence[tuple[str, int]], timeout_s: float) -> list[Replayed]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    answers = [Replayed() for _ in targets]
    poller = zmq.Poller()
    waiting: dict[zmq.Socket[bytes], Replayed] = {}
    try:
        for (endpoint, first), answer in zip(targets, answers, strict=True):
            socket = _open(context, zmq.DEALER)
            try:
                dial(socket, endpoint)
                socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                answer.error = str(error)
                socket.close(0)
                continue
            waiting[socket] = answer
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_ms = int((deadline - time.monotonic()) * 1000)
            ready = poller.poll(left_ms) if left_ms > 0 else []
            if not ready:
                break
            for socket, _ in ready:
                if _take_answer(waiting[socket], socket):
                    del waiting[socket]
                    poller.unregister(socket)
                    socket.close(0)
    finally:
        context.destroy(0)
    return answers


def _take_answer(answer: Replayed, socket: zmq.Socket[bytes]) -> bool:
    """Take the start of an answer; true when no more is needed."""
    parts = socket.recv_multipart()
    answer.has_answered = True
    if len(parts) < 2 or len(parts[-2]) != 8:
        answer.contents.undecodable += 1
        answer.contents.fault = f"a message of {len(parts)} parts without a sequence number"
        return True
    if parts[-2] == _END or not parts[-1]:
        answer.has_ended = True
        return True
    answer.first = int.from_bytes(parts[-2], "big")
    answer.contents.take(parts[-1])
    return True


def listen(endpoints: Iterable[str], seconds: float) -> list[Heard]:
    """Listen at event sockets for a while, at most :data:`SOCKETS_MAX` of them.

    Returns:
        What each socket sent; shorter than ``endpoints`` above the limit.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    all_heard: list[Heard] = []
    sockets: dict[zmq.Socket[bytes], Heard] = {}
    try:
        for endpoint in list(endpoints)[:SOCKETS_MAX]:
            heard = Heard()
            all_heard.append(heard)
            socket = _open(context, zmq.SUB)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            try:
                dial(socket, endpoint)
            except zmq.ZMQError as error:
                heard.error = str(error)
                socket.close(0)
                continue
            sockets[socket] = heard
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while sockets and (left_ms := int((deadline - time.monotonic()) * 1000)) > 0:
            for socket, _ in poller.poll(left_ms):
                sockets[socket].take(socket.recv_multipart())
    finally:
        context.destroy(0)
    return all_heard


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # An overflow here would look as if the engine had skipped batches.
    socket.setsockopt(zmq.RCVHWM, 20_000)
    socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_BYTES_MAX)
    return socket
