"""One TCP connection that carries frames, for client and server."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from kvflash.errors import DecodeError, TransportError
from kvflash.runtime.frame import HEAD_BYTES, FrameReader
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
        self._news, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport
        self._fault: DecodeError | None = None
        self._on_made = on_made
        # Called once when the peer is gone; while it is set, little input is expected.
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False

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
        except DecodeError as error:
            self._fault = error
            frames = []
        self._frames.extend(frames)
        # With their heads: frames without a payload take memory, too.
        self._bytes += sum(HEAD_BYTES + len(payload) for _, payload in frames)
        if self._bytes > self._limits.receive_buffer_bytes:
            if self.on_lost is None:
                self._transport.pause_reading()
            else:
                # Without reading, the peer's end would go unnoticed.
                self.abort()
        self._news.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._news.set()
        self._writable.set()
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
            self._news.clear()
            await self._news.wait()
        item = self._frames.popleft()
        self._bytes -= HEAD_BYTES + len(item[1])
        if self._bytes <= self._limits.receive_buffer_bytes // 2:
            self._transport.resume_reading()
        return item

    @property
    def has_frames(self) -> bool:
        """Whether frames have arrived that are not received yet."""
        return bool(self._frames) or self._fault is not None

    @property
    def is_amid(self) -> bool:
        """Whether a part of a frame has arrived."""
        return self._reader.waiting_bytes > 0

    def write(self, data: bytes) -> None:
        if not self.is_lost:
            self._transport.write(data)

    async def send(self, data: bytes) -> None:
        """Send; wait while more than send_buffer_bytes are unsent. GoneError: the peer is gone."""
        if self.is_lost:
            raise GoneError("the connection is closed")
        self._transport.write(data)
        if not self._writable.is_set():
            await self._writable.wait()
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
