"""Two mockers behind a frontend, for tests of APIs and of their clients."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support_frontend import Frontend, Mocker

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY},
}


def library(name: str) -> Any:
    """An official client's library, imported when a test first uses it.

    All of pytest's processes collect all tests, and such a library takes seconds to import.
    """
    return importlib.import_module(name)


@contextmanager
def two_mockers(*flags: str) -> Iterator[Frontend]:
    """A frontend that serves the model `m` of two mockers, with more flags of its own."""
    with (
        Mocker("--speedup-ratio", "1000", workers=2) as mocker,
        Frontend("--worker", mocker.spec(0), "--worker", mocker.spec(1), *flags) as frontend,
    ):
        frontend.wait_healthy(1, 2)
        yield frontend
