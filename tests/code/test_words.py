"""Turns of phrase that readers stumble over are not in messages, help, README and manuals.

STYLE of the texts: a sentence has a thing as its subject ("the worker", "kvflash", "you") and says
what it is and does. In comments and docstrings only the worst turns are looked for.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvflash.settings import table

ROOT = Path(__file__).parents[2]
BANNED = re.compile(
    r"\b(?:is|are) none\b|\bone's own\b|\b(?:is|are|was|were) told\b"
    r"|\b(?:nobody|whose|whoever)\b"
    # Statements that begin so; questions may.
    r"|(?:^|(?<=[.;:|] ))(?-i:Who|What)\b(?![^.|\n]*\?)",
    re.IGNORECASE | re.MULTILINE,
)
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.yml")),
    *sorted((ROOT / "deploy").rglob("*.json")),
]
PYTHON = sorted((ROOT / "python" / "kvflash").rglob("*.py")) + sorted((ROOT / "demo").glob("*.py"))
RUST = [
    path
    for crate in ("rust/core", "rust/serve", "rust/publish", "rust", "capi")
    for path in sorted((ROOT / crate / "src").rglob("*.rs"))
    if "tests" not in path.relative_to(ROOT).parts and path.stem != "tests"
]
# In errors, log lines and help of metrics, too.
IN_MESSAGES = re.compile(
    r"\b(?:what became of|gave way|how they ended|made into tokens|of no use|is there twice)\b"
    r"|\b(?:registered|booked|active) already\b|\bas may be\b|\bnot taken\b|\bsay the same\b"
    r"|\banew\b|\bis no (?:JSON|file|frame|key|text)\b",
    re.IGNORECASE,
)
# In comments and docstrings, where "None; there is none" is right.
IN_COMMENTS = re.compile(
    r"(?<!there )\b(?:is|are) none\b|\bone's own\b|\b(?:is|are|was|were) told\b"
    r"|(?<!`)\b(?:nobody|whoever)\b(?!`)|\bthere twice\b|\bis no (?:JSON|file|frame|key|text)\b"
    # Lines and sentences that begin so; questions may.
    r"|(?:^|(?<=[.;:|] ))(?-i:Who|Whom|Of what)\b(?![^.|\n]*\?)",
    re.IGNORECASE | re.MULTILINE,
)
# Rooms that are still to be rewritten: their comments are not checked.
UNCHECKED = tuple(
    str(ROOT / "rust" / room)
    for room in (
        "core/src/text",
        "serve/src/frontend/runtime",
        "serve/src/lock",
    )
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def found(text: str) -> list[str]:
    return [match[0] for match in BANNED.finditer(text)]


def found_in_message(text: str) -> list[str]:
    return found(text) + [match[0] for match in IN_MESSAGES.finditer(text)]


def python_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a file without its docstrings, each with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


RUST_TEXT = re.compile(r"""//[^\n]*|r(#*)".*?"\1|"((?:[^"\\]|\\.)*)"|'(?:[^'\\]|\\.)'""", re.DOTALL)


def rust_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a file up to its tests, each with its line."""
    code = path.read_text(encoding="utf-8").partition("#[cfg(test)]")[0]
    for match in RUST_TEXT.finditer(code):
        if match[2] is not None:
            yield code.count("\n", 0, match.start()) + 1, re.sub(r"\\\n\s*", "", match[2])


def python_comments(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a file, each with its line."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def rust_comments(path: Path) -> Iterator[tuple[int, str]]:
    """Comments of a file, each line with its number."""
    code = path.read_text(encoding="utf-8")
    for match in RUST_TEXT.finditer(code):
        if match[0].startswith("//"):
            yield code.count("\n", 0, match.start()) + 1, match[0].lstrip("/! ")


def places(texts: Iterable[tuple[Path, int, str]], is_wrong: Callable[[str], Any]) -> list[str]:
    """Where the wrong ones stand, and what they are."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text!r}" for path, line, text in texts if is_wrong(text)
    ]


def test_enough_is_looked_at() -> None:
    assert len(PAGES) > 50
    assert len(PYTHON) > 180
    assert len(RUST) > 340


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [f"{n}: {found(line)}" for n, line in enumerate(lines, 1) if found(line)] == []


def test_messages_in_python() -> None:
    texts = [(path, *text) for path in PYTHON for text in python_texts(path)]
    assert len(texts) > 5_000
    assert places(texts, found) == []


def test_messages_in_rust() -> None:
    texts = [(path, *text) for path in RUST for text in rust_texts(path)]
    assert len(texts) > 4_000
    assert places(texts, found_in_message) == []


def test_comments_in_python() -> None:
    texts = [(path, *text) for path in PYTHON for text in python_comments(path)]
    assert len(texts) > 2_400
    assert places(texts, IN_COMMENTS.search) == []


def test_comments_in_rust() -> None:
    checked = [path for path in RUST if not str(path).startswith(UNCHECKED)]
    texts = [(path, *text) for path in checked for text in rust_comments(path)]
    assert len(texts) > 10_000
    assert places(texts, IN_COMMENTS.search) == []


@pytest.mark.parametrize("service", ["frontend", "router", "indexer"])
def test_help_of_the_settings(service: str) -> None:
    settings = table(service)
    assert len(settings) > 20
    texts = {one.key: " ".join([one.section, *one.help]) for one in settings}
    assert {key: text for key, text in texts.items() if found(text)} == {}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("worker 7 is none of model m", True),
        ("Who hangs up leaves the queue.", True),
        ("It waits. What is left out stays.", True),
        ("| fcfs | Who goes first |", True),
        ("Nobody waits by it.", True),
        ("What do I gain?", False),
        ("**What if an engine publishes no events?** It serves.", False),
        ("The worker that answered", False),
        ("worker 7 is registered already", True),
        ("Prefills, by what became of them", True),
    ],
)
def test_the_scan_finds_what_it_is_for(text: str, is_found: bool) -> None:
    assert bool(found_in_message(text)) == is_found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("ConfigError: The value is none.", True),
        ("Who sent a request.", True),
        ("Safety: nobody reads it any more.", True),
        ("A worker that is no frame", True),
        ("The first one, or None if there is none.", False),
        ("`nobody` or `other`", False),
        ("What the core knows of them.", False),
    ],
)
def test_the_scan_of_comments_finds_what_it_is_for(text: str, is_found: bool) -> None:
    assert bool(IN_COMMENTS.search(text)) == is_found
