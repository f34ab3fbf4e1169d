"""Engine events over ZMQ: SUB for the stream, DEALER for its repair, one thread for all."""

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq

from kvflash._core import Catalog, Repair, ZmqDrain
from kvflash.transport.base import Order
from kvflash.transport.poller import Poller
from kvflash.transport.zmq_socket import (
    MESSAGE_BYTES_MAX,
    dial,
    dialable,
    explain,
    open_replay,
    open_stream,
)

logger = logging.getLogger(__name__)

#: An effect of a repair: kind, first and last number, reason.
RepairEffect = tuple[str, int, int, str]
#: A part of a message: copied, or the socket's own buffer.
_Part = bytes | zmq.Frame

# ZMQ does not reconnect after a protocol violation, such as a frame above the limit. The only sign
# is that the monitor reports no new attempt, since it reports any other one at once.
_RECONNECT_GRACE_S = 1.0
# Longest wait for the ZMQ handshake of a connection; libzmq itself waits for 30 s.
_HANDSHAKE_S = 10.0

# Pause after a peer that closed the connection before the handshake.
_REFUSED_S = 2.0
# Time without progress after which a replay is given up.
_REPLAY_TIMEOUT_S = 5.0
# Messages passed to the core at once.
_BATCH_MESSAGES = 256

_NO_ADDRESS = "the host of the address is unknown here (DNS), or no route leads to it"

# Other users may close files; subscriptions without one are retried.
_REOPEN_S = 5.0
# Interval between log lines about a publisher that keeps violating the protocol.
_BREACH_LINE_S = 60.0


def find_drain() -> ZmqDrain | None:
    """The native receiver, from the libzmq that pyzmq has loaded; None if not found."""
    try:
        from zmq.backend.cython import _zmq  # noqa: PLC0415

        return ZmqDrain(_zmq.__file__)
    except (ImportError, ConnectionError) as error:
        logger.warning("events are received in Python, which is slower: %s", error)
        return None


@dataclass
class _Subscription:
    publisher: int
    endpoint: str
    replay_endpoint: str | None
    repair: Repair
    socket: zmq.Socket[bytes] = field(init=False)
    monitor: zmq.Socket[bytes] = field(init=False)
    #: Whether it has these two: not while the process has no files left.
    is_open: bool = False
    #: Socket of the current replay; a new one each time, so that late answers are not mixed up.
    replay: zmq.Socket[bytes] | None = None
    is_connected: bool = False
    #: When to open its sockets again.
    reconnect_at: float | None = None
    #: Whether a connection was tried since the last pause: libzmq tries none without an address.
    has_dialled: bool = False
    #: Whether the last connection got as far as the ZMQ handshake.
    has_greeted: bool = False
    #: Whether the peer closed a connection before that: it is left alone until ``reconnect_at``.
    is_refused: bool = False
    #: Whether an order paused it; one that is held from the start is not paused.
    is_paused: bool = False
    has_failed: bool = False
    breach_line_at: float = 0.0


