"""Links of the Markdown files: the file is there, and so is the heading.

Pages of docs/ leave that folder by absolute addresses only, as the site has nothing beside it.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OURS = "https://github.com/kvflash/kvflash/blob/main/"
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "benches").rglob("*.md"),
        *(ROOT / "tests" / "attack").glob("*.md"),
    }
)
# Source files named in the text, with some of their folders or none.
SOURCE = re.compile(r"`([A-Za-z_][\w/]*\.(?:rs|py))`")
LINK = re.compile(r"(?<!!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")


def prose(path: Path) -> list[str]:
    """The lines of a page without its code blocks."""
    lines, is_code = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            lines.append(line)
    return lines


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub, and the site, give the headings of a page."""
    found: list[str] = []
    for line in prose(path):
        if heading := re.match(r"#{1,6} (.+?)\s*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            text = unicodedata.normalize("NFC", text).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            again = sum(one == slug or one.startswith(slug + "-") for one in found)
            found.append(slug if slug not in found else f"{slug}-{again}")
    return frozenset(found)


def test_the_pages_are_found() -> None:
    assert len(PAGES) >= 35
    assert sum(len(LINK.findall("\n".join(prose(page)))) for page in PAGES) > 300


@cache
def sources() -> frozenset[str]:
    """Every source file of the repository, under its path and each end of it."""
    folders = ("rust", "capi", "python", "tests", "benches", "demo", "deploy", "examples", "fuzz")
    files = [path.relative_to(ROOT) for top in folders for path in (ROOT / top).rglob("*.*")]
    parts = [path.parts for path in files if path.suffix in (".rs", ".py")]
    return frozenset("/".join(path[at:]) for path in parts for at in range(len(path)))


def test_named_source_files_exist() -> None:
    named = {name: page for page in PAGES for name in SOURCE.findall("\n".join(prose(page)))}
    assert len(named) > 15
    assert {name: page for name, page in named.items() if name not in sources()} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in LINK.findall("\n".join(prose(page))):
        target, _, anchor = link.removeprefix(OURS).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        if link.startswith(OURS):
            path = ROOT / target
        else:
            path = (page.parent / target).resolve() if target else page
            if DOCS in page.parents and DOCS not in path.parents:
                wrong.append(f"{link}: outside of docs/, begin it with {OURS}")
                continue
        if not path.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            wrong.append(f"{link}: no such heading")
    assert wrong == []
