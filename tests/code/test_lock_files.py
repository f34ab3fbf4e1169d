"""Every lock file knows what our crates depend on now: builds with `--locked` do not fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def dependencies(lock: Path) -> dict[str, set[str]]:
    """Of each of our crates in a lock file, the names of the crates that it uses."""
    packages = tomllib.loads(lock.read_text())["package"]
    return {
        package["name"]: {use.split()[0] for use in package.get("dependencies", [])}
        for package in packages
        if package["name"].startswith("kvflash") and "source" not in package
    }


def others() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*/Cargo.lock"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines()]


def test_there_is_another_lock_file() -> None:
    assert others()


@pytest.mark.parametrize("lock", others(), ids=str)
def test_lock_files_agree(lock: Path) -> None:
    ours = dependencies(ROOT / "Cargo.lock")
    theirs = {name: uses for name, uses in dependencies(lock).items() if name in ours}
    assert theirs, f"{lock} names none of our crates"
    for name, uses in theirs.items():
        # Dependencies of tests are in the workspace's lock file only.
        assert uses <= ours[name], f"{lock}: run `cargo metadata` beside it"
        missing = ours[name] - uses - dev_only(name)
        assert not missing, f"{lock}: {name} lacks {sorted(missing)}: run `cargo metadata` there"


def dev_only(name: str) -> set[str]:
    """Dependencies of a crate's tests and benches only."""
    for manifest in [*ROOT.glob("rust/*/Cargo.toml"), ROOT / "Cargo.toml"]:
        read = tomllib.loads(manifest.read_text())
        if read["package"]["name"] == name:
            return set(read.get("dev-dependencies", {})) - set(read.get("dependencies", {}))
    return set()


def test_the_makefile_builds_from_the_lock_file() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    builds = [line for line in lines if re.search(r"^[^#]*\bcargo (test|run|build) ", line)]
    assert len(builds) > 8
    assert [line for line in builds if "--locked" not in line] == []
