"""The pages about moving to kvflash name flags, paths and policies that kvflash has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvflash.frontend.args import parse_args
from kvflash.settings import table

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
PAGES = sorted(FOLDER.glob("*.md"))
SYSTEMS = [page for page in PAGES if page.name != "index.md"]


def ours(page: Path, heading: str) -> list[str]:
    """The cells about kvflash of the table below a heading."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no {heading!r}"
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", line)[2] for line in lines[2:]]


def test_every_system_has_its_page() -> None:
    names = {page.stem for page in SYSTEMS}
    assert names == {"dynamo", "sglang", "vllm-router", "production-stack", "aibrix", "llm-d"}
    for page in SYSTEMS:
        assert re.search(r"^## Better (there|in)", page.read_text("utf-8"), re.MULTILINE), page.name


@pytest.mark.parametrize("page", SYSTEMS, ids=lambda page: page.stem)
def test_flags_are_those_of_the_frontend(page: Path) -> None:
    known = {flag for one in table("frontend") for flag in one.flags}
    known |= {"--config", "--router-policy-config"}
    text = page.read_text(encoding="utf-8")
    heading = "Flags" if "\n## Flags\n" in text else "Settings"
    named = {flag for cell in ours(page, heading) for flag in re.findall(r"`(--[a-z-]+)", cell)}
    assert len(named) >= 4
    assert named <= known, f"{page.name}: {sorted(named - known)}"


@pytest.mark.parametrize("page", SYSTEMS, ids=lambda page: page.stem)
def test_metrics_are_those_of_the_manual(page: Path) -> None:
    manual = "".join(
        (FOLDER.parent / name).read_text(encoding="utf-8")
        for name in ("frontend.md", "indexer.md", "policies.md")
    )
    cells = ours(page, "Endpoints, headers and metrics")
    named = {name for cell in cells for name in re.findall(r"`(kvflash_\w+[a-z])", cell)}
    assert {name for name in named if name not in manual} == set()


def test_policies_and_weights_are_taken() -> None:
    (cell,) = (cell for cell in ours(FOLDER / "aibrix.md", "Settings") if "prefix-cache:2" in cell)
    names = re.findall(r"`([a-z-]+)`", (FOLDER / "aibrix.md").read_text(encoding="utf-8"))
    policies = [name for name in names if name.startswith(("least-", "vtc-", "prefix-", "session"))]
    assert len(set(policies)) >= 8
    for name in {*policies, cell.split("`")[1].split()[1]}:
        assert parse_args(["--worker", "http://a:1", "--router-mode", name]).router_mode == name


def test_commands_for_aibrix_set_what_has_an_effect() -> None:
    text = (FOLDER / "aibrix.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (AIBRIX_.*\n(?: {8}.*\n)*)", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        has_own_blocks = "KV_EVENT_SYNC_ENABLED=false" in command
        assert ("TOKENIZER_TYPE" in command) is has_own_blocks is (",events=" not in command)
