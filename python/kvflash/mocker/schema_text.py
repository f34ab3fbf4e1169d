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

# Longest string; a schema that requires a longer one is a mistake or an attack.
TEXT_CHARS_MAX = 65_536
WORD_LENGTHS = (3, 8)
# Steps through a pattern, including its repetitions.
STEPS_MAX = 200_000
# Strings of other lengths that are tried for a pattern.
TRIES = 8

# The parser of `re`; its tree describes what a pattern matches.
_PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " "
_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_SPACE": " ",
    "CATEGORY_WORD": string.ascii_letters + string.digits + "_",
}
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
    least, most = schema.get("minLength", 0), schema.get("maxLength", TEXT_CHARS_MAX)
    if type(least) is not int or type(most) is not int or not 0 <= least <= TEXT_CHARS_MAX:
        raise InvalidArgumentError(
            f"minLength and maxLength must be integers, minLength in 0..={TEXT_CHARS_MAX}, got "
            f"{least!r} and {most!r}"
        )
    if most < least:
        raise InvalidArgumentError(f"maxLength {most} is below minLength {least}")
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*WORD_LENGTHS)))
    if "pattern" in schema:
        return _matching(schema["pattern"], least, most, rng)
    form = schema.get("format")
    if form == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if form in _FORMATS:
        return _FORMATS[form].format(word)
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
    drawer = _Drawer(rng)
    shortest, longer = (len(drawer.draw(tree, more)) for more in (0, 1))
    # Each repetition adds about this many characters; branches may add more or fewer.
    enough = -(-(least - shortest) // max(1, longer - shortest))
    for more in (0, 1, *range(max(2, enough - TRIES), enough + TRIES)):
        found = drawer.draw(tree, more)
        if least <= len(found) <= most:
            return found
    raise InvalidArgumentError(
        f"found no text of {least}..={most} characters that matches pattern {pattern!r:.80}"
    )


class _Drawer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left = STEPS_MAX

    def draw(self, tree: Iterable[Any], more: int) -> str:
        """Make a matching string; repetitions occur `more` often than required."""
        return "".join(self._pieces(tree, more))

    def _pieces(self, tree: Iterable[Any], more: int) -> Iterator[str]:
        for op, value in tree:
            self._spend()
            name = str(op)
            if name == "LITERAL":
                yield chr(value)
            elif name == "NOT_LITERAL":
                yield self._rng.choice(_PRINTABLE.replace(chr(value), ""))
            elif name == "ANY":
                yield self._rng.choice(string.ascii_lowercase)
            elif name == "IN":
                yield self._rng.choice(_choices(value))
            elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                least, most, inner = value
                for _ in range(min(least + more, int(most))):
                    self._spend()
                    yield from self._pieces(inner, 0)
            elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
                yield from self._pieces(value[-1] if name == "SUBPATTERN" else value, more)
            elif name == "BRANCH":
                yield from self._pieces(self._rng.choice(value[1]), more)
            elif name != "AT":
                raise InvalidArgumentError(f"a pattern with {name} is not supported")

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InvalidArgumentError(f"a pattern may take {STEPS_MAX} steps, this takes more")


def _choices(members: list[Any]) -> str:
    found = ""
    for op, value in members:
        name = str(op)
        if name == "LITERAL":
            found += chr(value)
        elif name == "RANGE":
            first, last = value
            found += "".join(map(chr, range(first, min(last, first + 127) + 1)))
        elif name == "CATEGORY" and str(value) in _CATEGORIES:
            found += _CATEGORIES[str(value)]
        elif name == "CATEGORY":
            left_out = _CATEGORIES[str(value).replace("NOT_", "")]
            found += "".join(char for char in _PRINTABLE if char not in left_out)
    if str(members[0][0]) == "NEGATE":
        found = "".join(char for char in _PRINTABLE if char not in found)
    if not found:
        raise InvalidArgumentError("a pattern with an empty class of characters matches nothing")
    return found
