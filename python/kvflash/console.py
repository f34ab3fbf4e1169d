"""What all commands have in common at a terminal: how they refuse, their version, a log line."""

from __future__ import annotations

import argparse
import logging
from datetime import datetime, timezone
from importlib import metadata
from typing import Any, NoReturn

__all__ = ["LogLine", "Parser", "utc"]


class Parser(argparse.ArgumentParser):
    """A parser that refuses in two lines, where all flags would hide the reason; ``--version``."""

    def __init__(self, *, prog: str, **settings: Any) -> None:
        # An abbreviation that works today would break with the next flag.
        super().__init__(prog=prog, allow_abbrev=False, **settings)
        self.add_argument(
            "--version",
            action=_Version,
            nargs=0,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help="print the version and end",
        )

    def error(self, message: str) -> NoReturn:
        """End with status 2 and the reason."""
        self.exit(2, f"usage: {self.prog} ... (see --help)\n{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"kvflash {metadata.version('kvflash')}")
        parser.exit()


class LogLine(logging.Formatter):
    """A line of the log in the core's form: time, level, text."""

    def __init__(self, rest: str = "%(levelname)5s %(message)s") -> None:
        super().__init__(f"%(asctime)s {rest}")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The record's time, as :func:`utc`."""
        del datefmt
        return utc(record.created)


def utc(time_s: float) -> str:
    """A time as the core writes it, microseconds and all."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
