"""Statements in ARCHITECTURE.md on crates and the core's rooms agree with the tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_doors import MAP, rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def manifest(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "Cargo.toml").read_text(encoding="utf-8"))


def test_the_table_of_crates_is_that_of_the_workspace() -> None:
    members = {".", *manifest(".")["workspace"]["members"]}
    told = {}
    for names, folders, uses, _ in rows("crate"):
        for name, folder in zip(names.split(", "), folders.split(", "), strict=True):
            # The fence is the workspace's own package.
            told[folder.replace("rust/src", ".")] = (name.strip("`"), uses)
    assert set(told) == members
    known = set()
    for folder, (name, uses) in told.items():
        found = manifest(folder)
        assert found["package"]["name"] == name
        used = {one for one in found.get("dependencies", {}) if one.startswith("kvflash")}
        assert used <= set(re.findall(r"`([^`]+)`", uses)), f"{name} uses {used}"
        known |= used
    assert known == {"kvflash-core", "kvflash-publish", "kvflash-serve"}


def test_the_rooms_of_the_core_are_those_whose_order_is_checked() -> None:
    checked = (ROOT / "rust/core/tests/all/rooms.rs").read_text(encoding="utf-8")
    _, _, order = checked.partition("const ORDER")
    wanted = re.findall(r'"(\w+)"', order.partition("];")[0])
    assert len(wanted) > 10
    _, _, told = MAP.partition("its own and lower rooms only: ")
    assert [name.strip() for name in told.partition(".")[0].split(",")] == wanted


@pytest.mark.parametrize("name", ["kv-indexer", "kv-indexer-metrics"])
def test_a_build_with_features_of_another_indexer_is_a_python_module(name: str) -> None:
    """``maturin develop --features NAME`` leaves out the features of pyproject.toml."""
    assert "python" in manifest(".")["features"][name]


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", MAP))
def test_what_the_map_leads_to_is_there(path: str) -> None:
    assert (ROOT / path).exists()
