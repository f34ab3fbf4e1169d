"""Engines' publishers for measuring who listens: all batches are encoded before the clock starts.

Two kinds. ``zmq`` is libzmq behind pyzmq, as vLLM publishes; it costs about as much processor time
as an indexer that listens to it. ``wire`` writes the same bytes to its socket, by hand (ZMTP 3.0,
https://rfc.zeromq.org/spec/23/): it costs the kernel's copy and nothing else, so that what is
measured on a small machine is the indexer.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

import msgpack
import zmq

BLOCKS, BLOCK_SIZE = 8, 16

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
# Every batch has these behind the two tokens that make it different from all others.
_TAIL = [at * 7_919 % 150_000 for at in range(BLOCKS * BLOCK_SIZE - 2)]


def tokens_of(publisher: int, batch: int) -> list[int]:
    """Tokens of a batch's blocks: no other batch begins with them."""
    return [publisher, batch, *_TAIL]


def message(publisher: int, batch: int) -> list[bytes]:
    """One stored event of new blocks without a parent, as vLLM publishes it."""
    hashes = [(publisher << 48) + batch * BLOCKS + n + 1 for n in range(BLOCKS)]
    event = ["BlockStored", hashes, None, tokens_of(publisher, batch), BLOCK_SIZE, None, "GPU"]
    return [b"kv-events", struct.pack(">Q", batch), msgpack.packb([0.0, [event], 0])]


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | _LONG, len(body)) + body
    return struct.pack(">BB", flags, len(body)) + body


def _command(name: bytes, rest: bytes) -> bytes:
    return _frame(_COMMAND, bytes([len(name)]) + name + rest)


class _Wire:
    """The server's end of one ZMTP connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_GREETING)
        self._read(len(_GREETING))
        kind = b"\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
        connection.sendall(_command(b"READY", kind))
        assert self.frame()[1].startswith(b"\x05READY")
        # A subscription to everything: a message in ZMTP 3.0, a command in 3.1.
        assert self.frame()[1] in (b"\x01", b"\x09SUBSCRIBE")

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            if not part:
                raise ConnectionError("the subscriber went away")
            data += part
        return data

    def frame(self) -> tuple[int, bytes]:
        flags = self._read(1)[0]
        length = struct.unpack(">Q", self._read(8))[0] if flags & _LONG else self._read(1)[0]
        return flags, self._read(length)

    def answer(self) -> None:
        """Read a frame; a heartbeat wants an answer."""
        flags, body = self.frame()
        if flags & _COMMAND and body.startswith(b"\x04PING"):
            self.connection.sendall(_command(b"PONG", body[7:]))


def _wire(publisher: int, batches: int, pipe: Connection) -> None:
    stream = bytearray()
    for batch in range(batches):
        topic, number, payload = message(publisher, batch)
        stream += _frame(_MORE, topic) + _frame(_MORE, number) + _frame(0, payload)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        subscribers = [_Wire(server.accept()[0])]
        pipe.send("subscribed")
        pipe.recv()
        subscribers[0].connection.sendall(stream)
        while True:
            waited = {subscriber.connection: subscriber for subscriber in subscribers}
            for ready in wait([pipe, server, *waited]):
                if ready is pipe:
                    return
                if ready is server:
                    # Who comes later, an indexer that recovers, has nothing to miss.
                    subscribers.append(_Wire(server.accept()[0]))
                    continue
                try:
                    waited[ready].answer()
                except OSError:
                    subscribers.remove(waited[ready])


def _zmq(publisher: int, batches: int, pipe: Connection) -> None:
    messages = [message(publisher, batch) for batch in range(batches)]
    pub = zmq.Context().socket(zmq.XPUB)
    pub.setsockopt(zmq.SNDHWM, 0)
    pipe.send(pub.bind_to_random_port("tcp://127.0.0.1"))
    assert pub.recv().startswith(b"\x01")
    pipe.send("subscribed")
    pipe.recv()
    for parts in messages:
        pub.send_multipart(parts, copy=False)
    pipe.recv()


KINDS = {"wire": _wire, "zmq": _zmq}


class Publishers:
    """Publisher processes 1 to ``count``, each with its batches ready to be sent."""

    def __init__(self, kind: str, count: int, batches: int) -> None:
        self.numbers = range(1, count + 1)
        self.batches = batches
        self._pipes: list[Connection] = []
        self._processes = []
        for number in self.numbers:
            near, far = multiprocessing.Pipe()
            arguments = (number, batches, far)
            process = multiprocessing.Process(target=KINDS[kind], args=arguments, daemon=True)
            process.start()
            self._pipes.append(near)
            self._processes.append(process)
        ports = [pipe.recv() for pipe in self._pipes]
        self.workers = ",".join(
            f"{n}=tcp://127.0.0.1:{port}" for n, port in zip(self.numbers, ports, strict=True)
        )

    def wait_for_subscriber(self) -> None:
        for pipe in self._pipes:
            assert pipe.recv() == "subscribed"

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send("end")
            process.join(5)
            process.kill()
            process.join()


@contextmanager
def publishers(kind: str, count: int, batches: int) -> Iterator[Publishers]:
    """Publishers that end with the block."""
    made = Publishers(kind, count, batches)
    try:
        yield made
    finally:
        made.close()
