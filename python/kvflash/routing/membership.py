"""Reports a component's members to the shared state, beside the event loop."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvflash.errors import KvflashError
from kvflash.roster.core import Component
from kvflash.routing.cluster import Cluster

logger = logging.getLogger(__name__)


def tenant_of(card: dict[str, Any]) -> str:
    """A worker's tenant over NATS, from its model card; prefill-only workers have their own."""
    return "prefill" if "prefill" in (card.get("model_type") or ()) else "default"


class Membership:
    """Follows one component's stream, and reports its instances to it.

    A separate thread waits for servers and for a state that is being restored, and makes the
    reports in order.
    """

    def __init__(self, cluster: Cluster, component: Component) -> None:
        self._cluster, self._component = cluster, component
        self._known: set[int] = set()
        self._is_following = False
        self._thread = ThreadPoolExecutor(1, "kvflash-members")

    async def follow(self) -> None:
        """Return when the stream's content is loaded, or after a minute; see :class:`Cluster`."""
        # It reports its own failures, and tries again.
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._cluster.follow, self._component
        )
        self._is_following = True

    def settle(self, numbers: Iterable[int]) -> None:
        """Set the complete list of instances, of all endpoints: blocks of all others go."""
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
        """Call it after everything queued before is done."""

        def run() -> None:
            try:
                call(*args)
            except KvflashError as error:
                logger.error("%s", error)

        return self._thread.submit(run)

    async def let_go(self, instance_ids: Collection[int]) -> None:
        """Return when the departures are reported, before the core forgets the workers' blocks."""
        told = [self.tell(self._cluster.worker_left, self._component, one) for one in instance_ids]
        # They run in order: when the last one is done, all are.
        if told:
            await asyncio.wrap_future(told[-1])

    def close(self) -> None:
        """Stop reporting; does not wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
