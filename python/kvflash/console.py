"""Terminal output of all commands: refusals, help, log lines."""

import argparse
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NoReturn

from kvflash.errors import ConfigError, ConflictError, InvalidArgumentError, KvflashError
from kvflash.spelling import did_you_mean

logger = logging.getLogger(__name__)

# Column at which a flag's description begins; longer names get their own line.
_COLUMN = 38
_WIDTH_MIN = 60

_NO_VALUE = "is a switch and takes no value"

# Formatter of parsers with a manual: without a width argparse would measure the terminal for every
# flag.
_NARROW = partial(argparse.HelpFormatter, width=_WIDTH_MIN)


def program(command: str) -> str:
    """How a command was called: ``kvflash NAME``, or ``python -m kvflash.NAME``."""
    is_module = sys.argv[0].endswith((f"/{command}/__main__.py", f"/kvflash/{command}.py"))
    return f"python -m kvflash.{command}" if is_module else f"kvflash {command}"


def counted(count: object, one: str, many: str) -> str:
    """The count, and the words for one or for many of them."""
    return f"{count} {one if count == 1 else many}"


def refuse(command: str, error: KvflashError, *, failure: int = 1) -> int:
    """Print the reason in one line. Returns the exit status: 2 for bad usage, else ``failure``.

    Services exit with 2 for anything that keeps them from starting.
    """
    # In one write: threads of the core may be logging.
    sys.stderr.write(f"{program(command)}: error: {error}\n")
    is_usage = isinstance(error, ConfigError | ConflictError | InvalidArgumentError)
    return 2 if is_usage else failure


def announce(fields: Mapping[str, Any]) -> None:
    """Print a line of JSON that says where a service is; without a reader only the line is lost."""
    try:
        print(json.dumps(fields), flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        logger.warning(
            "standard output can't be written, so the %s line is lost: %s",
            fields.get("event"),
            reason_of(error),
        )


def reason_of(error: Exception) -> str:
    """Why a file can't be used: of the system's errors neither the number nor the path again."""
    return str(getattr(error, "strerror", None) or error)


def manual(
    usage: str, about: str, sections: Mapping[str, Sequence[tuple[str, str]]], end: str
) -> str:
    """The text of ``--help``, as wide as the terminal.

    Sections are titles, each with its flags and their one-line descriptions.
    """
    # Here, because it is slow to load, and few ask for help.
    import shutil  # noqa: PLC0415

    width = max(shutil.get_terminal_size().columns, _WIDTH_MIN)
    lines = [f"usage: {usage}", "", *textwrap.wrap(about, width)]
    for title, flags in sections.items():
        lines += ["", f"{title}:"]
        for shown, summary in flags:
            first = f"  {shown}".ljust(_COLUMN)
            if len(shown) + 4 > _COLUMN:
                lines.append(first.rstrip())
                first = " " * _COLUMN
            lines += textwrap.wrap(
                summary, width, initial_indent=first, subsequent_indent=" " * _COLUMN
            )
    return "\n".join([*lines, "", *textwrap.wrap(end, width), ""])


class Parser(argparse.ArgumentParser):
    """A parser that refuses in two lines instead of listing all flags; adds ``--version``.

    ``manual`` returns the text of its ``--help``, instead of argparse's own.
    """

    def __init__(
        self, *, prog: str, manual: Callable[[], str] | None = None, **settings: Any
    ) -> None:
        if manual is not None:
            settings["formatter_class"] = _NARROW
        # An abbreviation that works today could break with the next flag.
        super().__init__(prog=prog, allow_abbrev=False, **settings)
        self.manual = manual
        self.add_argument(
            "--version",
            action=_Version,
            nargs=0,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help="print the version and exit",
        )

    def format_help(self) -> str:
        """The text of ``--help``."""
        return self.manual() if self.manual else super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Print the text of ``--help``; argparse hides that an output takes nothing."""
        print(self.format_help(), end="", file=file)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse; an unknown flag is refused, with the closest known one as a suggestion."""
        known, rest = self.parse_known_args(args)
        if rest:
            flag = next((word for word in rest if word.startswith("-")), rest[0])
            metavars = {n: str(one.metavar) for one in self._actions for n in one.option_strings}
            hint = did_you_mean(flag.partition("=")[0], metavars)
            words = list(sys.argv[1:] if args is None else args)
            before = words[: words.index(flag)]
            flags = [word for word in before if word.startswith("-")]
            is_word = not flag.startswith("-")
            if is_word and metavars.get("".join(flags[-1:]), "").endswith(",..."):
                hint = f"; separate the values of {flags[-1]} with commas"
            elif "://" in flag and "--worker" in metavars:
                hint = "; name an engine by --worker URL"
            elif is_word and before and self._is_switch(before[-1]):
                hint = f"; {before[-1]} {_NO_VALUE}"
            elif is_word:
                hint = (
                    "; put a value right after its flag, as in --port 8000, and words without a"
                    " flag together before the flags (see --help)"
                )
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return known

    def _is_switch(self, flag: str) -> bool:
        """Whether it takes no value, and no other words may follow it."""
        takes_words = any(not one.option_strings for one in self._actions)
        return not takes_words and getattr(self._option_string_actions.get(flag), "nargs", 1) == 0

    def error(self, message: str) -> NoReturn:
        """End with status 2 and the reason."""
        message = message.replace("ignored explicit argument", f"{_NO_VALUE}, got")
        self.exit(2, f"usage: {self.prog} ... (see --help)\n{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Reading package metadata is slow.
        from kvflash.version import __version__  # noqa: PLC0415

        print(f"kvflash {__version__}")
        parser.exit()


class LogLine(logging.Formatter):
    """Formats log lines like the core: time, level, text."""

    def __init__(self, rest: str = "%(levelname)5s %(message)s") -> None:
        super().__init__(f"%(asctime)s {rest}")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The record's time, as :func:`utc`."""
        del datefmt
        return utc(record.created)


def log_to_stderr(level: int | str, form: logging.Formatter) -> None:
    """Log to standard error, with the core's names of the levels."""
    logging.addLevelName(logging.WARNING, "WARN")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(form)
    logging.basicConfig(level=level, handlers=[handler])


def utc(time_s: float) -> str:
    """Format a time like the core, with microseconds."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
