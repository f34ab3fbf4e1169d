"""An index of a component's caches that follows their events on its own."""

from __future__ import annotations

from collections.abc import Sequence

from kvflash.routing.config import KvRouterConfig
from kvflash.routing.router import KvPushRouter
from kvflash.runtime import Component


class Matches(dict[int, int]):
    """Leading blocks that each worker holds, by worker id; workers without any are left out."""

    @property
    def scores(self) -> dict[int, int]:
        """The same as a plain dictionary."""
        return dict(self)


class KvIndexer:
    """Counts which workers of a component hold how much of a prompt.

    Args:
        component: The workers' component; its endpoint is ``generate``.
        kv_block_size: Tokens in a block of these workers.

    Raises:
        InvalidArgumentError: The block size is 0 or too large.
    """

    def __init__(self, component: Component, kv_block_size: int) -> None:
        self._block_size = kv_block_size
        self._router = KvPushRouter(component.endpoint("generate"), kv_block_size, KvRouterConfig())

    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    async def find_matches_for_request(
        self, token_ids: Sequence[int], lora_id: int | None = None
    ) -> Matches:
        """Count the leading blocks of a prompt that each worker holds.

        Args:
            token_ids: The prompt.
            lora_id: Accepted for compatibility; has no effect.

        Raises:
            InvalidArgumentError: The prompt is empty.
        """
        found = Matches()
        if len(token_ids) < self._block_size:
            return found
        for load in await self._router.get_potential_loads(token_ids):
            held = load["overlap_blocks"]
            # Of several ranks the one with the most blocks counts.
            if held > found.get(load["worker_id"], 0):
                found[load["worker_id"]] = held
        return found

    async def aclose(self) -> None:
        """Stop following events."""
        await self._router.aclose()
