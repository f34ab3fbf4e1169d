"""One frontend over two mockers for the clients of each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support_apis import two_mockers
from support_frontend import Frontend


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with two_mockers() as frontend:
        yield frontend
        frontend.wait_idle()
