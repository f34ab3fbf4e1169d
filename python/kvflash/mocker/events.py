"""Block events as the scheduler means them, and their bytes in both wire eras of vLLM.

- ``positional``: an event is an array, its type first (vLLM up to about 0.22).
- ``tagged``: an event is a map with its type under "type"; absent keys mean the default
  (vLLM from about 0.27).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvflash.mocker.config import EventEra
from kvflash.publisher.wire import encode_cleared, encode_removed, encode_stored

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
    extra_keys: Sequence[Sequence[str] | None] | None = None
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


def encode(event: Event, era: EventEra) -> bytes:
    """The bytes of an event in the shape of an era."""
    if isinstance(event, BlockStored):
        return encode_stored(
            event.block_hashes,
            event.token_ids,
            parent_hash=event.parent_block_hash,
            block_size=event.block_size,
            medium=event.medium,
            lora_id=event.lora_id,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys,
            era=era,
        )
    if isinstance(event, BlockRemoved):
        return encode_removed(event.block_hashes, event.medium, era=era)
    return encode_cleared(era=era)
