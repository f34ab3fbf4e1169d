"""Workers of a simulated world: what they store, evict and tell."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgpack
from world import SimLog

from kvflash.errors import TransportError
from kvflash.transport.origin import Origin

BLOCK = 4


@dataclass
class Engine:
    """A worker that stores and evicts blocks of a few prompts."""

    instance_id: int
    epoch: int = 1
    sequence: int = 0
    held: list[int] = field(default_factory=list)

    def batch(self, dice: random.Random) -> bytes:
        """Its next batch."""
        events: list[list[Any]] = []
        if self.held and dice.random() < 0.4:
            # Leaves first, as engines evict.
            gone = [self.held.pop() for _ in range(dice.randint(1, min(3, len(self.held))))]
            events.append(["BlockRemoved", gone])
        else:
            parent = self.held[-1] if self.held else None
            count = dice.randint(1, 4)
            start = self.held[-1] + 1 if self.held else self.instance_id * 1_000_000 + 1
            hashes = list(range(start, start + count))
            tokens = [name * 7 + at for name in hashes for at in range(BLOCK)]
            events.append(["BlockStored", hashes, parent, tokens, BLOCK, None])
            self.held += hashes
        if dice.random() < 0.03:
            events.append(["AllBlocksCleared"])
            self.held.clear()
        return msgpack.packb([0.0, events, 0])

    def restart(self) -> None:
        """Another process: counts from 0, holds nothing."""
        self.epoch += 1
        self.sequence = 0
        self.held.clear()

    def origin(self) -> Origin:
        return Origin(
            instance_id=self.instance_id,
            dp_rank=0,
            epoch=self.epoch,
            model_name="m",
            block_size=BLOCK,
        )

    async def publish(self, log: SimLog, dice: random.Random) -> None:
        """One batch, again and again until it is stored."""
        payload, sequence = self.batch(dice), self.sequence
        self.sequence += 1
        origin = self.origin()
        while True:
            try:
                await log.append(origin.headers(sequence), payload, key=origin.key(sequence))
            except TransportError:
                await log.node.pause(0.1)
            else:
                return
