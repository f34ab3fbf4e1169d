"""A command's flags: each with its environment variables, its key in a file, and its help."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflash.config_file import Setting, Translate, one_value, read_settings, texts, truth
from kvflash.console import NARROW, Help, Parser, program
from kvflash.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")

#: The first section of the help, and the last ones.
_FIRST = "Flags to know first"
_LAST = ("Limits and timeouts", "TLS", "Compatibility", "Other")


def variable_of(name: str) -> str:
    """The environment variable of a flag."""
    return "KVFLASH_" + name.lstrip("-").replace("-", "_").upper()


def source_of(name: str, text: str) -> str:
    """The source of ``text``: the flag, or its variable if that is set to it."""
    variable = variable_of(name)
    said = os.environ.get(variable)
    if said is None or text not in (said, *said.split()):
        return name
    return f"environment variable {variable}"


@dataclass(kw_only=True)
class _File:
    name: str
    dest: str
    path: str | None
    translate: Translate | None
    settings: list[Setting] = field(default_factory=list)


class Flags:
    """An argument parser whose flags can also be set by environment variables and by files.

    ``--some-flag`` falls back to ``KVFLASH_SOME_FLAG``, and to the variables of its other names.
    The command line takes precedence over the environment, that over a file, and that over the
    default. A bad value is refused, with the name of the flag, the variable or the key. ``first``
    are the most important flags, by their first names, in the order of the help.
    """

    def __init__(
        self, command: str, about: str, *, first: Sequence[str] = (), has_variables: bool = True
    ) -> None:
        self._help = Help(about=about)
        self._positionals: list[str] = []
        self._parser = Parser(prog=program(command), manual=self._help)
        self._first = first
        self._section = _LAST[-1]
        self._lines: dict[str, tuple[str, str, str]] = {}
        self._has_variables = has_variables
        self._lists: dict[str, list[str]] = {}
        self._files: list[_File] = []
        self._presets: dict[str, dict[str, Any]] = {}
        self._in_file: dict[str, Any] = {}
        self._in_environment: set[str] = set()
        self._marks: dict[str, frozenset[str]] = {}

    def section(self, title: str) -> None:
        """Start a section of the help, which contains the flags added from now on."""
        self._section = title

    def add(
        self,
        *names: str,
        summary: str,
        parse: Callable[[str], Any] = str,
        default: Any = None,
        metavar: str | None = None,
        choices: Sequence[Any] | None = None,
        variables: Sequence[str] = (),
        dest: str | None = None,
        in_file: Callable[[str, Any], Any] | None = None,
        bare: Any = None,
    ) -> None:
        """Add a flag with one value; each name has its variable, ``variables`` are further ones.

        ``parse`` converts a string, or raises ``argparse.ArgumentTypeError``. ``in_file`` reads the
        value from a file, by default as on the command line. ``bare`` is the value of the flag
        without an argument; None: it needs an argument.
        """
        variable, text = self._setting(names[0], (*map(variable_of, names[1:]), *variables))
        read = one_value(parse, choices)
        shown = "" if default in (None, ()) or default == [] else f" [{_shown(default, metavar)}]"
        if text is not None:
            try:
                default = read("", text)
            except (argparse.ArgumentTypeError, ValueError) as error:
                self._parser.error(f"environment variable {variable}: {error}")
        more: dict[str, Any] = {} if dest is None else {"dest": dest}
        if bare is not None:
            more |= {"nargs": "?", "const": bare}
        added = self._parser.add_argument(
            *names, type=parse, default=default, choices=choices, metavar=metavar, **more
        )
        if metavar is None:
            metavar = "|".join(map(str, choices)) if choices else _metavar(parse)
        value = metavar if bare is None else f"[{metavar}]"
        self._say(names[0], f"{names[0]} {value}", summary + shown)
        self._can_be_in_file(names, added.dest, in_file or read, text is not None)

    def add_switch(self, *names: str, dest: str, value: bool, summary: str) -> None:
        """Add a flag without a value that sets ``dest``; its variable has the first name."""
        variable, found = self._setting(names[0], ())
        text = (found or "").strip()
        default = value if self._truth(variable, text) else not value
        self._parser.add_argument(
            *names, dest=dest, action="store_const", const=value, default=default
        )
        self._say(names[0], names[0], summary)
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
        """Add flags that switch something on and flags that switch it off; the last one wins.

        Each name has its variable (``KVFLASH_NO_THING=1`` switches off); ``variables`` are further
        variables with a value for on or off. The command line takes precedence over all of them.
        """
        said: dict[str, bool] = {}
        for variable, is_on in [
            *((variable_of(name), True) for name in on),
            *((variable_of(name), False) for name in off),
            *((variable, True) for variable in variables),
        ]:
            text = os.environ.get(variable) if self._has_variables else None
            if text is not None and text.strip():
                said[variable] = self._truth(variable, text) == is_on
        self._refuse_contradiction(said)
        value = next(iter(said.values()), default)
        for names, is_on in ((on, True), (off, False)):
            if names:
                self._parser.add_argument(
                    *names, dest=dest, action="store_const", const=is_on, default=value
                )
        name = (*on, *off)[0]
        both = f"--[no-]{name[2:]}" if off and off[0] == f"--no-{name[2:]}" else name
        self._say(name, both, f"{summary} [{'on' if default else 'off'}]")
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
        """Add a flag with one of a few values; without an argument, or for yes, it is ``bare``."""
        words = {**dict.fromkeys(_TRUE, bare), **dict.fromkeys(_FALSE, default)}

        def parse(text: str) -> str:
            return text if text in choices else words.get(text.lower(), text)

        read = one_value(parse, choices)
        variable, found = self._setting(name, variables)
        value = default
        try:
            value = default if found is None else read("", found)
        except argparse.ArgumentTypeError as error:
            self._parser.error(f"environment variable {variable}: {error}")
        added = self._parser.add_argument(
            name, nargs="?", const=bare, default=value, choices=choices
        )
        self._say(name, f"{name} [{'|'.join(choices)}]", f"{summary} [{default}]")
        self._can_be_in_file(
            (name,),
            added.dest,
            lambda key, raw: read(key, str(raw) if isinstance(raw, bool) else raw),
            found is not None,
        )

    def add_list(self, name: str, *, dest: str, summary: str, metavar: str) -> None:
        """Add a flag with one or more values, which may be repeated; files may call it ``dest``."""
        found = (self._setting(name, ())[1] or "").split()
        self._lists[dest] = found
        self._parser.add_argument(name, dest=dest, action="extend", nargs="+", metavar=metavar)
        self._say(name, f"{name} {metavar} ...", summary)
        self._can_be_in_file((name, dest), dest, texts, bool(found))

    def add_positionals(
        self, dest: str, *, metavar: str, summary: str, nargs: str | None = "+"
    ) -> None:
        """Add positional arguments: ``nargs`` "+" for many, "?" for an optional one, else one."""
        shown = {"+": f"{metavar} [{metavar} ...]", "?": f"[{metavar}]"}.get(nargs or "", metavar)
        self._positionals.append(shown)
        self._parser.add_argument(dest, nargs=nargs, metavar=metavar)
        self._say(dest, metavar, summary)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse; a bad value ends the process with status 2 and a message that names the flag."""
        self._finish_help()
        self._read_files(argv)
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
        for file in self._files:
            delattr(args, file.dest)
        for preset, made in self._presets.items():
            if getattr(args, preset):
                # It takes precedence over the file, like everything set beside it.
                for dest in made.keys() & self._in_file.keys():
                    if getattr(args, dest) is self._in_file[dest]:
                        setattr(args, dest, made[dest])
        for dest, default in self._lists.items():
            if getattr(args, dest) is None:
                setattr(args, dest, default)
        return args

    def add_file(
        self,
        name: str,
        *,
        summary: str,
        variables: Sequence[str] = (),
        translate: Translate | None = None,
    ) -> None:
        """Add a flag that names a file, which may set the flags added from now on.

        The command line takes precedence over the environment, and that over files. A file added
        later takes precedence over an earlier one, which may name it.
        """
        text = self._setting(name, variables)[1]
        dest = name.lstrip("-").replace("-", "_")
        self._parser.add_argument(name, dest=dest, metavar="FILE")
        self._say(name, f"{name} FILE", summary)
        self._can_be_in_file((name,), dest, one_value(str, None), text is not None)
        self._files.append(_File(name=name, dest=dest, path=text, translate=translate))

    def mark(self, dest: str, dests: Iterable[str]) -> None:
        """Set ``dest`` to whether any of ``dests`` is given, even with its default value."""
        self._marks[dest] = frozenset(dests)

    def preset(self, dest: str, made: dict[str, Any]) -> None:
        """In a file ``dest`` is a preset for other flags, which take precedence over it."""
        self._presets[dest] = made

    def error(self, message: str) -> None:
        """Refuse a combination of flags, as the parser refuses a value."""
        self._parser.error(message)

    def _say(self, name: str, shown: str, summary: str) -> None:
        title = _FIRST if name in self._first else self._section
        self._lines[name] = (title, shown, summary)

    def _finish_help(self) -> None:
        """Put the lines into their sections: the important ones first, in their order."""
        missing = [name for name in self._first if name not in self._lines]
        assert not missing, f"no such flags: {missing}"
        lines = [*map(self._lines.__getitem__, self._first)]
        lines += [line for name, line in self._lines.items() if name not in self._first]
        sections: dict[str, list[tuple[str, str]]] = {}
        for title, shown, summary in lines:
            sections.setdefault(title, []).append((shown, summary))
        ends = [("--help", "Print this and end"), ("--version", "Print the version and end")]
        sections.setdefault(_LAST[-1], []).extend(ends)
        last = {title: sections.pop(title) for title in _LAST if title in sections}
        self._help.sections = {**sections, **last}
        self._help.usage = " ".join([*self._positionals, "[--flag VALUE ...]"])
        ways = ["environment (KVFLASH_<FLAG>)"] if self._has_variables else []
        ways += [f"file of {file.name}" for file in reversed(self._files)]
        if ways:
            order = ", then the ".join(["command line", *ways])
            self._help.end = f"A flag is read from the {order}. Defaults are in brackets."
        else:
            self._help.end = "Defaults are in brackets."

    def _can_be_in_file(
        self, names: Sequence[str], dest: str, read: Callable[[str, Any], Any], is_given: bool
    ) -> None:
        if is_given:
            self._in_environment.add(dest)
        for file in self._files:
            file.settings.append(Setting(names=names, dest=dest, read=read, is_given=is_given))

    def _read_files(self, argv: Sequence[str] | None) -> None:
        """Use the files' values as defaults of their flags."""
        first = argparse.ArgumentParser(
            add_help=False, allow_abbrev=False, exit_on_error=False, formatter_class=NARROW
        )
        for file in self._files:
            first.add_argument(file.name, dest=file.dest, default=file.path)
        paths = {file.dest: file.path for file in self._files}
        with contextlib.suppress(argparse.ArgumentError):
            # Errors on the command line are left to the parser that knows all flags.
            paths = vars(first.parse_known_args(argv)[0])
        values: dict[str, Any] = {}
        for file in self._files:
            named = values.pop(file.dest, None)
            path = paths[file.dest] or named
            if path:
                values |= self._read_file(file, path)
        for dest in self._lists.keys() & values.keys():
            self._lists[dest] = values.pop(dest)
        self._in_file = values
        self._parser.set_defaults(**values)

    def _read_file(self, file: _File, path: str) -> dict[str, Any]:
        """One file's values, with presets expanded."""
        elsewhere = {
            name: other.name
            for other in self._files
            for one in other.settings
            for name in one.names
        }
        try:
            values = read_settings(path, file.settings, file.translate, elsewhere)
        except ConfigError as error:
            self._parser.error(f"{file.name} {error}")
        given = {one.dest for one in file.settings if one.is_given}
        for preset in self._presets.keys() & values.keys():
            if values.pop(preset):
                made = self._presets[preset].items()
                values |= {dest: value for dest, value in made if dest not in given}
        return values

    def _setting(self, name: str, others: Sequence[str]) -> tuple[str, str | None]:
        """The variable that sets a flag, and its value; refused if two variables differ."""
        variable = variable_of(name)
        names = (variable, *others) if self._has_variables else ()
        # A variable that is set but empty counts as unset, as in a file of a container's variables.
        found = {n: os.environ[n] for n in names if os.environ.get(n)}
        if name == "--port":
            # Kubernetes sets these for pods when a Service is named kvflash or kvflash-http.
            found = {n: text for n, text in found.items() if not text.startswith("tcp://")}
        if name == "--host" and len(found) > 1:
            # The variable is also the address at which others reach this process, so both are
            # meant.
            found.pop(variable, None)
        self._refuse_contradiction(found)
        return next(iter(found.items()), (variable, None))

    def _refuse_contradiction(self, found: Mapping[str, object]) -> None:
        """Refuse variables whose meanings differ."""
        if len(set(found.values())) > 1:
            said = " and ".join(f"{name}={os.environ[name]}" for name in found)
            self._parser.error(f"environment variables contradict each other: {said}")

    def _truth(self, variable: str, text: str) -> bool:
        word = text.strip().lower()
        if word not in (*_TRUE, *_FALSE):
            self._parser.error(
                f"environment variable {variable}: must be one of "
                f"{', '.join((*_TRUE, *_FALSE[1:]))}, got {text!r}"
            )
        return word in _TRUE


def _shown(default: Any, metavar: str | None) -> str:
    """A default as a user would write it."""
    if metavar == "SIZE" and default:
        unit, size = ("GiB", 2**30) if default >= 2**30 else ("MiB", 2**20)
        return f"{default // size}{unit}"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _metavar(parse: Callable[[str], Any]) -> str:
    """Placeholder for a value whose type is sufficient."""
    kinds = {"parse_int": "N", "parse_float": "NUMBER", "int": "N", "float": "NUMBER"}
    return kinds.get(getattr(parse, "__name__", ""), "VALUE")
