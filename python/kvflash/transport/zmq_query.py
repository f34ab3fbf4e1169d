"""The queries of ``local_index`` over ZMQ, without a broker."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import zmq

from kvflash._core import Catalog
from kvflash.errors import ConfigError, TransportError
from kvflash.transport.local_index import Answer, LocalIndex, join, question
from kvflash.transport.zmq_socket import dial, netloc

__all__ = ["ZmqQueryServer", "take_dump", "zmq_ask"]

logger = logging.getLogger(__name__)

_QUESTION_BYTES_MAX = 4_096
# Parts that wait for a router that reads slowly; above it the rest of its answer is dropped.
_QUEUE_PARTS = 100_000


class ZmqQueryServer:
    """Answers routers from a worker's local index, in its own thread.

    Args:
        index: Source of the answers.
        host: Interface to bind to.
        port: Port; 0 picks a free one.

    Attributes:
        endpoint: Address where it answers.

    Raises:
        ConfigError: The address can't be bound.
    """

    def __init__(self, index: LocalIndex, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._index = index
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES_MAX)
        self._socket.set_hwm(_QUEUE_PARTS)
        try:
            self._socket.bind(f"tcp://{netloc(self._socket, host)}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"can't answer at tcp://{host}:{port}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvflash-query", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering; blocks until done."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if not self._socket.poll(100):
                continue
            frames = self._socket.recv_multipart()
            if len(frames) != 3:
                logger.warning("dropped a question of %d frames", len(frames))
                continue
            for part in self._index.respond(frames[2]):
                # The router left, which is no error.
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart([frames[0], b"", part], zmq.NOBLOCK)
        self._context.destroy(0)


def zmq_ask(
    endpoint: str, start: int | None = None, end: int | None = None, *, timeout_s: float = 5.0
) -> Answer:
    """Query a worker; blocks.

    Args:
        endpoint: Address of the worker.
        start: First requested batch; None = everything.
        end: Last requested batch.
        timeout_s: Time without progress after which it is given up.

    Raises:
        TransportError: It does not answer in time, or the answer is malformed.
    """
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        dial(socket, endpoint)
        socket.send_multipart([b"", question(start, end)])
        parts: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise TransportError(f"{endpoint} sent nothing for {timeout_s:g} s")
            part = msgpack.unpackb(socket.recv_multipart()[-1])
            parts[int(part["part"])] = part
            if len(parts) == int(part["parts"]):
                return join(list(parts.values()))
            deadline = time.monotonic() + timeout_s
    except (zmq.ZMQError, ValueError, KeyError, TypeError) as error:
        raise TransportError(f"{endpoint}: {error!r}") from None
    finally:
        socket.close(0)
        context.term()


def take_dump(catalog: Catalog, endpoint: str, *, timeout_s: float = 5.0) -> int:
    """Restore everything that a worker holds into a catalog; blocks.

    Call it before the worker is registered: its registration then continues from the last batch of
    the dump, and its replay socket supplies later batches.

    Returns:
        Number of restored blocks.

    Raises:
        TransportError: It does not answer in time, or the answer is not a dump.
    """
    answer = zmq_ask(endpoint, timeout_s=timeout_s)
    if answer.kind != "dump":
        raise TransportError(f"{endpoint} answers with {answer.kind}: {answer.message}")
    if answer.last is None:
        # No batch has a number yet, so its first batch is 0; any other number shows a gap.
        return 0
    return catalog.restore(answer.data)[1]
