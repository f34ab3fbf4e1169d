"""Reads the fields of requests, and refuses wrong ones with a status and an error body."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from kvflash.errors import InvalidArgumentError

Body = dict[str, Any]
Fields = Mapping[str, Any]


class ApiError(InvalidArgumentError):
    """A request that is answered with an OpenAI error body; ``param`` names the faulty field."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: Body = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }


def refuse(message: str, param: str | None = None) -> NoReturn:
    """Refuse a request as malformed, with status 400."""
    raise ApiError(400, "BadRequestError", message, param)


def read(
    fields: Fields, name: str, is_legal: Callable[[Any], bool], wanted: str, default: Any = None
) -> Any:
    """The value of a field; ``default`` if it is missing or null, refused if it is not legal."""
    value = fields.get(name)
    if value is None:
        return default
    if not is_legal(value):
        refuse(f"{name} must be {wanted}, got {shown(value)}", name)
    return value


def shown(value: object, length: int = 80) -> str:
    """A wrong value for a message, cut to this length."""
    try:
        return repr(value)[:length]
    # JSON that could just be parsed may be too deep for this.
    except RecursionError:
        return "a value that is nested too deeply"


def boolean(fields: Fields, name: str, default: bool = False) -> bool:
    """True or false."""
    return bool(read(fields, name, lambda value: type(value) is bool, "true or false", default))


def integer(
    fields: Fields, name: str, least: int, most: int, default: Any = None, *, why: str = ""
) -> Any:
    """An integer in its limits; ``why`` explains them."""

    def is_legal(value: Any) -> bool:
        return is_integer(value) and least <= value <= most

    return read(fields, name, is_legal, f"in {least}..={most}{why}", default)


def text(fields: Fields, name: str) -> Any:
    """A string that is not empty."""
    return read(fields, name, lambda value: is_text(value) and bool(value), "a non-empty string")


def one_of(fields: Fields, name: str, values: Sequence[str]) -> str:
    """One of these strings; the first one if it is missing or empty."""
    value = fields.get(name) or values[0]
    if value not in values:
        refuse(f"{name} must be one of {', '.join(values)}, got {shown(value)}", name)
    return str(value)


def listed(fields: Fields, name: str, is_legal: Callable[[Any], bool], wanted: str) -> list[Any]:
    """A list of legal items; empty if it is missing."""

    def are_legal(value: Any) -> bool:
        return isinstance(value, list) and all(map(is_legal, value))

    return list(read(fields, name, are_legal, wanted, ()))


def texts(fields: Fields, name: str) -> list[str]:
    """A string, or a list of them, as a list; empty if it is missing."""
    if is_text(fields.get(name)):
        return [fields[name]]
    return listed(fields, name, is_text, "a string or a list of strings")


def mapping(fields: Fields, name: str) -> Body:
    """Fields in a field; empty if it is missing."""
    return dict(read(fields, name, is_object, "an object", {}))


def inner(value: object, *path: str) -> Any:
    """The value under these names, one in the other; None where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def is_integer(value: object) -> bool:
    """Whether it is an integer; true and false are not."""
    return type(value) is int


def is_text(value: object) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def is_object(value: object) -> bool:
    """Whether it is a JSON object."""
    return isinstance(value, dict)
