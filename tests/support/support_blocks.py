"""What an index knows that believes an engine's events, written as naively as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HeldBlocks:
    """Blocks by their hash; each stands for its tokens and all before, with adapter and salt."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[object, ...]] = {}

    def store(
        self,
        hashes: Sequence[int],
        tokens: Sequence[int],
        parent: int | None,
        lora: str | None,
        salt: object,
    ) -> None:
        size = len(tokens) // len(hashes)
        prefix = (lora, salt) if parent is None else self.held[parent]
        for at, block in enumerate(hashes):
            assert block not in self.held, "stored twice"
            prefix = (prefix, tuple(tokens[at * size : (at + 1) * size]))
            self.held[block] = prefix

    def remove(self, hashes: Iterable[int]) -> None:
        for block in hashes:
            # The tail goes first, so a parent never goes before its child.
            removed = self.held.pop(block)
            assert not any(other[0] == removed for other in self.held.values())

    def cached_tokens(
        self, tokens: Sequence[int], size: int, lora: str | None, salt: object
    ) -> int:
        """Tokens of a prompt in leading held blocks; the last token is always computed."""
        known = set(self.held.values())
        prefix: tuple[object, ...] = (lora, salt)
        cached = 0
        for start in range(0, (len(tokens) - 1) // size * size, size):
            prefix = (prefix, tuple(tokens[start : start + size]))
            if prefix not in known:
                break
            cached += size
        return cached
