"""Block events as bytes: the tagged maps that vLLM publishes since about 0.27, plus ``cache_salt``.

A batch is the msgpack array ``[seconds since the epoch, [events], data parallel rank]``. Events are
encoded one by one by those who publish them, and joined to batches without being read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack  # type: ignore[import-untyped,unused-ignore]

__all__ = [
    "BLOCKS_MAX",
    "CLEARED",
    "NAME_BYTES_MAX",
    "TOKENS_MAX",
    "ItemKeys",
    "encode_batch",
    "encode_removed",
    "encode_stored",
]

# Receivers take four times as many tokens; five bytes each then still fit well into a frame.
TOKENS_MAX = 1 << 20
# Blocks of one event that receivers take.
BLOCKS_MAX = 65_536
# Length of a name that receivers take.
NAME_BYTES_MAX = 64 << 10

# Per block: identifiers of multimodal items and where they begin, or None.
ItemKeys = Sequence[Sequence[tuple[str, int]] | None]


def encode_stored(
    block_hashes: Sequence[int],
    token_ids: Sequence[int],
    *,
    parent_hash: int | None,
    block_size: int,
    medium: str | None,
    lora_id: int | None,
    lora_name: str | None,
    cache_salt: str | None,
    item_keys: ItemKeys | None,
) -> bytes:
    """Encode blocks that were stored, each the continuation of the one before.

    Args:
        block_hashes: Names of the blocks; u64.
        token_ids: Tokens of all the blocks; len(block_hashes) * block_size of them.
        parent_hash: Name of the block before the first; None at the start of a prompt.
        block_size: Tokens per block.
        medium: Where the blocks are; None means on the device.
        lora_id: Number of the adapter, or None.
        lora_name: Name of the adapter, or None.
        cache_salt: Salt of the prompt, or None.
        item_keys: Multimodal items, one entry a block; or None.
    """
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": block_hashes,
        "parent_block_hash": parent_hash,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": lora_id,
        "medium": medium,
        "lora_name": lora_name,
    }
    # Engines leave these out rather than write None.
    if cache_salt is not None:
        event["cache_salt"] = cache_salt
    if item_keys is not None:
        event["extra_keys"] = item_keys
    return _pack(event)


def encode_removed(block_hashes: Sequence[int], medium: str | None) -> bytes:
    """Encode blocks that are held no longer, in order of eviction."""
    return _pack({"type": "BlockRemoved", "block_hashes": block_hashes, "medium": medium})


def encode_batch(events: Sequence[bytes], *, timestamp_s: float, dp_rank: int) -> bytes:
    """Join encoded events to the payload of one message."""
    head = _PACKER.pack_array_header(3) + _pack(timestamp_s)
    return b"".join((head, _PACKER.pack_array_header(len(events)), *events, _pack(dp_rank)))


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


# Only its headers are used, which keep no state.
_PACKER = msgpack.Packer()
CLEARED = _pack({"type": "AllBlocksCleared"})
