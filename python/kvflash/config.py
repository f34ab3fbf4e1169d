"""Flags that every service has, each with its environment variable."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from kvflash.config_file import Setting, one_value, read_settings, texts, truth
from kvflash.console import Parser
from kvflash.errors import ConfigError

__all__ = [
    "Flags",
    "bounded_float",
    "bounded_int",
    "byte_count",
    "memory_limit",
    "optional",
    "size_or_zero",
    "source_of",
    "variable_of",
]

_T = TypeVar("_T")

_FILE_DEST = "settings_file"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def bounded_int(low: int, high: int) -> Callable[[str], int]:
    """A parser for whole numbers in ``low..=high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number in {low}..={high}, got {text!r}"
            )
        return value

    return parse


def bounded_float(low: float, high: float = float("inf")) -> Callable[[str], float]:
    """A parser for finite numbers from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low <= value <= high) or value == float("inf"):
            wanted = f"of at least {low:g}" if high == float("inf") else f"in {low:g}..={high:g}"
            raise argparse.ArgumentTypeError(f"must be a number {wanted}, got {text!r}")
        return value

    return parse


def size_or_zero(text: str) -> int:
    """Parse a size such as ``16MiB``, or 0; unit bytes."""
    return 0 if text.strip() == "0" else byte_count(text)


def byte_count(text: str) -> int:
    """Parse a size such as ``512MiB``, ``8m`` or ``1048576``; unit bytes."""
    digits = text.strip().rstrip("KMGkmgiIbB")
    unit = text.strip()[len(digits) :].lower().removesuffix("b")
    try:
        value = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 8000000, got {text!r}")
    return value


def memory_limit(text: str) -> int:
    """Parse a memory limit: 0 for none, or a size of at least 1 MiB; unit bytes.

    Nothing useful fits in less, so that ``8`` is rather a forgotten unit than a limit.
    """
    if text.strip() == "0":
        return 0
    try:
        value = byte_count(text)
    except argparse.ArgumentTypeError:
        value = 0
    if not 2**20 <= value < 2**63:
        raise argparse.ArgumentTypeError(
            f"must be 0 for no limit or a size of at least 1MiB, such as 8GiB, 512MiB or "
            f"8000000000, got {text!r}"
        )
    return value


def optional(parse: Callable[[str], _T]) -> Callable[[str], _T | None]:
    """A parser that also takes ``None``, in any case, for a setting that is not set."""

    def parse_optional(text: str) -> _T | None:
        return None if text.strip().lower() == "none" else parse(text)

    return parse_optional


def number_or_auto(text: str) -> float | Literal["auto"]:
    """Read a number above 0, or the word auto; the parse function of such a flag."""
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return bounded_float(0.001)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (or auto)") from None


def variable_of(name: str) -> str:
    """The environment variable of a flag."""
    return "KVFLASH_" + name.lstrip("-").replace("-", "_").upper()


def source_of(name: str, text: str) -> str:
    """What said ``text``: the flag, or its variable where that says so, alone or among others."""
    variable = variable_of(name)
    said = os.environ.get(variable)
    if said is None or text not in (said, *said.split()):
        return name
    return f"environment variable {variable}"


class Flags:
    """An argument parser whose flags can also be set by environment variables.

    ``--some-flag`` reads ``KVFLASH_SOME_FLAG`` when it is not given, and the variables of its other
    names; the command line wins, and a bad value in the environment is refused with the variable's
    name.
    """

    def __init__(self, prog: str, description: str) -> None:
        self._parser = Parser(
            prog=prog,
            description=description,
            epilog="Every flag can be set as KVFLASH_<FLAG> in the environment.",
        )
        self._lists: dict[str, list[str]] = {}
        self._file: tuple[str, str | None] | None = None
        self._settings: list[Setting] = []
        self._presets: dict[str, dict[str, Any]] = {}
        self._in_file: dict[str, Any] = {}
        self._in_environment: set[str] = set()
        self._marks: dict[str, frozenset[str]] = {}
        self._is_file_open = True

    def add(
        self,
        *names: str,
        parse: Callable[[str], _T | None],
        default: _T | None,
        summary: str,
        metavar: str | None = None,
        choices: Sequence[_T] | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        """Add a flag with one value.

        Each name has its variable; ``variables`` are further ones.
        """
        others = (*map(self._variable, names[1:]), *variables)
        variable, text = self._setting(names[0], others)
        if text is not None:
            try:
                default = parse(text)
                if choices is not None and default not in choices:
                    raise argparse.ArgumentTypeError(
                        f"must be one of {', '.join(map(str, choices))}, got {text!r}"
                    )
            except (argparse.ArgumentTypeError, ValueError) as error:
                self._parser.error(f"environment variable {variable}: {error}")
        shown = "" if default in (None, ()) else f" (default: {default})"
        added = self._parser.add_argument(
            *names,
            type=parse,
            default=default,
            choices=choices,
            metavar=metavar,
            help=summary.replace("%", "%%") + str(shown).replace("%", "%%"),
        )
        self._can_be_in_file(names, added.dest, one_value(parse, choices), text is not None)

    def add_switch(self, *names: str, dest: str, value: bool, summary: str) -> None:
        """Add a flag without a value that sets ``dest`` to ``value``.

        The first name names its variable.
        """
        variable = self._variable(names[0])
        text = os.environ.get(variable, "").strip()
        is_set = self._truth(variable, text)
        self._parser.add_argument(
            *names,
            dest=dest,
            action="store_const",
            const=value,
            default=value if is_set else not value,
            help=summary,
        )
        self._can_be_in_file(names, dest, truth(() if value else names), bool(text))

    def add_toggle(
        self,
        dest: str,
        *,
        on: Sequence[str],
        off: Sequence[str],
        default: bool,
        summary: str,
        variables: Sequence[str] = (),
    ) -> None:
        """Add flags that switch one thing on and flags that switch it off; the last one wins.

        Each name has its variable (``KVFLASH_NO_THING=1`` switches off); ``variables`` are further
        ones that say on or off. The command line wins over all of them.
        """
        said: dict[str, bool] = {}
        for variable, is_on in [
            *((self._variable(name), True) for name in on),
            *((self._variable(name), False) for name in off),
            *((variable, True) for variable in variables),
        ]:
            text = os.environ.get(variable)
            if text is not None and text.strip():
                said[variable] = self._truth(variable, text) == is_on
        if len(set(said.values())) > 1:
            shown = " and ".join(f"{name}={os.environ[name]}" for name in said)
            self._parser.error(f"environment variables contradict each other: {shown}")
        value = next(iter(said.values()), default)
        group = [(names, is_on) for names, is_on in ((on, True), (off, False)) if names]
        for at, (names, is_on) in enumerate(group):
            self._parser.add_argument(
                *names,
                dest=dest,
                action="store_const",
                const=is_on,
                default=value,
                help=summary if at == 0 else f"the opposite of {group[0][0][0]}",
            )
        self._can_be_in_file((*on, *off), dest, truth(off), bool(said))

    def add_mode(
        self,
        name: str,
        *,
        choices: Sequence[str],
        default: str,
        bare: str,
        summary: str,
        variables: Sequence[str] = (),
    ) -> None:
        """Add a flag with one of a few values; without a value it is ``bare``.

        In the environment the words for yes and no mean ``bare`` and ``default``.
        """
        variable, found = self._setting(name, variables)
        text = default if found is None else found
        words = {**dict.fromkeys(_TRUE, bare), **dict.fromkeys(_FALSE, default)}
        value = words.get(text.lower(), text) if text not in choices else text
        if value not in choices:
            self._parser.error(
                f"environment variable {variable}: must be one of {', '.join(choices)}, "
                f"got {text!r}"
            )
        self._parser.add_argument(
            name,
            nargs="?",
            const=bare,
            default=value,
            choices=choices,
            help=f"{summary} (default: {value})",
        )

    def add_list(self, name: str, *, dest: str, summary: str, metavar: str) -> None:
        """Add a flag that may be given many times; the environment separates by white space."""
        found = os.environ.get(self._variable(name), "").split()
        self._lists[dest] = found
        self._can_be_in_file((name,), dest, texts, bool(found))
        self._parser.add_argument(name, dest=dest, action="append", metavar=metavar, help=summary)

    def add_positionals(self, dest: str, *, metavar: str, summary: str) -> None:
        """Add what is given without a flag, at least once; no environment variable."""
        self._parser.add_argument(dest, nargs="+", metavar=metavar, help=summary)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse; a bad value ends the process with status 2 and a message that names the flag."""
        self._read_file(argv)
        watched = frozenset().union(*self._marks.values())
        unsaid = object()
        args = self._parser.parse_args(
            argv, argparse.Namespace(**dict.fromkeys(watched, unsaid), **dict.fromkeys(self._marks))
        )
        given = {dest for dest in watched if getattr(args, dest) is not unsaid}
        for dest in watched - given:
            setattr(args, dest, self._parser.get_default(dest))
        given |= self._in_environment | self._in_file.keys()
        for dest, dests in self._marks.items():
            setattr(args, dest, not given.isdisjoint(dests))
        if self._file is not None:
            delattr(args, _FILE_DEST)
        for preset, made in self._presets.items():
            if getattr(args, preset):
                # It goes before the file, as all that is said beside it.
                for dest in made.keys() & self._in_file.keys():
                    if getattr(args, dest) is self._in_file[dest]:
                        setattr(args, dest, made[dest])
        for dest, default in self._lists.items():
            if getattr(args, dest) is None:
                setattr(args, dest, default)
        return args

    def add_file(self, name: str, *, summary: str, variables: Sequence[str] = ()) -> None:
        """Add a flag that names a file which sets those flags that are added from now on.

        The command line goes before the environment, and that before the file.
        """
        self._file = (name, self._setting(name, variables)[1])
        self._parser.add_argument(name, dest=_FILE_DEST, metavar="FILE", help=summary)

    def mark(self, dest: str, dests: Iterable[str]) -> None:
        """Make ``dest`` tell whether any of ``dests`` is set, be it to its default."""
        self._marks[dest] = frozenset(dests)

    def preset(self, dest: str, made: dict[str, Any]) -> None:
        """In a file ``dest`` stands for what it makes of others: flags go before that, too."""
        self._presets[dest] = made

    def end_of_file(self) -> None:
        """No flag that is added from now on can be in the file."""
        self._is_file_open = False

    def _can_be_in_file(
        self, names: Sequence[str], dest: str, read: Callable[[str, Any], Any], is_given: bool
    ) -> None:
        if is_given:
            self._in_environment.add(dest)
        if self._file is not None and self._is_file_open:
            self._settings.append(Setting(names=names, dest=dest, read=read, is_given=is_given))

    def _read_file(self, argv: Sequence[str] | None) -> None:
        """Make what the file says the default of its flags."""
        if self._file is None:
            return
        name, path = self._file
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument(name, dest=_FILE_DEST, default=path)
        with contextlib.suppress(argparse.ArgumentError):
            # What is wrong on the command line is told by the parser that knows all of it.
            path = getattr(first.parse_known_args(argv)[0], _FILE_DEST)
        if not path:
            return
        try:
            values = read_settings(path, self._settings)
        except ConfigError as error:
            self._parser.error(f"{name} {error}")
        given = {one.dest for one in self._settings if one.is_given}
        for preset in self._presets.keys() & values.keys():
            if values.pop(preset):
                made = self._presets[preset].items()
                values |= {dest: value for dest, value in made if dest not in given}
        for dest in self._lists.keys() & values.keys():
            self._lists[dest] = values.pop(dest)
        self._in_file = values
        self._parser.set_defaults(**values)

    def error(self, message: str) -> None:
        """Refuse a combination of flags, as the parser refuses a value."""
        self._parser.error(message)

    def _setting(self, name: str, others: Sequence[str]) -> tuple[str, str | None]:
        """The variable that sets a flag, and its text; refused when two say different things."""
        variable = self._variable(name)
        found = {n: os.environ[n] for n in (variable, *others) if n in os.environ}
        if name == "--port":
            # Kubernetes sets these for pods beside a Service that is named kvflash or kvflash-http.
            found = {n: text for n, text in found.items() if not text.startswith("tcp://")}
        if name == "--host" and len(found) > 1:
            # It is the address that others reach this process at, too: who says both means that.
            found.pop(variable, None)
        if len(set(found.values())) > 1:
            said = " and ".join(f"{n}={text}" for n, text in found.items())
            self._parser.error(f"environment variables contradict each other: {said}")
        return next(iter(found.items()), (variable, None))

    def _truth(self, variable: str, text: str) -> bool:
        """What a variable that is on or off says."""
        word = text.strip().lower()
        if word not in (*_TRUE, *_FALSE):
            self._parser.error(
                f"environment variable {variable}: must be one of "
                f"{', '.join((*_TRUE, *_FALSE[1:]))}, got {text!r}"
            )
        return word in _TRUE

    @staticmethod
    def _variable(name: str) -> str:
        return variable_of(name)


