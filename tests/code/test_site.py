"""The site's menu: every page of docs/ is in it once, below a heading that the readers look for.

`make site` builds it strictly, in CI; this needs nothing to be installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Reads past the name of a Python function."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def config() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [page for one in inside for page in pages(one)]


def test_every_page_is_in_the_menu_once() -> None:
    listed = pages(config()["nav"])
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed)) > 40
    assert set(listed) == there


def test_the_menu_has_the_seven_parts() -> None:
    parts = [next(iter(part)) for part in config()["nav"]]
    assert parts == ["Start", "Use", "Operate", "Extend", "Design", "Reference", "Cookbook"]


def test_there_are_no_plugins_but_the_search() -> None:
    assert config()["plugins"] == ["search"]


def test_each_page_has_one_title_and_a_tutorial_says_so() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        titles = re.findall(r"^# (.+)$", text, re.MULTILINE)
        assert len(titles) == 1, path
        assert text.startswith("# "), path
        assert titles[0].startswith("Tutorial: ") == (path.parent.name == "start"), path
