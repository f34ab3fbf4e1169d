"""A command's flags: each with its environment variables, its key in a file, and its help."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflash.config_file import Read, Translate, key_of, one_value, read_settings, texts, truth
from kvflash.console import Parser, manual, program
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


def mode(choices: Sequence[str], off: str, on: str) -> Callable[[Any], str]:
    """Create a reader for one of a few words; yes is ``on``, and no is ``off``."""
    words = {**dict.fromkeys(_TRUE, on), **dict.fromkeys(_FALSE, off)}
    read = one_value(
        lambda text: text if text in choices else words.get(text.lower(), text), choices
    )
    return lambda raw: read(str(raw) if isinstance(raw, bool) else raw)


@dataclass(kw_only=True)
class _File:
    name: str
    dest: str
    translate: Translate | None
    settings: dict[str, tuple[str, Read]] = field(default_factory=dict)


class Flags:
    """An argument parser whose flags can also be set by environment variables and by files.

    ``--some-flag`` falls back to ``KVFLASH_SOME_FLAG``, and to the variables of its other names.
    The command line takes precedence over the environment, that over a file, and that over the
    default. A bad value is refused, with the name of the flag, the variable or the key. ``first``
    are the most important flags, by their first names, in the order of the help. Without
    ``has_variables`` a flag has only the variables that are named where it is added.
    """

    def __init__(
        self, command: str, about: str, *, first: Sequence[str] = (), has_variables: bool = True
    ) -> None:
        self._about, self._first, self._has_variables = about, first, has_variables
        # It returns only what the command line sets.
        self._parser = Parser(
            prog=program(command), manual=self._manual, argument_default=argparse.SUPPRESS
        )
        self._defaults: dict[str, Any] = {}
        self._environment: dict[str, Any] = {}
        self._files: list[_File] = []
        self._presets: dict[str, dict[str, Any]] = {}
        self._marks: dict[str, frozenset[str]] = {}
        self._positionals: list[str] = []
        self._section = _LAST[-1]
        self._lines: dict[str, tuple[str, str, str]] = {}

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
        in_file: Read | None = None,
        bare: Any = None,
    ) -> None:
        """Add a flag with one value; ``variables`` are further ones than those of its names.

        ``parse`` converts a string, or raises ``argparse.ArgumentTypeError``. ``in_file`` reads the
        value from a variable or a file, by default as on the command line. ``bare`` is the value of
        the flag without an argument; None: it needs an argument.
        """
        read = in_file or one_value(parse, choices)
        more: dict[str, Any] = {} if dest is None else {"dest": dest}
        if bare is not None:
            more |= {"nargs": "?", "const": bare}
        added = self._parser.add_argument(
            *names, type=parse, choices=choices, metavar=metavar, **more
        )
        variable, text = self._variable(names, variables)
        if text is not None:
            try:
                self._environment[added.dest] = read(text)
            except (argparse.ArgumentTypeError, ValueError) as error:
                self._parser.error(f"environment variable {variable}: {error}")
        if metavar is None:
            metavar = "|".join(map(str, choices)) if choices else _metavar(parse)
        value = metavar if bare is None else f"[{metavar}]"
        shown = "" if default in (None, ()) or default == [] else f" [{_shown(default, metavar)}]"
        self._say(names[0], f"{names[0]} {value}", summary + shown)
        self._declare(names, added.dest, default, read)

    def add_toggle(
        self,
        dest: str,
        *,
        on: Sequence[str] = (),
        off: Sequence[str] = (),
        default: bool = False,
        summary: str,
        variables: Sequence[str] = (),
    ) -> None:
        """Add flags that switch something on and flags that switch it off; the last one wins.

        Each name has its variable (``KVFLASH_NO_THING=1`` switches off); ``variables`` are further
        variables with a value for on or off. The command line takes precedence over all of them.
        """
        switches = dict.fromkeys((*map(variable_of, on), *variables), True)
        switches |= dict.fromkeys(map(variable_of, off), False)
        said: dict[str, bool] = {}
        for variable, is_on in switches.items() if self._has_variables else ():
            if text := os.environ.get(variable, "").strip():
                said[variable] = self._truth(variable, text) == is_on
        self._refuse_contradiction(said)
        if said:
            self._environment[dest] = next(iter(said.values()))
        for names, is_on in ((on, True), (off, False)):
            if names:
                self._parser.add_argument(*names, dest=dest, action="store_const", const=is_on)
        name = (*on, *off)[0]
        both = f"--[no-]{name[2:]}" if off and off[0] == f"--no-{name[2:]}" else name
        # One that can only switch on is off by default.
        shown = f" [{'on' if default else 'off'}]" if off else ""
        self._say(name, both, f"{summary}{shown}")
        self._declare(on, dest, default, truth)
        self._declare(off, dest, default, lambda raw: not truth(raw))

    def add_list(self, name: str, *, dest: str, summary: str, metavar: str) -> None:
        """Add a flag with one or more values, which may be repeated; files may call it ``dest``."""
        words = (self._variable((name,), ())[1] or "").split()
        if words:
            self._environment[dest] = words
        self._parser.add_argument(name, dest=dest, action="extend", nargs="+", metavar=metavar)
        self._say(name, f"{name} {metavar} ...", summary)
        self._declare((name, dest), dest, [], texts)

    def add_positionals(
        self, dest: str, *, metavar: str, summary: str, nargs: str | None = "+"
    ) -> None:
        """Add positional arguments: ``nargs`` "+" for many, "?" for an optional one, else one."""
        shown = {"+": f"{metavar} [{metavar} ...]", "?": f"[{metavar}]"}.get(nargs or "", metavar)
        self._positionals.append(shown)
        self._parser.add_argument(dest, nargs=nargs, metavar=metavar)
        self._defaults[dest] = None
        self._say(dest, metavar, summary)

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
        self.add(name, variables=variables, metavar="FILE", summary=summary)
        dest = name.lstrip("-").replace("-", "_")
        self._files.append(_File(name=name, dest=dest, translate=translate))

    def mark(self, dest: str, dests: Iterable[str]) -> None:
        """Set ``dest`` to whether any of ``dests`` is given, even with its default value."""
        self._marks[dest] = frozenset(dests)

    def preset(self, dest: str, made: dict[str, Any]) -> None:
        """``dest`` is a preset for other flags.

        In a file they take precedence over it. On a command line they must not contradict it.
        """
        self._presets[dest] = made

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse; a bad value ends the process with status 2 and a message that names the flag."""
        typed = vars(self._parser.parse_args(argv))
        said = self._environment | typed
        in_files: dict[str, Any] = {}
        for file in self._files:
            path = said.get(file.dest) or in_files.get(file.dest)
            if path:
                in_files |= self._read_file(file, path, said)
        for preset, made in self._presets.items():
            if said.get(preset):
                for dest in made:
                    if typed.get(dest, made[dest]) != made[dest]:
                        sets, but = self._words(dest, made[dest]), self._words(dest, typed[dest])
                        raise ConfigError(
                            f"{self._words(preset, True)} sets {sets}, which contradicts {but}: "
                            "leave one of them out"
                        )
                # It takes precedence over the file, like everything set beside it.
                in_files |= {dest: made[dest] for dest in made.keys() & in_files.keys()}
        given = in_files | said
        marks = {dest: not dests.isdisjoint(given) for dest, dests in self._marks.items()}
        values = self._defaults | given | marks
        for file in self._files:
            del values[file.dest]
        return argparse.Namespace(**values)

    def _words(self, dest: str, value: Any) -> str:
        """How a command line sets ``dest`` to this value."""
        actions = (one for one in self._parser._actions if one.dest == dest)
        action = next(one for one in actions if one.nargs != 0 or one.const == value)
        name = action.option_strings[0]
        return name if action.nargs == 0 else f"{name} {value}"

    def error(self, message: str) -> None:
        """Refuse a combination of flags, as the parser refuses a value."""
        self._parser.error(message)

    def _say(self, name: str, shown: str, summary: str) -> None:
        title = _FIRST if name in self._first else self._section
        self._lines[name] = (title, shown, summary)

    def _manual(self) -> str:
        """The help: the important flags first, in their order, then the sections."""
        lines = [*map(self._lines.__getitem__, self._first)]
        lines += [line for name, line in self._lines.items() if name not in self._first]
        sections: dict[str, list[tuple[str, str]]] = {}
        for title, shown, summary in lines:
            sections.setdefault(title, []).append((shown, summary))
        ends = [("--help", "Print this help and exit"), ("--version", "Print the version and exit")]
        sections.setdefault(_LAST[-1], []).extend(ends)
        last = {title: sections.pop(title) for title in _LAST if title in sections}
        ways = ["environment (KVFLASH_<FLAG>)"] if self._has_variables else []
        ways += [f"file of {file.name}" for file in reversed(self._files)]
        end = "Defaults are in brackets; a switch without a default is off."
        if ways:
            order = ", else from the ".join(["command line", *ways])
            end = f"The value of a flag comes from the {order}. {end}"
        usage = " ".join([self._parser.prog, *self._positionals, "[--flag VALUE ...]"])
        return manual(usage, self._about, {**sections, **last}, end)

    def _declare(self, names: Sequence[str], dest: str, default: Any, read: Read) -> None:
        """Note a flag's default, and that files may set it."""
        self._defaults[dest] = default
        for file in self._files:
            file.settings |= {key_of(name): (dest, read) for name in names}

    def _read_file(self, file: _File, path: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """One file's values, with presets expanded unless ``said`` has them."""
        elsewhere = {key: other.name for other in self._files for key in other.settings}
        try:
            values = read_settings(path, file.settings, file.translate, elsewhere)
        except ConfigError as error:
            self._parser.error(f"{file.name} {error}")
        for preset in self._presets.keys() & values.keys():
            if values.pop(preset) and preset not in said:
                values |= self._presets[preset]
        return values

    def _variable(self, names: Sequence[str], further: Sequence[str]) -> tuple[str, str | None]:
        """The variable that sets a flag, and its value; refused if two variables differ."""
        own = [variable_of(name) for name in names] if self._has_variables else []
        # A variable that is set but empty counts as unset, as in a file of a container's variables.
        found = {n: os.environ[n] for n in (*own, *further) if os.environ.get(n)}
        if names[0] == "--port":
            # Kubernetes sets these for pods when a Service is named kvflash or kvflash-http.
            found = {n: text for n, text in found.items() if not text.startswith("tcp://")}
        if names[0] == "--host" and len(found) > 1:
            # The variable is also the address at which others reach this process, so both are
            # meant.
            found.pop(variable_of(names[0]), None)
        self._refuse_contradiction(found)
        return next(iter(found.items()), ("", None))

    def _refuse_contradiction(self, found: Mapping[str, object]) -> None:
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
