"""The worker that a prompt would go to."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BestWorker"]


class _Fields(NamedTuple):
    worker_id: int
    dp_rank: int
    overlap_blocks: int


class BestWorker(_Fields):
    """Worker, rank, and leading blocks of the prompt that it holds: a tuple of these three.

    Attributes:
        seed: The number that chance was drawn from. ``best_worker(..., seed=...)`` with it chooses
            the same worker while load and caches are the same.
    """

    seed: int

    def __new__(
        cls, worker_id: int, dp_rank: int, overlap_blocks: int, seed: int = 0
    ) -> BestWorker:
        """Make one; the tuple itself has three fields."""
        made = super().__new__(cls, worker_id, dp_rank, overlap_blocks)
        made.seed = seed
        return made
