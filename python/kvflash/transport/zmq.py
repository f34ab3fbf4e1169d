"""Engine events over ZMQ: SUB for the stream, DEALER for its repair.

One thread serves all publishers. It never looks into a frame: it hands batches of messages to the
core, which says what to do: go on, or ask the engine to replay from a sequence number.

While a replay runs, the publisher's SUB socket is not read; its frames wait there (bounded by the
socket's high-water mark; what is dropped beyond it shows as the next gap).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvflash._core import Catalog
from kvflash.transport.drain import find_drain
from kvflash.transport.options import ZmqOptions
from kvflash.transport.poller import Poller
from kvflash.transport.zmq_socket import dial, explain, open_replay, open_stream

__all__ = ["ZmqReceiver"]

logger = logging.getLogger(__name__)

#: A part of a message: copied, or as the socket's own buffer.
_Part = bytes | zmq.Frame

_SEQUENCE_BYTES = 8
_END_OF_REPLAY = b"\xff" * _SEQUENCE_BYTES
# ZMQ does not connect again after a breach of protocol, such as a frame above the limit. It says
# so by saying nothing: of every other attempt it tells at once.
_RECONNECT_GRACE_S = 1.0


@dataclass
class _Replay:
    """A repair under way: from which number, until when, and what waits for its end."""

    first: int
    deadline: float
    is_verifying: bool
    waiting: list[list[_Part]] = field(default_factory=list)
    socket: zmq.Socket[bytes] | None = None
    has_answered: bool = False
    has_ended: bool = False


@dataclass
class _Subscription:
    publisher: int
    endpoint: str
    replay_endpoint: str | None
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    replay: _Replay | None = None
    connections: int = 0
    is_connected: bool = False
    reconnect_at: float | None = None
    wants_verify: bool = False
    is_held: bool = False
    has_failed: bool = False


class ZmqReceiver:
    """Feeds a catalog from the engines' ZMQ sockets.

    Args:
        catalog: Where frames go.
        options: Limits.
    """

    def __init__(self, catalog: Catalog, options: ZmqOptions | None = None) -> None:
        self._catalog = catalog
        self._options = options or ZmqOptions()
        self._drain = find_drain() if self._options.is_native else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The default, 1,023, is enough for 340 publishers: a SUB and two ends of its monitor each.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        # Orders are bounded by registrations, which the core limits.
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_address = f"inproc://kvflash-wake-{id(self)}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(self._wake_address)
        self._wake_lock = threading.Lock()
        self._poller = Poller()
        self._subscriptions: dict[int, _Subscription] = {}
        # Those that may have a deadline: looked at in every turn, so that the others need not be.
        self._timed: dict[int, _Subscription] = {}
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvflash-zmq", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def obey(self, order: tuple[str, int, str, str | None]) -> None:
        """Carry out what :meth:`Catalog.next_order` returned; returns at once."""
        kind, publisher, endpoint, replay_endpoint = order
        if kind in ("subscribe", "hold"):
            is_held = kind == "hold"
            self.subscribe(publisher, endpoint, replay_endpoint, is_held=is_held)
        elif kind == "pause":
            self.pause(publisher)
        elif kind == "resume":
            self.resume(publisher)
        else:
            self.unsubscribe(publisher)

    def subscribe(
        self,
        publisher: int,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        is_held: bool = False,
    ) -> None:
        """Connect to a publisher; returns at once.

        Args:
            publisher: Its number in the catalog.
            endpoint: Address of its PUB socket.
            replay_endpoint: Address of its replay socket, where it has one.
            is_held: Read nothing before :meth:`resume`; messages wait in the socket.
        """
        self._order(lambda: self._subscribe(publisher, endpoint, replay_endpoint, is_held))

    def pause(self, publisher: int) -> None:
        """Read no more of a publisher; what the socket can't hold meanwhile is a gap later."""
        self._order(lambda: self._hold(publisher))

    def resume(self, publisher: int) -> None:
        """Read on; returns at once."""
        self._order(lambda: self._release(publisher))

    def unsubscribe(self, publisher: int) -> None:
        """Close a publisher's sockets; returns at once."""
        self._order(lambda: self._unsubscribe(publisher))

    def stop(self) -> None:
        """Close everything and wait for the thread."""
        self._order(None)
        self._thread.join()

    def _order(self, order: Callable[[], None] | None) -> None:
        self._orders.put(order)
        # A full wake-up socket means that the thread is about to look anyway, a closed one that it
        # has ended: what it reported then is all there is to say.
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):
            self._wake.send(b"", zmq.NOBLOCK)

    # -- everything below runs on the thread

    def _run(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.connect(self._wake_address)
        self._add(wake, lambda: self._obey(wake))
        try:
            while not self._is_stopping:
                for ready in self._poller.poll(self._poll_timeout_ms()):
                    # A handler may have closed a socket that is still on this list.
                    handler = self._handlers.get(ready)
                    if handler is not None:
                        self._call(handler)
                self._look_at_deadlines()
        except Exception:
            logger.exception("the event transport failed; index state is no longer updated")
            for publisher in self._subscriptions:
                self._catalog.set_status(publisher, "failed", "the event transport failed")
        finally:
            for publisher in list(self._subscriptions):
                self._unsubscribe(publisher)
            wake.close(0)
            with self._wake_lock:
                self._wake.close(0)
            self._context.destroy(0)
            self._poller.close()

    def _call(self, handler: Callable[[], None]) -> None:
        try:
            handler()
        except Exception:
            # One publisher's trouble must not end the others' service.
            logger.exception("handling of a socket failed; it is served on")

    def _add(self, socket: zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        self._handlers[socket] = handler
        self._poller.register(socket)

    def _close(self, socket: zmq.Socket[bytes] | None) -> None:
        if socket is None:
            return
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)
        socket.close(0)

    def _poll_timeout_ms(self) -> int | None:
        deadlines = [s.replay.deadline for s in self._timed.values() if s.replay]
        deadlines += [s.reconnect_at for s in self._timed.values() if s.reconnect_at]
        if not deadlines:
            self._timed.clear()
            return None
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1)

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        for subscription in list(self._timed.values()):
            replay, reconnect_at = subscription.replay, subscription.reconnect_at
            if replay is not None and replay.deadline <= now:
                self._call(partial(self._give_up_late, subscription, replay))
            if reconnect_at is not None and reconnect_at <= now:
                self._call(partial(self._reopen_broken, subscription))

    def _obey(self, wake: zmq.Socket[bytes]) -> None:
        while wake.poll(0):
            wake.recv()
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if order is None:
                self._is_stopping = True
                return
            self._call(order)

    def _subscribe(
        self, publisher: int, endpoint: str, replay_endpoint: str | None, is_held: bool
    ) -> None:
        try:
            socket, monitor = open_stream(self._context, self._options)
        except zmq.ZMQError as error:
            message = f"can't open a socket: {explain(error)}"
            logger.warning("engine at %s: %s", endpoint, message)
            self._catalog.set_status(publisher, "failed", message)
            return
        subscription = _Subscription(
            publisher, endpoint, replay_endpoint, socket, monitor, is_held=is_held
        )
        self._subscriptions[publisher] = subscription
        self._connect(subscription)
        self._resume(subscription)

    def _hold(self, publisher: int) -> None:
        subscription = self._subscriptions.get(publisher)
        if subscription is None or subscription.is_held or subscription.has_failed:
            return
        subscription.is_held = True
        self._pause(subscription)
        self._catalog.set_status(publisher, "paused")

    def _release(self, publisher: int) -> None:
        subscription = self._subscriptions.get(publisher)
        if subscription is None or not subscription.is_held:
            return
        subscription.is_held = False
        is_open = subscription.is_connected or subscription.endpoint.startswith("inproc://")
        if not subscription.has_failed:
            self._catalog.set_status(publisher, "active" if is_open else "pending")
        if subscription.replay is not None:
            return
        self._resume(subscription)
        if subscription.is_connected and subscription.replay_endpoint is not None:
            self._on_connected(subscription)

    def _connect(self, subscription: _Subscription) -> None:
        publisher, endpoint = subscription.publisher, subscription.endpoint
        self._add(subscription.monitor, lambda: self._on_monitor(subscription))
        try:
            dial(subscription.socket, endpoint)
        except zmq.ZMQError as error:
            subscription.has_failed = True
            self._catalog.set_status(publisher, "failed", f"can't connect to {endpoint}: {error}")
            return
        if endpoint.startswith("inproc://"):
            # Within a process there is no handshake to wait for.
            self._catalog.set_status(publisher, "active")

    def _reopen_broken(self, subscription: _Subscription) -> None:
        # A turn may have taken longer than the grace: what was told meanwhile comes first.
        self._on_monitor(subscription)
        now = time.monotonic()
        if subscription.reconnect_at is None or subscription.reconnect_at > now:
            return
        publisher, endpoint = subscription.publisher, subscription.endpoint
        limit = self._options.message_bytes_max
        message = f"breach of protocol, such as a frame above {limit} bytes; connecting again"
        try:
            socket, monitor = open_stream(self._context, self._options)
        except zmq.ZMQError as error:
            subscription.reconnect_at = now + _RECONNECT_GRACE_S
            message = f"{message} fails: {explain(error)}"
            logger.warning("engine at %s: %s", endpoint, message)
            self._catalog.set_status(publisher, "pending", message)
            return
        subscription.reconnect_at = None
        logger.warning("engine at %s: %s", endpoint, message)
        self._catalog.set_status(publisher, "pending", message)
        self._close_stream(subscription)
        subscription.socket, subscription.monitor = socket, monitor
        self._connect(subscription)
        if subscription.replay is None:
            self._resume(subscription)

    def _unsubscribe(self, publisher: int) -> None:
        subscription = self._subscriptions.pop(publisher, None)
        self._timed.pop(publisher, None)
        if subscription is None:
            return
        if subscription.replay is not None:
            self._close(subscription.replay.socket)
        self._close_stream(subscription)

    def _close_stream(self, subscription: _Subscription) -> None:
        subscription.socket.disable_monitor()
        self._close(subscription.monitor)
        self._close(subscription.socket)

    def _on_monitor(self, subscription: _Subscription) -> None:
        while subscription.monitor.poll(0):
            event = parse_monitor_message(subscription.monitor.recv_multipart())
            kind = event["event"]
            subscription.is_connected = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            subscription.reconnect_at = None
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                subscription.connections += 1
                self._catalog.set_status(subscription.publisher, "active")
                if subscription.replay_endpoint is not None:
                    self._on_connected(subscription)
            elif kind == zmq.EVENT_DISCONNECTED:
                subscription.reconnect_at = time.monotonic() + _RECONNECT_GRACE_S
                self._timed[subscription.publisher] = subscription
                self._catalog.set_status(
                    subscription.publisher, "pending", "disconnected; connecting again"
                )
            elif kind == zmq.EVENT_CONNECT_RETRIED:
                message = f"no connection to {subscription.endpoint} yet; trying again"
                self._catalog.set_status(subscription.publisher, "pending", message)

    def _on_connected(self, subscription: _Subscription) -> None:
        if subscription.is_held:
            # What is missing by then is looked for when it reads.
            return
        if subscription.replay is not None:
            # The repair under way began on the previous connection: check again when it is over.
            subscription.wants_verify = True
            return
        position = self._catalog.position(subscription.publisher)
        if position is None:
            return
        wanted, last = position
        if last is None:
            # Catch up with what was published before the connection.
            self._start_replay(subscription, wanted, is_verifying=False, waiting=[])
        else:
            # A new connection, or the first one of a stream that goes on from what is known of it.
            self._start_replay(subscription, last, is_verifying=True, waiting=[])

    def _on_stream(self, subscription: _Subscription) -> None:
        if self._drain is None:
            self._offer(subscription, self._receive(subscription))
            return
        socket, limit = subscription.socket, self._options.batch_messages
        _, unread = self._drain.take(self._catalog, subscription.publisher, socket, limit)
        if unread is not None:
            self._offer(subscription, [list(unread)])

    def _receive(self, subscription: _Subscription) -> list[list[_Part]]:
        messages: list[list[_Part]] = []
        receive = subscription.socket.recv
        try:
            for _ in range(self._options.batch_messages):
                # Frames instead of recv_multipart: half the time, and no copy of the payload.
                part = receive(zmq.NOBLOCK, copy=False)
                parts: list[_Part] = [part]
                while part.more:
                    part = receive(zmq.NOBLOCK, copy=False)
                    parts.append(part)
                messages.append(parts)
        except zmq.Again:
            pass
        return messages

    def _offer(self, subscription: _Subscription, messages: list[list[_Part]]) -> None:
        """Hand over live messages; at a gap, ask for a replay or give the missing ones up."""
        while messages:
            consumed, outcome, first, last = self._catalog.take(subscription.publisher, messages)
            if outcome != "gap":
                return
            messages = messages[consumed:]
            if subscription.replay_endpoint is not None:
                self._start_replay(subscription, first, is_verifying=False, waiting=messages)
                return
            logger.warning(
                "engine at %s: batches %d..%d are missing and it has no replay endpoint; the index "
                "may be wrong about it",
                subscription.endpoint,
                first,
                last,
            )
            self._catalog.give_up(subscription.publisher, last + 1)

    def _start_replay(
        self,
        subscription: _Subscription,
        first: int,
        *,
        is_verifying: bool,
        waiting: list[list[_Part]],
    ) -> None:
        endpoint = subscription.replay_endpoint or ""
        replay = _Replay(first, self._replay_deadline(), is_verifying, waiting)
        subscription.replay = replay
        self._catalog.replay_started(subscription.publisher)
        self._timed[subscription.publisher] = subscription
        self._pause(subscription)
        try:
            # One of its own for every replay: late answers to an earlier one can't be mistaken.
            socket = open_replay(self._context, self._options, endpoint, first)
        except zmq.ZMQError as error:
            self._end_replay(subscription, f"can't reach {endpoint}: {explain(error)}")
            return
        replay.socket = socket
        self._add(socket, lambda: self._on_replay(subscription, replay, socket))

    def _replay_deadline(self) -> float:
        return time.monotonic() + self._options.replay_timeout_s

    def _on_replay(
        self, subscription: _Subscription, replay: _Replay, socket: zmq.Socket[bytes]
    ) -> None:
        messages: list[list[bytes]] = []
        is_over = False
        try:
            for _ in range(self._options.batch_messages):
                parts = socket.recv_multipart(zmq.NOBLOCK)
                if len(parts) < 2 or parts[-2] == _END_OF_REPLAY or not parts[-1]:
                    is_over = True
                    replay.has_ended = len(parts) > 1 and parts[-2] == _END_OF_REPLAY
                    break
                messages.append(parts)
        except zmq.Again:
            pass
        replay.deadline = self._replay_deadline()
        publisher = subscription.publisher
        if replay.is_verifying and (messages or is_over) and not replay.has_answered:
            head = (messages[0][-2], messages[0][-1]) if messages else None
            if head is not None and len(head[0]) != _SEQUENCE_BYTES:
                self._end_replay(subscription, "it answered with something else than frames")
                return
            if not self._catalog.verify(publisher, head):
                # Another stream: what follows is its tail only, so ask for it from its start.
                self._replay_again(subscription, 0)
                return
        replay.has_answered = replay.has_answered or bool(messages)
        while messages:
            consumed, outcome, first, last = self._catalog.take(publisher, messages, replayed=True)
            if outcome != "gap":
                break
            if self._has_progressed(subscription, replay):
                # The engine's queue overflowed in the middle of its answer: ask for the rest again.
                self._replay_again(subscription, first)
                return
            # The engine's ring begins later than what was asked for. What came live meanwhile is
            # not missing, whatever the answer says.
            live = self._first_waiting(subscription, replay)
            if live is not None and live <= last:
                self._catalog.give_up(publisher, live)
                replay.first = live
                self._end_replay(subscription, None)
                return
            self._catalog.give_up(publisher, last + 1)
            replay.first = last + 1
            messages = messages[consumed:]
        if is_over:
            self._end_replay(subscription, None)

    def _has_progressed(self, subscription: _Subscription, replay: _Replay) -> bool:
        """Has it brought anything that was wanted? Then asking again ends some time."""
        position = self._catalog.position(subscription.publisher)
        return position is not None and position[0] > replay.first + replay.is_verifying

    def _replay_again(self, subscription: _Subscription, first: int) -> None:
        replay = subscription.replay
        if replay is not None:
            self._close(replay.socket)
            self._start_replay(subscription, first, is_verifying=False, waiting=replay.waiting)

    def _first_waiting(self, subscription: _Subscription, replay: _Replay) -> int | None:
        """Number of the first live frame that waits for the end of the replay."""
        if not replay.waiting:
            replay.waiting.extend(self._receive(subscription))
        for parts in replay.waiting:
            part = parts[-2] if len(parts) > 1 else b""
            number = part.bytes if isinstance(part, zmq.Frame) else part
            if len(number) == _SEQUENCE_BYTES:
                return int.from_bytes(number, "big")
        return None

    def _give_up_late(self, subscription: _Subscription, replay: _Replay) -> None:
        replay.deadline = self._replay_deadline()
        if replay.socket is not None and self._poller.look_at(replay.socket):
            # It is the turn that took so long: the answer is here.
            return
        if self._has_progressed(subscription, replay):
            # The end of the answer was lost when the engine's queue overflowed.
            position = self._catalog.position(subscription.publisher)
            self._replay_again(subscription, position[0] if position else 0)
            return
        timeout_s = self._options.replay_timeout_s
        message = f"{subscription.replay_endpoint} sent nothing for {timeout_s:g} s"
        self._end_replay(subscription, message)

    def _end_replay(self, subscription: _Subscription, error: str | None) -> None:
        replay = subscription.replay
        if replay is None:
            return
        subscription.replay = None
        self._close(replay.socket)
        publisher = subscription.publisher
        is_empty = replay.first == 0 and replay.has_ended and not replay.has_answered
        self._catalog.replay_ended(publisher, is_failed=error is not None, is_empty=is_empty)
        if error is not None:
            logger.warning(
                "engine at %s: replay from %d failed: %s",
                subscription.endpoint,
                replay.first,
                error,
            )
            status = "active" if subscription.is_connected else "pending"
            self._catalog.set_status(publisher, status, f"replay failed: {error}")
        messages = replay.waiting
        while messages:
            consumed, outcome, first, last = self._catalog.take(publisher, messages)
            if outcome != "gap":
                break
            messages = messages[consumed:]
            if first > replay.first:
                # Not what this replay could not bring: the rest may come when it is asked for.
                self._start_replay(subscription, first, is_verifying=False, waiting=messages)
                return
            self._catalog.give_up(publisher, last + 1)
        self._resume(subscription)
        if subscription.wants_verify:
            subscription.wants_verify = False
            self._on_connected(subscription)

    def _pause(self, subscription: _Subscription) -> None:
        if self._handlers.pop(subscription.socket, None) is not None:
            self._poller.unregister(subscription.socket)

    def _resume(self, subscription: _Subscription) -> None:
        if subscription.is_held:
            return
        self._add(subscription.socket, lambda: self._on_stream(subscription))
