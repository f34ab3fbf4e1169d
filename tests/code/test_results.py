"""Scripts change their own section of benches/RESULTS.md only."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benches" / "peers" / "results.py"
spec = importlib.util.spec_from_file_location("results", PATH)
assert spec is not None
assert spec.loader is not None
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

TEXT = """# Results

By hand.

<!-- begin a -->
what was there
<!-- end a -->

Also by hand.
<!-- begin ab -->
<!-- end ab -->
"""


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "RESULTS.md"
    made.write_text(TEXT, encoding="utf-8")
    return made


def test_a_section_is_replaced_whole_and_nothing_else_changes(path):
    results.Section("a", path).write("| ours | theirs |\n|---|---|\n| 1 | 2 |\n\n")
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- begin a -->\n")
    section, _, after = rest.partition("<!-- end a -->\n")
    assert before == "# Results\n\nBy hand.\n\n"
    assert after == "\nAlso by hand.\n<!-- begin ab -->\n<!-- end ab -->\n"
    assert section.endswith("began.\n\n| ours | theirs |\n|---|---|\n| 1 | 2 |\n")
    assert "what was there" not in section
    assert list(path.parent.iterdir()) == [path]


def test_a_section_says_command_date_commit_and_machine(path, monkeypatch):
    script = str(results.REPOSITORY / "benches" / "peers" / "index.py")
    monkeypatch.setattr(results.sys, "argv", [script, "--trials", "3", "a b"])
    results.Section("ab", path).write("table")
    text = path.read_text(encoding="utf-8")
    assert "`python benches/peers/index.py --trials 3 'a b'`, 20" in text
    assert "commit " in text
    assert " cores of " in text


def test_a_second_run_replaces_the_first(path, monkeypatch):
    monkeypatch.setattr(results, "stamp", lambda load: "when and where")
    results.Section("a", path).write("first")
    once = path.read_text(encoding="utf-8")
    results.Section("a", path).write("second")
    assert path.read_text(encoding="utf-8") == once.replace("first", "second")


@pytest.mark.parametrize(
    "text",
    [
        "# Results\n",
        "<!-- begin a -->\n",
        "<!-- end a -->\n<!-- begin a -->\n",
        "<!-- begin a -->\n<!-- end a -->\n<!-- begin a -->\n<!-- end a -->\n",
    ],
    ids=["none", "no end", "wrong order", "twice"],
)
def test_marks_that_are_wrong_are_told_before_anything_is_measured(path, text):
    path.write_text(text, encoding="utf-8")
    with pytest.raises(results.SectionError, match="begin a"):
        results.Section("a", path)
    assert path.read_text(encoding="utf-8") == text


def test_the_real_file_has_a_place_for_every_script():
    for name in ("routers", "index", "indexer"):
        assert name in (PATH.parent / f"{name.partition('-')[0]}.py").read_text(encoding="utf-8")
        results.Section(name)
