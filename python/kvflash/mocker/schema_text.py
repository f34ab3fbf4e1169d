"""Strings that a JSON schema allows: by length, by format, by pattern."""

import importlib
import random
import re
import string
import sys
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.fields import integer, is_integer, read

# Longest string; a schema that requires a longer one is a mistake or an attack.
TEXT_CHARS_MAX = 65_536
WORD_LENGTHS = (3, 8)
# Steps through a pattern, including its repetitions.
STEPS_MAX = 200_000
# Strings of other lengths that are tried for a pattern.
TRIES = 8

# The parser of `re`, and the compiler of its trees, which describe what a pattern matches.
_IS_NEW = sys.version_info >= (3, 11)
_PARSER: Any = importlib.import_module("re._parser" if _IS_NEW else "sre_parse")
_COMPILER: Any = importlib.import_module("re._compiler" if _IS_NEW else "sre_compile")
_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " "
_BEYOND = range(0xD800)  # Up to the surrogates.
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "duration": "P1D",
    "email": "{}@example.com",
    "hostname": "{}.example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "time": "12:00:00Z",
    "uri": "https://example.com/{}",
}


def text(schema: dict[str, Any], rng: random.Random) -> str:
    """Make a short string that minLength, maxLength, pattern and format of a schema allow."""
    least = integer(schema, "minLength", 0, TEXT_CHARS_MAX, 0)
    most = read(schema, "maxLength", is_integer, "an integer", TEXT_CHARS_MAX)
    if most < least:
        raise InvalidArgumentError(f"maxLength {most} is below minLength {least}")
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*WORD_LENGTHS)))
    if "pattern" in schema:
        return _matching(schema["pattern"], least, most, rng)
    form = schema.get("format")
    if form == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if form in _FORMATS:
        found = _FORMATS[form].format(word)
        if not least <= len(found) <= most:
            raise InvalidArgumentError(f"found no {form} of {least}..={most} characters")
        return found
    word += "".join(rng.choices(string.ascii_lowercase, k=max(0, least - len(word))))
    return word[:most]


def _matching(pattern: object, least: int, most: int, rng: random.Random) -> str:
    """Make a string that matches a pattern, trying few repetitions first."""
    if not isinstance(pattern, str):
        raise InvalidArgumentError(f"pattern must be text, got {pattern!r:.80}")
    try:
        tree = _PARSER.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidArgumentError(f"pattern {pattern!r:.80} is not valid: {error}") from error
    drawer = _Drawer(rng, tree)
    shortest, longer = (len(drawer.draw(more)) for more in (0, 1))
    # Each repetition adds about this many characters; branches may add more or fewer.
    enough = -(-(least - shortest) // max(1, longer - shortest))
    for more in (0, 1, *range(max(2, enough - TRIES), enough + TRIES)):
        found = drawer.draw(more)
        if least <= len(found) <= most:
            return found
    raise InvalidArgumentError(
        f"found no text of {least}..={most} characters that matches pattern {pattern!r:.80}"
    )


class _Drawer:
    def __init__(self, rng: random.Random, tree: Any) -> None:
        self._rng = rng
        self._tree = tree
        self._left = STEPS_MAX
        self._chars: dict[int, str] = {}  # Of parts of the tree, by their identity.

    def draw(self, more: int) -> str:
        """Make a matching string; repetitions occur `more` often than required."""
        return "".join(self._pieces(self._tree, more))

    def _pieces(self, tree: Iterable[Any], more: int) -> Iterator[str]:
        for part in tree:
            self._spend(1)
            name, value = str(part[0]), part[1]
            if name == "LITERAL":
                yield chr(value)
            elif name in ("NOT_LITERAL", "ANY", "IN"):
                yield self._rng.choice(self._chars_of(part))
            elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                least, most, inner = value
                for _ in range(min(least + more, int(most))):
                    self._spend(1)
                    yield from self._pieces(inner, 0)
            elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
                yield from self._pieces(value[-1] if name == "SUBPATTERN" else value, more)
            elif name == "BRANCH":
                yield from self._pieces(self._rng.choice(value[1]), more)
            elif name != "AT":
                raise InvalidArgumentError(f"a pattern with {name} is not supported")

    def _chars_of(self, part: Any) -> str:
        """The characters that a class matches: the printable ones of ASCII, if there are any."""
        if (found := self._chars.get(id(part))) is None:
            self._spend(10)
            pattern = _COMPILER.compile(_PARSER.SubPattern(self._tree.state, [part]))
            found = "".join(filter(pattern.fullmatch, _PRINTABLE))
            if not found:
                self._spend(1_000)
                found = "".join(filter(pattern.fullmatch, map(chr, _BEYOND)))
            if not found:
                raise InvalidArgumentError(
                    "a pattern with an empty class of characters matches nothing"
                )
            self._chars[id(part)] = found
        return found

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise InvalidArgumentError(f"a pattern may take {STEPS_MAX} steps, this takes more")
