"""One TCP connection that carries frames, for client and server."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from kvflash.errors import DecodeError, InvalidArgumentError, TransportError
from kvflash.runtime.frame import FrameReader
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import GoneError
from kvflash.servers import keep_alive

# Kernel buffer for a slow reader. The default would be megabytes per stream.
SOCKET_BUFFER_BYTES = 256 * 1024


class Connection(asyncio.Protocol):
    """Sends and receives frames."""

    def __init__(
        self, limits: RuntimeLimits, on_made: Callable[[Connection], None] | None = None
    ) -> None:
        self._limits = limits
        self._reader = FrameReader(limits.frame_bytes_max)
        self._frames: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport
        self._fault: InvalidArgumentError | DecodeError | None = None
        self._is_reading_paused = False
        self._on_made = on_made
        # Called once when the peer is gone.
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        # On a server, set while it answers: then it expects little input.
        self.is_answering = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(self._limits.send_buffer_bytes)
        watch_socket(transport.get_extra_info("socket"), self._limits)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return
        try:
            frames = self._reader.feed(data)
        except (InvalidArgumentError, DecodeError) as error:
            self._fault = error
            frames = []
        self._frames.extend(frames)
        self._bytes += sum(len(payload) for _, payload in frames)
        if self._bytes > self._limits.receive_buffer_bytes and self.is_answering:
            # Keep reading to notice the peer's end; no input is expected during an answer.
            self.abort()
        elif self._bytes > self._limits.receive_buffer_bytes and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()
        _wake(self._waiter)

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _wake(self._writable)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        _wake(self._waiter)
        _wake(self._writable)
        self._writable = None
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    # -- our own

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame; a TransportError says that the peer hung up."""
        while not self._frames:
            if self._fault is not None:
                raise self._fault
            if self.is_lost:
                amid = " within a frame" if self.is_amid else ""
                raise TransportError(f"the connection was closed{amid}")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._frames.popleft()
        self._bytes -= len(item[1])
        if self._is_reading_paused and self._bytes <= self._limits.receive_buffer_bytes // 2:
            self._is_reading_paused = False
            if not self.is_lost:
                self._transport.resume_reading()
        return item

    @property
    def has_frames(self) -> bool:
        """Whether frames have arrived that are not received yet."""
        return bool(self._frames) or self._fault is not None

    @property
    def is_amid(self) -> bool:
        """Whether a part of a frame has arrived."""
        return self._reader.is_amid

    def write(self, data: bytes) -> None:
        if not self.is_lost:
            self._transport.write(data)

    async def send(self, data: bytes) -> None:
        """Send; wait while more than send_buffer_bytes are unsent. GoneError: the peer is gone."""
        if self.is_lost:
            raise GoneError("the connection is closed")
        self._transport.write(data)
        if self._writable is not None:
            # Several may wait; cancelling one must not wake the others.
            await asyncio.shield(self._writable)
            if self.is_lost:
                raise GoneError("the connection was closed")

    def close(self) -> None:
        """Close once everything written is sent."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()


def watch_socket(sock: socket.socket, limits: RuntimeLimits) -> None:
    """Let the kernel detect a dead peer, and buffer little for a slow one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    # Unacknowledged bytes reveal a dead peer too, sooner than the kernel's default of 15 minutes.
    keep_alive(sock, ("TCP_USER_TIMEOUT", int(limits.peer_silence_s * 1e3)))


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
