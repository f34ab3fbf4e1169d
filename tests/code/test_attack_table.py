"""Every attack that once did harm has a test, and the table of attacks names it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "attack" / "README.md"


def test_the_tests_of_attacks_are_there() -> None:
    rows = [
        line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    named = [re.findall(r"`([\w./]+\.(?:rs|py))::(\w+)`", row) for row in rows[1:]]
    assert len(named) > 20
    assert all(named), "an attack without a test"
    for path, name in {one for row in named for one in row}:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(async fn|fn|def) {name}\(", text, re.MULTILINE), f"{path}::{name}"
