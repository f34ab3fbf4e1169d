"""What parts of the process tell in ``/metrics`` and ``/health`` beside the core."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["Reports"]


class Core(Protocol):
    """Takes one text and one list for all of them."""

    def set_more_metrics(self, text: str) -> None:
        """What ``/metrics`` tells besides its own."""

    def set_warnings(self, warnings: list[str]) -> None:
        """What ``/health`` tells besides its own."""


class Reports:
    """Puts together what each part said last. May be called from any thread.

    Args:
        core: Takes the whole.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._metrics: dict[str, str] = {}
        self._warnings: dict[str, list[str]] = {}

    def metrics_of(self, part: str) -> Callable[[str], None]:
        """Takes a part's lines of the OpenMetrics text format."""

        def show(text: str) -> None:
            with self._lock:
                self._metrics[part] = text
                self._core.set_more_metrics("".join(self._metrics.values()))

        return show

    def warnings_of(self, part: str) -> Callable[[list[str]], None]:
        """Takes a part's warnings."""

        def show(warnings: list[str]) -> None:
            with self._lock:
                self._warnings[part] = warnings
                self._core.set_warnings([text for part in self._warnings.values() for text in part])

        return show
