"""Makes a small value that a JSON schema allows: the answer of a model with structured output.

It supports type, enum, const, $ref into the schema itself, allOf, anyOf, oneOf, and the limits of
objects, arrays, numbers and strings. It writes required properties only. It ignores not, if,
contains, patternProperties, propertyNames, and limits beside an enum: a value may violate them.
"""

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.fields import integer
from kvflash.mocker.schema_text import text

# Values, including nested ones, that are tried for one schema.
VALUES_MAX = 10_000
# Depths of values, tried in this order: the flattest value is found first.
DEPTHS = (1, 2, 3, 5, 8, 16, 32)
# Tries for one item of an array of unique items.
TRIES = 64
# Numbers are drawn from a range of this size.
SPREAD = 100

_TYPES = {
    "object": ("properties", "required", "additionalProperties", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# The JSON types of Python's values; a float without a fraction is an integer, too.
_NAMES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class _DeadEndError(Exception):
    """No value on this branch; another one may have one."""


def instance(schema: object, rng: random.Random) -> Any:
    """Make a small value that a schema allows; an InvalidArgumentError says why there is none."""
    maker = _Maker(schema, rng)
    reason = "too deep"
    for depth in DEPTHS:
        try:
            return maker.make(schema, depth)
        except _DeadEndError as error:
            reason = str(error)
        except RecursionError:
            break
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            # Keywords of a wrong type, which would take a schema of schemas to name.
            raise InvalidArgumentError(f"the schema is malformed: {error}") from error
    raise InvalidArgumentError(f"found no value that the schema allows: {reason}")


class _Maker:
    def __init__(self, root: object, rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._left = VALUES_MAX

    def make(self, schema: object, depth: int) -> Any:
        if self._left == 0:
            raise InvalidArgumentError(f"the schema needs more than {VALUES_MAX} values")
        self._left -= 1
        if schema is False:
            raise _DeadEndError("false allows nothing")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidArgumentError(f"a schema must be an object, got {schema!r:.80}")
        if depth == 0:
            raise _DeadEndError(f"deeper than {DEPTHS[-1]}")
        reasons = []
        for flat in self._flat(schema, set()):
            for kind in self._types(flat):
                try:
                    return self._of_type(kind, flat, depth)
                except _DeadEndError as error:
                    reasons.append(str(error))
        raise _DeadEndError(reasons[-1] if reasons else "its parts contradict each other")

    def _flat(self, schema: dict[str, Any], seen: set[str]) -> Iterator[dict[str, Any]]:
        """Each variant of the schema without references and alternatives."""
        keys = ("const", "anyOf", "oneOf", "$ref", "allOf")
        key = next((key for key in keys if key in schema), None)
        if key is None:
            if schema.get("enum") and "type" in schema:
                legal = [one for one in _list(schema, "enum") if _is_of(one, schema["type"])]
                schema = {**schema, "enum": legal}
            if schema.get("enum", True) != []:
                yield schema
            return
        rest = {name: value for name, value in schema.items() if name != key}
        if key == "const":
            yield from self._flat(_merged(rest, {"enum": [schema[key]]}), seen)
        elif key == "$ref":
            ref = str(schema[key])
            if ref not in seen:
                yield from self._flat(_merged(self._resolve(ref), rest), seen | {ref})
        elif key == "allOf":
            for part in _list(schema, key):
                rest = _merged(rest, part)
            yield from self._flat(rest, seen)
        else:
            options = _list(schema, key)
            for option in self._rng.sample(options, len(options)):
                yield from self._flat(_merged(rest, option), seen)

    def _resolve(self, ref: str) -> object:
        if not ref.startswith("#"):
            raise InvalidArgumentError(f"$ref must lead into the schema itself, got {ref!r:.80}")
        found: Any = self._root
        for step in filter(None, ref[1:].split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise InvalidArgumentError(f"$ref {ref!r:.80} leads to nothing")
        return found

    def _types(self, schema: dict[str, Any]) -> list[Any]:
        told = schema.get("type")
        if isinstance(told, list) and told:
            return self._rng.sample(told, len(told))
        if told is not None:
            return [told]
        found = [kind for kind, keys in _TYPES.items() if any(key in schema for key in keys)]
        return found[:1] or ["string"]

    def _of_type(self, kind: object, schema: dict[str, Any], depth: int) -> Any:
        if "enum" in schema:
            return self._rng.choice(_list(schema, "enum"))
        makers: dict[object, Callable[[], Any]] = {
            "object": lambda: self._object(schema, depth),
            "array": lambda: self._array(schema, depth),
            "string": lambda: text(schema, self._rng),
            "integer": lambda: self._number(schema, is_integer=True),
            "number": lambda: self._number(schema, is_integer=False),
            "boolean": lambda: self._rng.random() < 0.5,
            "null": lambda: None,
        }
        if not isinstance(kind, str) or kind not in makers:
            raise InvalidArgumentError(f"type must be one of JSON's, got {kind!r:.80}")
        return makers[kind]()

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise InvalidArgumentError("properties must be an object and required a list")
        names = [name for name in properties if name in required]
        names += [str(name) for name in required if name not in properties]
        least = integer(schema, "minProperties", 0, VALUES_MAX, 0)
        names += [name for name in properties if name not in names][: max(0, least - len(names))]
        names += [f"key_{number}" for number in range(least - len(names))]
        if len(names) > schema.get("maxProperties", VALUES_MAX):
            raise _DeadEndError(f"{len(names)} properties are required, above maxProperties")
        return {name: self.make(properties.get(name, more), depth - 1) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = _list(schema, "prefixItems") if "prefixItems" in schema else []
        rest = schema.get("items", True)
        items: list[Any] = []
        count = integer(schema, "minItems", 0, VALUES_MAX, 0)
        if count > schema.get("maxItems", VALUES_MAX):
            raise _DeadEndError(f"minItems {count} is above maxItems")
        for at in range(count):
            one = first[at] if at < len(first) else rest
            for _ in range(TRIES):
                item = self.make(one, depth - 1)
                if not schema.get("uniqueItems") or item not in items:
                    break
            else:
                raise _DeadEndError("no further distinct item was found")
            items.append(item)
        return items

    def _number(self, schema: dict[str, Any], *, is_integer: bool) -> float:
        least, most, above, below, step = (_figure(schema, key) for key in _TYPES["number"])
        low = max((limit for limit in (least, above) if limit is not None), default=None)
        high = min((limit for limit in (most, below) if limit is not None), default=None)
        step = step or Fraction(1)
        if low is None:
            low = Fraction(0) if high is None or high >= 0 else high - SPREAD * step
        if high is None:
            high = max(low, Fraction(0)) + SPREAD * step
        if is_integer and step.denominator != 1:
            step = Fraction(step.numerator)  # The least integer among its multiples.
        first = math.ceil(low / step)
        last = min(math.floor(high / step), first + SPREAD)
        values = [n * step for n in range(first, last + 1) if n * step not in (above, below)]
        if not values:
            middle = (low + high) / 2
            is_free = not is_integer and "multipleOf" not in schema
            if not is_free or low > high or middle in (above, below):
                raise _DeadEndError(f"no number in {float(low)}..={float(high)}")
            values = [middle]
        value = self._rng.choice(values)
        return int(value) if value.denominator == 1 else float(value)


def _merged(one: object, other: object) -> dict[str, Any]:
    """The intersection of two schemas, as far as a single schema can express it."""
    for schema in (one, other):
        if schema is False:
            return {"enum": []}
        if schema is not True and not isinstance(schema, dict):
            raise InvalidArgumentError(f"a schema must be an object, got {schema!r:.80}")
    merged = dict(one) if isinstance(one, dict) else {}
    for key, value in other.items() if isinstance(other, dict) else ():
        if key not in merged or merged[key] == value:
            merged[key] = value
        elif key == "properties":
            mine = merged[key]
            merged[key] = mine | {
                name: {"allOf": [mine[name], value[name]]} if name in mine else value[name]
                for name in value
            }
        elif key in ("required", "allOf"):
            merged[key] = [*merged[key], *value]
        elif key in ("items", "additionalProperties"):
            merged[key] = {"allOf": [merged[key], value]}
        elif key in ("const", "anyOf", "oneOf", "$ref"):
            merged["allOf"] = [*merged.get("allOf", []), {key: value}]
        elif key == "enum":
            merged[key] = [one for one in merged[key] if one in value]
        elif key == "type":
            mine, theirs = ([v] if isinstance(v, str) else v for v in (merged[key], value))
            both = [kind for kind in mine if kind in theirs]
            if not both and "integer" in [*mine, *theirs] and "number" in [*mine, *theirs]:
                both = ["integer"]
            if not both:
                return {"enum": []}
            merged[key] = both
        elif key.startswith(("min", "exclusiveMin")):
            merged[key] = max(merged[key], value)
        elif key.startswith(("max", "exclusiveMax")):
            merged[key] = min(merged[key], value)
        else:
            merged[key] = value
    return merged


def _is_of(value: object, told: object) -> bool:
    """Whether a value is of the type, or of one of the types."""
    names = _NAMES[type(value)]
    if isinstance(value, float) and value.is_integer():
        names = ("integer", "number")
    return any(name in names for name in (told if isinstance(told, list) else [told]))


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema[key]
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError(f"{key} must be a non-empty list, got {value!r:.80}")
    return value


def _figure(schema: dict[str, Any], key: str) -> Fraction | None:
    value = schema.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InvalidArgumentError(f"{key} must be a number, got {value!r:.80}")
    if key == "multipleOf" and value <= 0:
        raise InvalidArgumentError(f"multipleOf must be above 0, got {value!r}")
    # By its decimal notation: 0.1 is a tenth.
    return Fraction(str(value))
