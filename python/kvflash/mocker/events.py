"""Block events of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvflash.publisher.stream import EventOutbox

MEDIUM_GPU = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Full, reusable blocks, each the continuation of the one before.

    Attributes:
        block_hashes: Hashes in prompt order; u64.
        parent_block_hash: Hash of the block before the first one; None at the start of a prompt.
        token_ids: Tokens of all the blocks; len(block_hashes) * block_size of them.
        block_size: Tokens per block.
        lora_id: Number of the LoRA adapter, from 1, or None.
        lora_name: Name of the LoRA adapter, or None.
        cache_salt: Salt of the prompt, if the first block starts the prompt; or None.
        medium: Where the blocks are.
    """

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    medium: str | None = MEDIUM_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that were evicted, in order of eviction."""

    block_hashes: Sequence[int]
    medium: str | None = MEDIUM_GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was reset: all blocks are gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def put(outbox: EventOutbox, events: Sequence[Event]) -> None:
    """Queue the events of one pass as a separate batch; without events, do nothing.

    Never waits: a subscriber that is too slow loses batches and sees a gap.
    """
    if not events:
        return
    for event in events:
        if isinstance(event, BlockStored):
            outbox.store(
                event.token_ids,
                [event.block_size] * len(event.block_hashes),
                event.block_hashes,
                event.lora_id,
                event.parent_block_hash,
                lora_name=event.lora_name,
                cache_salt=event.cache_salt,
                medium=event.medium,
            )
        elif isinstance(event, BlockRemoved):
            outbox.remove(event.block_hashes, medium=event.medium)
        else:
            outbox.clear()
    outbox.cut()
