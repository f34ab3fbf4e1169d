"""Adds reports from parts of the process to ``/metrics`` and ``/health``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["Reports"]


class Core(Protocol):
    """Accepts one text and one list for all parts."""

    def set_more_metrics(self, text: str) -> None:
        """Set additional lines for ``/metrics``."""

    def set_warnings(self, warnings: list[str]) -> None:
        """Set additional warnings for ``/health``."""


class Reports:
    """Combines the last report of each part. Callable from any thread.

    Args:
        core: Receives the combined reports.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._metrics: dict[str, str] = {}
        self._warnings: dict[str, list[str]] = {}

    def metrics_of(self, part: str) -> Callable[[str], None]:
        """Return a function that takes a part's lines in the OpenMetrics text format."""

        def show(text: str) -> None:
            with self._lock:
                self._metrics[part] = text
                self._core.set_more_metrics("".join(self._metrics.values()))

        return show

    def warnings_of(self, part: str) -> Callable[[list[str]], None]:
        """Return a function that takes a part's warnings."""

        def show(warnings: list[str]) -> None:
            with self._lock:
                self._warnings[part] = warnings
                self._core.set_warnings([text for part in self._warnings.values() for text in part])

        return show
