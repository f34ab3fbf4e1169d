"""Workflows: they parse, run actions of fixed commits, and name targets that the Makefile has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.y*ml"))
# A tag can be moved to other code, a commit can't. The comment says which release it is.
USES = re.compile(r"^\s*(?:- )?uses:\s*(.*?)\s*$", re.MULTILINE)
PINNED = re.compile(r"[\w-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def jobs(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict), path.name
    return found["jobs"]


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE))


def test_the_workflows_are_found() -> None:
    names = {path.name for path in WORKFLOWS}
    assert names >= {"audit.yml", "lint.yml", "nightly.yml", "test.yml", "wheels.yml"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_workflow_parses_and_each_job_ends(path: Path) -> None:
    found = jobs(path)
    assert found
    for name, job in found.items():
        assert job["steps"], name
        assert job["timeout-minutes"], f"{path.name}: {name} has no time limit"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    written = USES.findall(path.read_text(encoding="utf-8"))
    parsed = [
        step["uses"] for job in jobs(path).values() for step in job["steps"] if "uses" in step
    ]
    assert len(written) == len(parsed) > 0
    loose = [one for one in written if not PINNED.fullmatch(one)]
    assert not loose, f"{path.name}: not owner/name@<40 hex> # vX.Y.Z: {loose}"


def test_an_action_has_one_version_everywhere() -> None:
    versions: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for one in USES.findall(path.read_text(encoding="utf-8")):
            name, _, version = one.partition("@")
            versions.setdefault(name, set()).add(version)
    assert len(versions) > 3
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_nightly_names_targets_of_the_makefile_with_a_time_limit() -> None:
    (job,) = jobs(ROOT / ".github/workflows/nightly.yml").values()
    rows = job["strategy"]["matrix"]["include"]
    named = [row["target"] for row in rows]
    assert set(named) >= {"fuzz", "loom", "sanitize", "soak", "attack", "gamedays", "peers"}
    assert len(set(named)) == len(named)
    assert set(named) <= targets()
    # GitHub ends a job after six hours.
    assert all(0 < row["minutes"] < 360 for row in rows)
    assert any("make ${{ matrix.target }}" in step.get("run", "") for step in job["steps"])


def test_each_make_in_a_workflow_names_a_target() -> None:
    called = set()
    for path in WORKFLOWS:
        for job in jobs(path).values():
            for step in job["steps"]:
                called |= set(re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE))
    assert called >= {"lint", "audit"}
    assert called <= targets()


def test_dependabot_keeps_the_pins_fresh() -> None:
    found = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))
    ecosystems = {one["package-ecosystem"] for one in found["updates"]}
    assert ecosystems == {"cargo", "pip", "github-actions"}
    for one in found["updates"]:
        folders = one.get("directories") or [one["directory"]]
        assert all((ROOT / folder.lstrip("/")).is_dir() for folder in folders)
