"""The code blocks of a Markdown file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "read_blocks"]

INDENT = "    "


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        path: The file.
        line: Line of its first line of code, from 1.
        language: What stands behind the fence, lower case; empty for an indented block.
        text: The code, without fence and indentation, each line ended.
    """

    path: Path
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """The first line that says something."""
        return next((line for line in self.text.splitlines() if line.strip()), "")

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    """All code blocks of a file: fenced with ``` or ~~~, and those indented by four columns.

    An indented block follows an empty line, as in a list it would be part of the item's text.

    Raises:
        ValueError: A fence is never closed.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    at, is_after_gap = 0, True
    while at < len(lines):
        line = lines[at]
        fence = _fence(line)
        if fence:
            end = next((i for i in range(at + 1, len(lines)) if _closes(lines[i], fence)), None)
            if end is None:
                raise ValueError(f"{path}:{at + 1}: the fence is never closed")
            indent = len(line) - len(line.lstrip())
            code = [one[min(indent, len(one) - len(one.lstrip())) :] for one in lines[at + 1 : end]]
            language = line.strip()[len(fence) :].strip().lower()
            blocks.append(_block(path, at + 2, language, code))
            at = end + 1
        elif is_after_gap and line.startswith(INDENT) and line.strip():
            end = at
            while end < len(lines) and (lines[end].startswith(INDENT) or not lines[end].strip()):
                end += 1
            code = [one[len(INDENT) :] for one in lines[at:end]]
            while code and not code[-1].strip():
                code.pop()
            blocks.append(_block(path, at + 1, "", code))
            at = end
        else:
            is_after_gap = not line.strip()
            at += 1
            continue
        is_after_gap = True
    return blocks


def _fence(line: str) -> str:
    text = line.lstrip()
    for mark in "`~":
        length = len(text) - len(text.lstrip(mark))
        if length >= 3 and "`" not in text[length:]:
            return mark * length
    return ""


def _closes(line: str, fence: str) -> bool:
    text = line.strip()
    return text.startswith(fence) and not text.strip(fence[0])


def _block(path: Path, line: int, language: str, code: list[str]) -> Block:
    return Block(path, line, language, "".join(one + "\n" for one in code))