class ZmqReceiver:
    """Feeds a catalog from the engines' ZMQ sockets."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._drain = find_drain()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The default, 1,023, is enough for 340 publishers: a SUB and two ends of its monitor each.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        # Orders are bounded by registrations, which the core limits.
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._poller = Poller()
        self._subscriptions: dict[int, _Subscription] = {}
        # Subscriptions that may have a deadline; only these are checked in every turn.
        self._timed: dict[int, _Subscription] = {}
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvflash-zmq", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def obey(self, order: Order) -> None:
        """Carry out what :meth:`Catalog.next_order` returned; returns at once."""
        self._orders.put(order)
        self._poller.wake()

    def stop(self) -> None:
        """Close everything and wait for the thread."""
        self._orders.put(None)
        self._poller.wake()
        self._thread.join()
        self._poller.close()

    # -- everything below runs on the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                for ready in self._poller.poll(self._poll_timeout_ms()):
                    # A handler may have closed a socket that is still in this list.
                    handler = self._handlers.get(ready)
                    if handler is not None:
                        handler()
                self._carry_out_all()
                self._look_at_deadlines()
        except Exception:
            logger.exception("the event transport failed; index state is no longer updated")
            for publisher in self._subscriptions:
                self._catalog.set_status(publisher, "failed", "the event transport failed")
        finally:
            for publisher in list(self._subscriptions):
                self._unsubscribe(publisher)
            self._context.destroy(0)

    def _call(self, handler: Callable[[], None], publisher: int) -> None:
        try:
            handler()
        except Exception as error:
            # An error of one publisher must not end the service of the others.
            subscription = self._subscriptions.get(publisher)
            endpoint = "an unknown endpoint" if subscription is None else subscription.endpoint
            logger.exception("engine at %s: reading its events failed", endpoint)
            # Its sockets may stay readable: it would fail again at once, in every turn.
            self._unsubscribe(publisher)
            message = f"reading its events failed: {error!r}; register it again"
            self._catalog.set_status(publisher, "failed", message)

    def _add(self, socket: zmq.Socket[bytes], handler: Callable[[], None], publisher: int) -> None:
        self._handlers[socket] = partial(self._call, handler, publisher)
        self._poller.register(socket)

    def _close(self, socket: zmq.Socket[bytes] | None) -> None:
        if socket is None:
            return
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)
        socket.close(0)

    def _poll_timeout_ms(self) -> int | None:
        now = time.monotonic()
        waits = [s.repair.wait_s() for s in self._timed.values()]
        waits += [s.reconnect_at and s.reconnect_at - now for s in self._timed.values()]
        least = min((wait for wait in waits if wait is not None), default=None)
        if least is None:
            self._timed.clear()
            return None
        return max(0, int(least * 1000) + 1)

    def _look_at_deadlines(self) -> None:
        for subscription in list(self._timed.values()):
            if subscription.repair.wait_s() == 0:
                self._call(partial(self._silent, subscription), subscription.publisher)
            reconnect_at = subscription.reconnect_at
            if reconnect_at is not None and reconnect_at <= time.monotonic():
                self._call(partial(self._reopen, subscription), subscription.publisher)

    def _carry_out_all(self) -> None:
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                self._is_stopping = True
                return
            self._call(partial(self._carry_out, *order), order[1])

    def _carry_out(
        self, kind: str, publisher: int, endpoint: str, replay_endpoint: str | None
    ) -> None:
        subscription = self._subscriptions.get(publisher)
        if kind in ("subscribe", "hold"):
            repair = Repair(
                self._catalog,
                publisher,
                has_endpoint=replay_endpoint is not None,
                timeout_s=_REPLAY_TIMEOUT_S,
                is_held=kind == "hold",
            )
            subscription = _Subscription(publisher, endpoint, replay_endpoint, repair)
            self._subscriptions[publisher] = subscription
            self._open(subscription)
        elif kind == "unsubscribe":
            self._unsubscribe(publisher)
        elif subscription is not None and kind == "pause":
            self._hold(subscription)
        elif subscription is not None:
            self._release(subscription)

    def _open(self, subscription: _Subscription) -> None:
        """Open its sockets, in place of broken ones, and connect; or try again later."""
        is_broken = subscription.is_open
        why = self._explain_end(subscription) if is_broken else "can't open a socket"
        try:
            opened = open_stream(self._context)
        except zmq.ZMQError as error:
            if is_broken:
                self._reconnect_in(subscription, _RECONNECT_GRACE_S)
                self._report(subscription, "pending", f"{why} fails: {explain(error)}")
            else:
                self._reconnect_in(subscription, _REOPEN_S)
                why = f"{why}: {explain(error)}; trying again every {_REOPEN_S:g} s"
                self._report(subscription, "failed", why)
            return
        if is_broken:
            self._report(subscription, "pending", why)
            self._close_stream(subscription)
        elif subscription.reconnect_at is not None:
            logger.info("engine at %s: its socket is open now", subscription.endpoint)
        subscription.socket, subscription.monitor = opened
        subscription.is_open, subscription.is_refused = True, False
        subscription.reconnect_at = None
        self._connect(subscription)
        self._follow(subscription, [])

    def _hold(self, subscription: _Subscription) -> None:
        if subscription.repair.is_held or subscription.has_failed:
            return
        subscription.repair.hold()
        subscription.is_paused = True
        self._follow(subscription, [])
        # Without a socket the status tells why.
        if subscription.is_open:
            self._show(subscription, "paused")

    def _release(self, subscription: _Subscription) -> None:
        if not subscription.repair.is_held:
            return
        subscription.is_paused = False
        if subscription.is_open and not subscription.has_failed:
            self._show(subscription, "active" if subscription.is_connected else "pending")
        self._follow(subscription, subscription.repair.release(subscription.is_connected))

    def _connect(self, subscription: _Subscription) -> None:
        publisher, endpoint = subscription.publisher, subscription.endpoint
        self._add(subscription.monitor, lambda: self._on_monitor(subscription), publisher)
        if endpoint.startswith("inproc://"):
            # libzmq would accept it, and wait for a publisher for ever.
            self._fail(subscription, "inproc:// does not leave the engine's process; use ipc://")
            return
        try:
            dial(subscription.socket, endpoint)
        except zmq.ZMQError as error:
            self._fail(subscription, str(error))

    def _fail(self, subscription: _Subscription, why: str) -> None:
        subscription.has_failed = True
        self._show(subscription, "failed", f"can't connect to {subscription.endpoint}: {why}")

    def _reopen(self, subscription: _Subscription) -> None:
        # This turn may have taken longer than the grace period: handle pending monitor events
        # first.
        if subscription.is_open:
            self._on_monitor(subscription)
        if subscription.reconnect_at is not None and subscription.reconnect_at <= time.monotonic():
            self._open(subscription)

    def _explain_end(self, subscription: _Subscription) -> str:
        if not subscription.has_greeted:
            return (
                "the address accepts connections, but not as a socket that publishes events: is it "
                "the engine's replay_endpoint, its HTTP port, or a proxy of a stopped engine? "
                "Events come from `endpoint` of its --kv-events-config; connecting again"
            )
        return (
            f"protocol violation, such as a frame above {MESSAGE_BYTES_MAX} bytes; connecting again"
        )

    def _report(self, subscription: _Subscription, status: str, message: str) -> None:
        now = time.monotonic()
        if subscription.breach_line_at <= now:
            subscription.breach_line_at = now + _BREACH_LINE_S
            logger.warning("engine at %s: %s", subscription.endpoint, message)
        self._show(subscription, status, message)

    def _show(self, subscription: _Subscription, status: str, message: str | None = None) -> None:
        """Set its status in the catalog; a paused one stays paused whatever its connection does.

        The catalog resumes only what it shows as paused.
        """
        if subscription.is_paused and status != "failed":
            status = "paused"
        self._catalog.set_status(subscription.publisher, status, message)

    def _refuse(self, subscription: _Subscription) -> None:
        # libzmq forgets its pauses whenever a connection opens, and would try 20 times per second.
        with contextlib.suppress(zmq.ZMQError):
            subscription.socket.disconnect(dialable(subscription.endpoint))
        subscription.is_refused = True
        self._reconnect_in(subscription, _REFUSED_S)
        self._report(subscription, "pending", self._explain_end(subscription))

    def _reconnect_in(self, subscription: _Subscription, wait_s: float) -> None:
        subscription.reconnect_at = time.monotonic() + wait_s
        self._timed[subscription.publisher] = subscription

    def _unsubscribe(self, publisher: int) -> None:
        subscription = self._subscriptions.pop(publisher, None)
        self._timed.pop(publisher, None)
        if subscription is None:
            return
        self._close(subscription.replay)
        if subscription.is_open:
            self._close_stream(subscription)

    def _close_stream(self, subscription: _Subscription) -> None:
        subscription.socket.disable_monitor()
        self._close(subscription.monitor)
        self._close(subscription.socket)

    def _on_monitor(self, subscription: _Subscription) -> None:
        while subscription.monitor.poll(0):
            # Its number, its value, then an address. Not read by pyzmq, which would load asyncio.
            # Source: zmq_socket_monitor(3).
            kind = int.from_bytes(subscription.monitor.recv_multipart()[0][:2], sys.byteorder)
            if subscription.is_refused:
                continue
            subscription.is_connected = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            subscription.reconnect_at = None
            if kind in (zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECTED):
                subscription.has_dialled = True
            if kind == zmq.EVENT_CONNECTED:
                subscription.has_greeted = False
                self._reconnect_in(subscription, _HANDSHAKE_S)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                subscription.has_greeted = True
                self._show(subscription, "active")
                self._follow(subscription, subscription.repair.connected())
            elif kind == zmq.EVENT_DISCONNECTED and not subscription.has_greeted:
                self._refuse(subscription)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._reconnect_in(subscription, _RECONNECT_GRACE_S)
                self._show(subscription, "pending", "disconnected; connecting again")
            elif kind == zmq.EVENT_CONNECT_RETRIED:
                has_dialled, subscription.has_dialled = subscription.has_dialled, False
                why = "connecting fails" if has_dialled else _NO_ADDRESS
                self._show(subscription, "pending", f"{why}; trying again")

    def _on_stream(self, subscription: _Subscription) -> None:
        messages: list[list[_Part]]
        if self._drain is None:
            messages = self._receive(subscription.socket)
        else:
            publisher, socket = subscription.publisher, subscription.socket
            _, unread = self._drain.take(self._catalog, publisher, socket, _BATCH_MESSAGES)
            messages = [] if unread is None else [list(unread)]
        if messages:
            self._follow(subscription, subscription.repair.live(messages))

    def _receive(self, socket: zmq.Socket[bytes]) -> list[list[_Part]]:
        messages: list[list[_Part]] = []
        try:
            for _ in range(_BATCH_MESSAGES):
                # Frames instead of recv_multipart: half the time, and no copy of the payload.
                part = socket.recv(zmq.NOBLOCK, copy=False)
                parts: list[_Part] = [part]
                while part.more:
                    part = socket.recv(zmq.NOBLOCK, copy=False)
                    parts.append(part)
                messages.append(parts)
        except zmq.Again:
            pass
        return messages

    def _silent(self, subscription: _Subscription) -> None:
        # This turn itself may have taken so long; then the answer has arrived already.
        has_more = subscription.replay is not None and self._poller.look_at(subscription.replay)
        self._follow(subscription, subscription.repair.silent(has_more))

    def _follow(self, subscription: _Subscription, effects: list[RepairEffect]) -> None:
        """Carry out a repair's effects, and read the stream as long as it requests that."""
        endpoint = subscription.endpoint
        for kind, first, last, why in effects:
            if kind == "ask":
                self._ask(subscription, first)
            elif kind == "dismiss":
                self._close(subscription.replay)
                subscription.replay = None
            elif kind == "peek":
                messages = self._receive(subscription.socket)
                self._follow(subscription, subscription.repair.live(messages))
            elif kind == "lost":
                # What came before the first batch received can't have evicted a known block.
                lost, them = f"batches {first}..{last} were", "them"
                if first == last:
                    lost, them = f"batch {first} was", "it"
                evicted = f", and blocks evicted in {them} are still credited" if first else ""
                text = f"{lost} not received, and it has no replay endpoint to ask for {them}"
                text += f": blocks stored in {them} earn no credit{evicted}{why}"
                logger.warning("engine at %s: %s", endpoint, text)
            else:
                text = "engine at %s: replay from batch %d by %s failed: %s"
                logger.warning(text, endpoint, first, subscription.replay_endpoint, why)
        if not subscription.is_open:
            return
        socket, is_read = subscription.socket, subscription.socket in self._handlers
        if subscription.repair.wants_live and not is_read:
            self._add(socket, lambda: self._on_stream(subscription), subscription.publisher)
        elif is_read and not subscription.repair.wants_live:
            del self._handlers[socket]
            self._poller.unregister(socket)

    def _ask(self, subscription: _Subscription, first: int) -> None:
        endpoint = subscription.replay_endpoint or ""
        self._close(subscription.replay)
        subscription.replay = None
        self._timed[subscription.publisher] = subscription
        try:
            socket = open_replay(self._context, endpoint, first)
        except zmq.ZMQError as error:
            why = f"can't reach {endpoint}: {explain(error)}"
            self._follow(subscription, subscription.repair.unreachable(why))
            return
        subscription.replay = socket
        handler = partial(self._on_replay, subscription, socket)
        self._add(socket, handler, subscription.publisher)

    def _on_replay(self, subscription: _Subscription, socket: zmq.Socket[bytes]) -> None:
        repair = subscription.repair
        if self._drain is None:
            effects = repair.answered(self._receive(socket))
        else:
            effects = self._drain.answer(repair, socket, _BATCH_MESSAGES)
        self._follow(subscription, effects)
