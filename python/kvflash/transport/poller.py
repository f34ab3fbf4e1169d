"""Waiting for many ZMQ sockets at the cost of those that have something.

``zmq.Poller`` looks at every socket in every turn: with thousands of publishers a turn takes a
millisecond, whoever has spoken. Here the operating system says whose turn it is.
"""

from __future__ import annotations

import selectors

import zmq

__all__ = ["Poller"]


class Poller:
    """Tells which of its sockets can be received from.

    A ZMQ socket's descriptor says when to look at the socket, not what there is: it is readable
    until somebody looks, whatever is left to receive then. So a socket that had something is looked
    at again before the next wait, until it has nothing.

    Sockets are used by one thread, and once registered only between a ``poll`` that returned them
    and the next: what they take in meanwhile, nobody would be told. Register a socket again to have
    it looked at, or ask :meth:`look_at`.

    Source: ``ZMQ_FD`` in zmq_getsockopt(3).
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # In the order in which they came up.
        self._looked_at: dict[zmq.Socket[bytes], None] = {}

    def register(self, socket: zmq.Socket[bytes]) -> None:
        """Watch a socket from now on."""
        self._selector.register(socket.fileno(), selectors.EVENT_READ, socket)
        # What it took in before showed in its descriptor before.
        self._looked_at[socket] = None

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        """Watch it no more. Must come before its close."""
        self._selector.unregister(socket.fileno())
        self._looked_at.pop(socket, None)

    def look_at(self, socket: zmq.Socket[bytes]) -> bool:
        """Can this registered socket be received from? Then the next ``poll`` returns it."""
        is_readable = _is_readable(socket)
        if is_readable:
            self._looked_at[socket] = None
        return is_readable

    def poll(self, timeout_ms: int | None) -> list[zmq.Socket[bytes]]:
        """Wait until sockets can be received from.

        Args:
            timeout_ms: Longest wait, None = until something comes.

        Returns:
            Who can be received from; empty after ``timeout_ms``.

        Cost: O(sockets that have or had something).
        """
        while True:
            is_waiting = not self._looked_at
            timeout_s = None if timeout_ms is None else timeout_ms / 1000
            for key, _ in self._selector.select(timeout_s if is_waiting else 0):
                self._looked_at[key.data] = None
            ready = [s for s in self._looked_at if _is_readable(s)]
            self._looked_at = dict.fromkeys(ready)
            if ready or (is_waiting and timeout_ms is not None):
                return ready

    def close(self) -> None:
        """Free the selector; the sockets are their owner's."""
        self._selector.close()


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
