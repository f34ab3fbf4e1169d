"""Waits for many ZMQ sockets at the cost of the active ones; zmq.Poller checks all each time."""

import contextlib
import selectors
import socket as sockets

import zmq


class Poller:
    """Finds its sockets with messages; it and they are used by one thread, besides :meth:`wake`.

    A ZMQ socket's descriptor is readable until the socket is checked, whatever remains to be
    received (``ZMQ_FD`` in zmq_getsockopt(3)). So a socket that had a message is checked again
    before the next wait, until it has none. Between polls a socket may be used only if the last one
    returned it; after other uses, register it again or call :meth:`look_at`.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarm, self._waker = sockets.socketpair()
        for end in (self._alarm, self._waker):
            end.setblocking(False)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        # In the order in which they became ready.
        self._looked_at: dict[zmq.Socket[bytes], None] = {}

    def register(self, socket: zmq.Socket[bytes]) -> None:
        self._selector.register(socket.fileno(), selectors.EVENT_READ, socket)
        # Messages that it took in earlier were signalled before the registration.
        self._looked_at[socket] = None

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        """Stop watching a socket. Call before closing it."""
        self._selector.unregister(socket.fileno())
        self._looked_at.pop(socket, None)

    def look_at(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether this registered socket has a message; then the next ``poll`` returns it."""
        is_readable = _is_readable(socket)
        if is_readable:
            self._looked_at[socket] = None
        return is_readable

    def wake(self) -> None:
        """Let :meth:`poll` return, now or when it is called next; from any thread."""
        # One that is full wakes it, too; a closed one has nothing to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def poll(self, timeout_ms: int | None) -> list[zmq.Socket[bytes]]:
        """Wait for sockets with messages; None waits without limit.

        Empty after a timeout, and possibly after :meth:`wake`.
        """
        while True:
            is_waiting, is_woken = not self._looked_at, False
            timeout_s = None if timeout_ms is None else timeout_ms / 1000
            for key, _ in self._selector.select(timeout_s if is_waiting else 0):
                if key.data is None:
                    self._alarm.recv(4_096)
                    is_woken = True
                else:
                    self._looked_at[key.data] = None
            ready = [s for s in self._looked_at if _is_readable(s)]
            self._looked_at = dict.fromkeys(ready)
            if ready or is_woken or (is_waiting and timeout_ms is not None):
                return ready

    def close(self) -> None:
        """Close what :meth:`wake` uses; only when no other thread calls that any more."""
        self._selector.close()
        self._alarm.close()
        self._waker.close()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
