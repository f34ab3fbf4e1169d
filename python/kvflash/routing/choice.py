"""The worker chosen for a prompt."""

from __future__ import annotations

from typing import NamedTuple


class _Fields(NamedTuple):
    worker_id: int
    dp_rank: int
    overlap_blocks: int


class BestWorker(_Fields):
    """Worker, rank and overlap (leading blocks that the worker holds), as a tuple of three.

    Attributes:
        seed: The seed of the random draw. ``best_worker(..., seed=...)`` with it chooses the same
            worker as long as load and caches are unchanged.
    """

    seed: int

    def __new__(
        cls, worker_id: int, dp_rank: int, overlap_blocks: int, seed: int = 0
    ) -> BestWorker:
        """Create it; the tuple itself has three fields."""
        made = super().__new__(cls, worker_id, dp_rank, overlap_blocks)
        made.seed = seed
        return made
