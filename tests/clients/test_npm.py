"""The `openai` package of npm, of the release in npm/package-lock.json; needs node and npm."""

from __future__ import annotations

from collections.abc import Callable

from support_frontend import Frontend


def test_the_openai_package(frontend: Frontend, node: Callable[..., list[str]]) -> None:
    assert len(node("openai.mjs", frontend.url + "/v1")) == 10
