"""Block events as the scheduler means them, and their bytes in both wire eras of vLLM.

- ``positional``: an event is an array, its type first (vLLM up to about 0.22).
- ``tagged``: an event is a map with its type under "type"; absent keys mean the default
  (vLLM from about 0.27).

A batch is always the array ``[timestamp in seconds, [events], data parallel rank]`` in msgpack.
Pure: the timestamp comes from the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped,unused-ignore]

from kvflash.mocker.config import EventEra

MEDIUM_GPU = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Full blocks, each the continuation of the one before, that can now be reused.

    Attributes:
        block_hashes: Hashes in prompt order; u64.
        parent_block_hash: Hash of the block before the first one; None at the start of a prompt.
        token_ids: Tokens of all the blocks; len(block_hashes) * block_size of them.
        block_size: Tokens per block.
        lora_id: Number of the LoRA adapter, from 1, or None.
        lora_name: Name of the LoRA adapter, or None.
        extra_keys: What else identifies each block, e.g. ["salt"] for the first one; or None.
        medium: Where the blocks are.
    """

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    medium: str | None = MEDIUM_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that were evicted, in order of eviction."""

    block_hashes: Sequence[int]
    medium: str | None = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was reset: no block is left."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def encode_batch(
    events: Sequence[Event], *, timestamp_s: float, dp_rank: int | None, era: EventEra
) -> bytes:
    """Encode one batch.

    Args:
        events: Events in the order they happened.
        timestamp_s: Seconds since the epoch.
        dp_rank: Data parallel rank, or None.
        era: Shape of the events.

    Returns:
        The msgpack payload of one ZMQ message.
    """
    encode = _positional if era == "positional" else _tagged
    payload: bytes = msgpack.packb([timestamp_s, [encode(event) for event in events], dp_rank])
    return payload


def _positional(event: Event) -> list[object]:
    if isinstance(event, BlockStored):
        return [
            "BlockStored",
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,
        ]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium]
    return ["AllBlocksCleared"]


def _tagged(event: Event) -> dict[str, object]:
    if isinstance(event, BlockStored):
        fields: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
        }
        # Engines leave this key out rather than write None.
        if event.extra_keys is not None:
            fields["extra_keys"] = event.extra_keys
        return fields
    if isinstance(event, BlockRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": event.block_hashes,
            "medium": event.medium,
        }
    return {"type": "AllBlocksCleared"}