def add_tls(flags: Flags) -> None:
    """Add certificate and key of the service's own HTTP."""
    flags.add(
        "--tls-cert-path",
        parse=str,
        default=None,
        variables=("DYN_TLS_CERT_PATH",),
        metavar="FILE",
        summary="serve HTTPS with this certificate, PEM, those between it and its authority's "
        "behind it; needs --tls-key-path",
    )
    flags.add(
        "--tls-key-path",
        parse=str,
        default=None,
        variables=("DYN_TLS_KEY_PATH",),
        metavar="FILE",
        summary="its private key, PEM",
    )


def add_metrics_prefix(flags: Flags) -> None:
    """Add what names of metrics begin with."""
    flags.add(
        "--metrics-prefix",
        parse=str,
        default="kvflash",
        variables=("DYN_METRICS_PREFIX",),
        summary="what the names in /metrics begin with, before an underscore",
    )


def add_common(
    flags: Flags,
    *,
    port: int,
    threads: int,
    extra_names: bool = False,
    variables: tuple[str, ...] = (),
) -> None:
    """Add host, port, threads and log flags; ``variables`` are further ones of host and port."""
    hosts = ("--host", "--http-host") if extra_names else ("--host",)
    ports = ("--port", "--http-port") if extra_names else ("--port",)
    flags.add(
        *hosts,
        parse=str,
        default="0.0.0.0",
        variables=variables[:1],
        summary="address to listen on",
    )
    flags.add(
        *ports,
        parse=bounded_int(0, 65_535),
        default=port,
        variables=variables[1:],
        summary="port to listen on; 0 picks a free one",
    )
    flags.add(
        "--threads", parse=bounded_int(1, 1_024), default=threads, summary="threads that serve"
    )
    flags.add(
        "--log-level",
        parse=str,
        default="info",
        choices=("error", "warn", "info", "debug", "trace"),
        summary="how much to log",
    )
    flags.add(
        "--log-format",
        parse=str,
        default="text",
        choices=("text", "json"),
        summary="form of a log line",
    )
