"""Where multimodal items lie in the blocks of a publisher, as extra keys of its events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.publisher import arguments

__all__ = ["OPEN_BLOCKS_MAX", "ItemPlaces"]

# Blocks that an item reaches beyond, remembered for calls that continue them; the oldest go first.
OPEN_BLOCKS_MAX = 16_384

_FIELD = "block_mm_infos"
_U64 = (1 << 64) - 1

# Per item that reaches the end of a block: its hash, and where it begins, counted from the block.
_Open = dict[int, int]


class ItemPlaces:
    """Finds where items begin that engines name block by block.

    An engine says which part of a block an item takes, so that an item of several blocks takes each
    one after the first from its beginning. Queries say where the item itself begins. Both hash to
    the same only if events tell the true beginning, which lies before these blocks.

    Args:
        block_size: Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        """Forget all blocks."""
        self._open.clear()

    def keys(
        self, infos: Sequence[Any] | None, names: Sequence[int], parent: int | None
    ) -> list[list[tuple[str, int]] | None] | None:
        """The extra keys of blocks, each the continuation of the one before.

        Args:
            infos: Per block None, or ``{"mm_objects": [{"mm_hash": u64, "offsets": [[start, end],
                ...]}, ...]}`` in tokens of the block; shape [blocks].
            names: Names of the blocks, u64; shape [blocks].
            parent: Name of the block before the first, or None.

        Returns:
            Per block its items, as identifier and first token counted from the block's; None where
            no block has any.

        Raises:
            InvalidArgumentError: Another shape or range, or not one entry per block; names it.
        """
        if infos is None:
            if self._open:
                for name in names:
                    self._open.pop(name, None)
            return None
        if len(arguments.listed(_FIELD, infos)) != len(names):
            raise InvalidArgumentError(
                f"{_FIELD} must have one entry for each of the {len(names)} blocks, "
                f"got {len(infos)}"
            )
        before = {} if parent is None else self._open.get(parent, {})
        keys: list[list[tuple[str, int]] | None] = []
        reached: list[_Open] = []
        for index, info in enumerate(infos):
            items, before = self._block(index, info, before)
            keys.append(items or None)
            reached.append(before)
        # Nothing is remembered of a call that is refused.
        for name, items_open in zip(names, reached, strict=True):
            self._open.pop(name, None)
            if items_open:
                self._open[name] = items_open
        while len(self._open) > OPEN_BLOCKS_MAX:
            self._open.popitem(last=False)
        return keys if any(keys) else None

    def _block(self, index: int, info: Any, before: _Open) -> tuple[list[tuple[str, int]], _Open]:
        """A block's items, and those of them that reach its end."""
        size = self._block_size
        try:
            # Without offsets the item is taken to fill the block.
            parts = [
                (number, each["mm_hash"], int(start), int(end))
                for number, each in enumerate(info["mm_objects"] if info else ())
                for start, end in (each.get("offsets") or [(0, size)])
            ]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidArgumentError(
                f"{_FIELD}[{index}] must be None or "
                '{"mm_objects": [{"mm_hash": u64, "offsets": [[start, end], ...]}, ...]}, '
                f"got {info!r}"
            ) from None
        keys: list[tuple[str, int]] = []
        reached: _Open = {}
        for number, value, start, end in parts:
            field = f"{_FIELD}[{index}].mm_objects[{number}]"
            hashed = arguments.check_range(f"{field}.mm_hash", value, 0, _U64)
            if not (start < min(end, size) and end > 0):
                raise InvalidArgumentError(
                    f"{field}.offsets must be [start, end) with start below the block size {size} "
                    "and end above 0 and start, counted from the block's first token, "
                    f"got [{start}, {end}]"
                )
            begin = before[hashed] - size if start == 0 and hashed in before else start
            if end >= size:
                reached[hashed] = begin
            # An identifier of 64 hexadecimal digits is taken for the hash that it begins with.
            keys.append((f"{hashed:016x}{'0' * 48}", begin))
        return keys, reached
