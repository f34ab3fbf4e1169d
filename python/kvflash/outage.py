"""Log lines about an unreachable server: when it goes, now and then, and when it returns."""

import logging
import time
from collections.abc import Callable

from kvflash.errors import KvflashError

REMIND_S = 60.0


class Outage:
    """Limits log lines during many retries; used from one thread.

    It logs ``back`` when the server returns. ``show`` takes the message of each failure, and an
    empty one at the return.
    """

    def __init__(
        self, logger: logging.Logger, back: str, show: Callable[[str], None] = lambda _message: None
    ) -> None:
        self._logger, self._back, self._show = logger, back, show
        self._began_s: float | None = None
        self._said_s = 0.0
        self._kind: object = None

    def lasts(
        self, message: str, *, kind: object = None, unexpected: BaseException | None = None
    ) -> None:
        """An attempt failed: warn, unless the same kind of failure was logged recently.

        The first warning of a kind has the traceback of an ``unexpected`` error.
        """
        now = time.monotonic()
        self._show(message)
        is_new = self._began_s is None or kind != self._kind
        if self._began_s is None:
            self._began_s = now
        elif not is_new and now - self._said_s < REMIND_S:
            return
        self._said_s, self._kind = now, kind
        self._logger.warning("%s", message, exc_info=unexpected if is_new else None)

    def fails(self, message: str, error: Exception) -> None:
        """As :meth:`lasts`; any error but this package's own is unexpected."""
        unexpected = None if isinstance(error, KvflashError) else error
        self.lasts(message, kind=type(error), unexpected=unexpected)

    def ends(self) -> None:
        """An attempt succeeded."""
        if self._began_s is not None:
            lasted_s = time.monotonic() - self._began_s
            # The outage began before its first failure was noticed.
            self._logger.info("%s after at least %.1f s", self._back, lasted_s)
            self._began_s = None
            self._show("")
