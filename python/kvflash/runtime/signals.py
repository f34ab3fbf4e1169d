"""SIGTERM, SIGHUP and SIGINT: leave discovery, drain, end."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_OURS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Signals:
    """Calls back at the first signal that has no other handler; works in the main thread only."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._taken: list[signal.Signals] = []
        self._received: signal.Signals | None = None

    def take(self, call: Callable[[], None]) -> None:
        if self._loop is not None or threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        for number in _OURS:
            if _is_free(number):
                self._loop.add_signal_handler(number, self._receive, number, call)
                self._taken.append(number)

    def give_back(self, end_grace_s: float) -> None:
        """Restore the handlers; after a received signal, end the process if nothing else does."""
        self._release()
        if self._loop is not None and self._received is not None:
            # Some thread of this process may wait forever.
            self._loop.call_later(end_grace_s, self._end, self._received)
        self._loop = None

    def _release(self) -> None:
        while self._taken and self._loop is not None:
            self._loop.remove_signal_handler(self._taken.pop())

    def _receive(self, number: signal.Signals, call: Callable[[], None]) -> None:
        logger.info("stopping on %s", number.name)
        self._received = number
        self._release()
        call()

    @staticmethod
    def _end(number: signal.Signals) -> None:
        logger.warning("the process has not ended by itself: %s", number.name)
        os.kill(os.getpid(), number)


def _is_free(number: signal.Signals) -> bool:
    """Whether a signal still has its default behavior."""
    handler = signal.getsignal(number)
    if number != signal.SIGINT:
        return handler is signal.SIG_DFL
    # From Python 3.11 on the event loop's runner installs its own handler. A handler that the
    # program adds to the loop is part of asyncio too, but of another module.
    owner = getattr(getattr(handler, "func", handler), "__module__", "")
    return handler is signal.default_int_handler or owner == "asyncio.runners"
