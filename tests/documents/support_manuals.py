"""Which test runs which code block of which page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from support_markdown import Block, read_blocks

__all__ = ["ROOT", "Manuals"]

ROOT = Path(__file__).parents[2]


class Manuals:
    """The code blocks of some pages; one is named by its file and how its first line begins.

    Args:
        pages: Paths from the root of the repository; their file names differ.
        not_run: Blocks that no test runs, each with the reason.
    """

    def __init__(self, pages: Iterable[str], not_run: Mapping[tuple[str, str], str]) -> None:
        self.pages = tuple(pages)
        # A drawing is text.
        self.blocks = [
            block
            for page in self.pages
            for block in read_blocks(ROOT / page)
            if block.language != "text"
        ]
        self.not_run = dict(not_run)
        self._run: set[tuple[str, str]] = set()

    def find(self, name: str, beginning: str) -> Block:
        """The one block of that name."""
        fits = [b for b in self.blocks if b.path.name == name and b.first.startswith(beginning)]
        assert len(fits) == 1, f"{len(fits)} blocks of {name} begin with {beginning!r}"
        return fits[0]

    def runs(self, *names: tuple[str, str]) -> pytest.MarkDecorator:
        """Hand these blocks to the test."""
        self._run.update(names)
        found = [self.find(*name) for name in names]
        return pytest.mark.parametrize("blocks", [found], ids=[names[0][0]])

    def check(self) -> None:
        """Every block is run, or says why not; call it when the module is read."""
        stems = [Path(page).name for page in self.pages]
        assert len(set(stems)) == len(stems), "pages of one name"
        known = self._run | set(self.not_run)
        unknown = [
            str(block)
            for block in self.blocks
            if not any(block.path.name == n and block.first.startswith(b) for n, b in known)
        ]
        assert unknown == []
        for name in self.not_run:
            self.find(*name)
