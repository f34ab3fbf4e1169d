"""A file that sets flags: YAML, TOML or JSON, a key for each flag."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvflash.errors import ConfigError
from kvflash.spelling import did_you_mean

FILE_BYTES_MAX = 1024 * 1024

# The words of YAML 1.2 that are not strings. PyYAML follows YAML 1.1, where off, no and 1:30 have
# other meanings.
_YAML_WORDS = (
    ("null", r"^(~|null|Null|NULL|)$", [*"~nN", ""]),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?(0|[1-9][0-9]*)$", [*"-+0123456789"]),
    (
        "float",
        r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$",
        [*"-+.0123456789"],
    ),
)


#: Converts a file's value, or raises ``ValueError`` or ``argparse.ArgumentTypeError`` with what is
#: legal.
Read = Callable[[Any], Any]


Translate = Callable[[dict[str, Any]], dict[str, Any]]


class Key(str):
    """A key in a file; messages show its line, if that is known."""

    line: int | None = None

    def __repr__(self) -> str:
        shown = super().__repr__()
        return shown if self.line is None else f"{shown} (line {self.line})"


def read_settings(
    path: str,
    known: Mapping[str, tuple[str, Read]],
    translate: Translate | None,
    elsewhere: Mapping[str, str],
) -> dict[str, Any]:
    """Read the file at ``path``: values by attribute.

    ``known`` are the settings by their keys, see :func:`key_of`: the attribute and the reader of
    each. A file that ends in neither ``.toml`` nor ``.json`` is YAML, or JSON if it begins with a
    brace. ``translate`` converts the keys of another file format to ours; ``elsewhere`` has the
    flag of the file that the key of any other setting belongs in. Any fault is a ConfigError that
    names file and key, and says what is legal.
    """
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    try:
        content = _content(path)
        content = content if translate is None else translate(content)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    for key, raw in content.items():
        setting = known.get(key_of(key))
        place = elsewhere.get(key_of(key))
        if setting is None and place is not None:
            raise ConfigError(
                f"{path}: key {key!r} belongs in the file of {place}: move it there, or give "
                "it as a flag"
            )
        if setting is None:
            hint = did_you_mean(key_of(key), known)
            hint = hint or "; a key is a flag of --help without the dashes in front"
            raise ConfigError(f"{path}: unknown key {key!r}{hint}")
        dest, read = setting
        if dest in keys:
            raise ConfigError(f"{path}: {_duplicates(keys[dest], key)}")
        keys[dest] = key
        try:
            values[dest] = read(raw)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    return values


def one_value(parse: Callable[[str], Any], choices: Sequence[Any] | None) -> Read:
    """Create a reader for a flag with one value, parsed as on the command line."""

    def read(raw: Any) -> Any:
        value = parse(_text(raw))
        if choices is not None and value not in choices:
            shown = ", ".join(map(str, choices))
            raise argparse.ArgumentTypeError(f"must be one of {shown}, got {_text(raw)!r}")
        return value

    return read


def joined(parse: Callable[[str], Any]) -> Read:
    """Create a reader for comma-separated values: also accepts a list, or a mapping with ``=``."""

    def read(raw: Any) -> Any:
        if isinstance(raw, dict):
            return parse(",".join(f"{key}={_text(value)}" for key, value in raw.items()))
        if isinstance(raw, list):
            return parse(",".join(map(_text, raw)))
        return parse(_text(raw))

    return read


def truth(raw: Any) -> bool:
    """Read ``true`` or ``false``."""
    if not isinstance(raw, bool):
        raise argparse.ArgumentTypeError(f"must be true or false, got {_shown(raw)}")
    return raw


def texts(raw: Any) -> list[str]:
    """Read a repeatable flag: a string, a list of strings, or for workers mappings.

    ``{url: http://a, events: tcp://a:1}`` is ``http://a,events=tcp://a:1``, and so is
    ``{http://a: {events: tcp://a:1}}``. ``{a: b}`` is ``a=b``.
    """
    if isinstance(raw, dict) and "url" not in raw:
        if all(isinstance(value, str) for value in raw.values()):
            return [f"{name}={value}" for name, value in raw.items()]
        given = ((url, fields if isinstance(fields, dict) else {}) for url, fields in raw.items())
        return [_worker(_unique([("url", url), *fields.items()])) for url, fields in given]
    found = []
    for item in raw if isinstance(raw, list) else [raw]:
        if isinstance(item, dict):
            found.append(_worker(item))
        elif isinstance(item, str):
            found.append(item)
        else:
            raise argparse.ArgumentTypeError(f"must be a list of strings, got {_shown(raw)}")
    return found


def _worker(fields: Mapping[str, Any]) -> str:
    given = dict(fields)
    url = given.pop("url", None)
    if not isinstance(url, str) or not url:
        raise argparse.ArgumentTypeError(f"a worker needs a url, got {_shown(fields)}")
    parts = [url, *(f"{name}={_text(value)}" for name, value in given.items())]
    for part in parts:
        if "," in part or part.split() != [part]:
            raise argparse.ArgumentTypeError(f"{part!r} must not contain a comma or a space")
    return ",".join(parts)


def key_of(name: str) -> str:
    """A flag's key: its name without the dashes in front; ``-`` and ``_`` are equivalent in it."""
    return name.lstrip("-").replace("_", "-")


def _text(raw: Any) -> str:
    """Convert a value to the form of the command line."""
    if raw is None:
        return "None"  # The flags' word for an unset value.
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise argparse.ArgumentTypeError(f"must be a string, a number or null, got {_shown(raw)}")
    return raw if isinstance(raw, str) else repr(raw)


def _shown(raw: Any) -> str:
    return json.dumps(raw, default=str)[:64]


class _Pairs(list[tuple[str, Any]]):
    """A mapping as the file has it, maybe with duplicate keys."""


def _mappings(content: Any) -> Any:
    """The file's content with mappings as dicts; refuses one that has a key twice."""
    # A value that YAML's aliases repeat is read once: they can repeat it billions of times.
    done: dict[int, Any] = {}

    def plain(value: Any, place: str) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if id(value) not in done:
            if isinstance(value, _Pairs):
                found = _unique(value, place)
                done[id(value)] = {
                    key: plain(item, _place(place, key)) for key, item in found.items()
                }
            else:
                items = enumerate(value)
                done[id(value)] = [plain(item, f"{place}[{index}]") for index, item in items]
        return done[id(value)]

    return plain(content, "")


def _unique(pairs: Iterable[tuple[str, Any]], place: str = "") -> dict[str, Any]:
    """A mapping of a file, at ``place`` in it; refuses a key that it has twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            first = next(one for one in found if one == key)
            raise ConfigError(_duplicates(_place(place, first), _place(place, key)))
        found[key] = value
    return found


def _place(outer: str, key: str) -> Key:
    """The place of a key in the file, such as ``tokenizer.path``."""
    name = key if re.fullmatch(r"[\w-]+", key) else json.dumps(key, ensure_ascii=False)
    place = Key(f"{outer}.{name}" if outer else key)
    place.line = key.line if isinstance(key, Key) else None
    return place


def _duplicates(first: str, second: str) -> str:
    return f"{first!r} and {second!r} set the same thing; keep one of them"


def _content(path: str) -> dict[str, Any]:
    """The file's mapping; raises ValueError if that can't be read."""
    # Here, because few services have such a file.
    from pathlib import Path  # noqa: PLC0415

    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"more than {FILE_BYTES_MAX} bytes, the limit")
    kind = {".json": "JSON", ".toml": "TOML"}.get(Path(path).suffix.lower(), "YAML")
    if kind == "YAML" and Path(path).suffix.lower() not in (".yaml", ".yml"):
        kind = "JSON" if data.lstrip()[:1] == b"{" else kind
    try:
        found = _mappings({"JSON": _json, "TOML": _toml, "YAML": _yaml}[kind](data.decode()))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or "nested too deeply"
        raise ValueError(f"is not {kind}: {reason}") from None
    if found is None:
        return {}  # An empty file, or one with only comments.
    if not isinstance(found, dict):
        raise ValueError(f"must be a mapping of flags to values, got a {type(found).__name__}")
    return found


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_Pairs)


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    # Imported here, so that only users of such a file wait for it.
    import yaml  # noqa: PLC0415

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Words of YAML 1.2, and mappings with the lines of their keys."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    for kind, pattern, first in _YAML_WORDS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), first)

    def mapping(loader: Any, node: Any) -> _Pairs:
        pairs = [(Key(key), value) for key, value in loader.construct_pairs(node, deep=True)]
        for (key, _), (place, _) in zip(pairs, node.value, strict=True):
            key.line = place.start_mark.line + 1
        return _Pairs(pairs)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (AttributeError, LookupError):
        # Of PyYAML itself, at values such as `!!bool maybe`.
        raise ValueError("a value does not fit its tag (!!...): leave the tag out") from None
