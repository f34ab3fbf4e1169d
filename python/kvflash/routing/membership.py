"""Who of a component is there, told to what is shared of it, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvflash.errors import KvflashError
from kvflash.routing.cluster import Cluster
from kvflash.routing.sharing import Component

__all__ = ["Membership", "tenant_of"]

logger = logging.getLogger(__name__)


def tenant_of(card: dict[str, Any]) -> str:
    """Whose index the events of a worker with this model card are for, as they say over NATS.

    Of those that only prefill another one than of those that decode the same model.
    """
    kinds = card.get("model_type")
    return "prefill" if isinstance(kinds, list) and "prefill" in kinds else "default"


class Membership:
    """Follows one component's stream, and tells it which instances are there.

    Servers, and a state that is being restored, are waited for in a thread of its own; what is told
    is told in order.

    Args:
        cluster: What is shared.
        component: Whose instances.
    """

    def __init__(self, cluster: Cluster, component: Component) -> None:
        self._cluster, self._component = cluster, component
        self._known: set[int] = set()
        self._is_following = False
        self._thread = ThreadPoolExecutor(1, "kvflash-members")

    async def follow(self) -> None:
        """Return when what is in the stream is known, or after a minute; see :class:`Cluster`."""
        # Its failures it tells itself, and tries again.
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._cluster.follow, self._component
        )
        self._is_following = True

    def settle(self, numbers: Iterable[int]) -> None:
        """These are there and no others, of all endpoints.

        Blocks of a worker that was never seen here go as well as those of one that leaves.
        """
        if not self._is_following:
            return
        now = set(numbers)
        for instance_id in self._known - now:
            self.tell(self._cluster.worker_left, self._component, instance_id)
        for instance_id in now - self._known:
            self.tell(self._cluster.instance_joined, self._component, instance_id)
        if not self._known:
            self.tell(self._cluster.only, {self._component: now})
        self._known = now

    def tell(self, call: Callable[..., None], *args: object) -> Future[None]:
        """Call it when what was told before is done."""

        def run() -> None:
            try:
                call(*args)
            except KvflashError as error:
                logger.error("%s", error)

        return self._thread.submit(run)

    async def let_go(self, instance_ids: Collection[int]) -> None:
        """They leave: return when that is told. Before the core forgets them, and their blocks."""
        told = [self.tell(self._cluster.worker_left, self._component, one) for one in instance_ids]
        # In order: with the last one all are.
        if told:
            await asyncio.wrap_future(told[-1])

    def close(self) -> None:
        """Tell no more; does not wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
