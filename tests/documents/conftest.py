"""Fixtures of the tests that run documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support_stage import Stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage; this process finds its workers too."""
    with Stage(tmp_path) as made:
        for name in ("KVFLASH_DISCOVERY_DIR", "KVFLASH_HOST"):
            monkeypatch.setenv(name, made.env[name])
        yield made
