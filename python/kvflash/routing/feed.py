"""Work beside the event loop: receives events, and expires old entries."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import TYPE_CHECKING

from kvflash._core import RouterCore

if TYPE_CHECKING:
    from kvflash.transport.base import Receiver

logger = logging.getLogger(__name__)

TICK_S = 0.5


class Feed:
    """A thread for one core; it ends with :meth:`stop`, or with the process."""

    def __init__(self, core: RouterCore, receiver: Receiver) -> None:
        self._core, self._receiver = core, receiver
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kvflash-router", daemon=True)

    def start(self) -> None:
        """Start. Events are subscribed to only if they can change a decision."""
        if self._core.uses_events:
            self._receiver.start()
        self._thread.start()
        # A thread that returns from the core after the interpreter has ended would abort it.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop; blocks briefly until done."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self.stop)
        self._core.catalog.close_orders()
        if self._thread.is_alive():
            self._thread.join()
        self._receiver.stop()

    def _run(self) -> None:
        due_s = 0.0
        while not self._is_stopped:
            order = self._core.catalog.next_order(due_s - time.monotonic())
            if order is not None:
                self._receiver.obey(order)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + TICK_S
                expired = self._core.tick()
                if expired:
                    logger.warning("%d bookings expired without activity", expired)
