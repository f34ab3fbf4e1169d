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
    """Full, reusable blocks, each the continuation of the one before."""

    block_hashes: Sequence[int]  # u64, in prompt order.
    parent_block_hash: int | None  # None at the start of a prompt.
    token_ids: Sequence[int]  # block_size for each of block_hashes.
    block_size: int
    lora_id: int | None = None  # Number of the adapter, from 1.
    lora_name: str | None = None
    cache_salt: str | None = None  # Only if the first block starts the prompt.
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
    """Queue the events of one pass as a batch. Never waits: a slow subscriber sees a gap."""
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
