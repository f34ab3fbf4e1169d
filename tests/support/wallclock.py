"""Wall clocks of processes that leap while they run; their monotonic clocks go on as they do."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

__all__ = ["WallClock"]


def _library() -> str:
    """The library that a process loads before the system's."""
    found = importlib.util.find_spec("libfaketime")
    for place in (found.submodule_search_locations or []) if found else []:
        for path in Path(place).glob("vendor/libfaketime/src/libfaketime.so.1"):
            return str(path)
    message = "libfaketime is not installed: pip install libfaketime"
    if os.environ.get("CI") == "true":
        raise AssertionError(message)
    pytest.skip(message)


class WallClock:
    """The wall clock of all processes that are started with its `env`.

    Servers written in Go read the time past the library: theirs is right.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.leap(0)
        self.env = {
            "LD_PRELOAD": _library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # Read at every look at the clock, so that a leap is seen at once.
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Files keep the times that the kernel gave them.
            "NO_FAKE_STAT": "1",
        }

    def leap(self, seconds: int) -> None:
        """Be so far off the right time from now on."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{seconds:+d}\n")
        draft.rename(self._file)
