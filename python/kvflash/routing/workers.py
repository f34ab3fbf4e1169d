"""Copies the workers of an endpoint from discovery to a core."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from kvflash._core import RouterCore
from kvflash.discovery import Discovery
from kvflash.roster.endpoint import EndpointWorkers
from kvflash.roster.keys import Name
from kvflash.routing.cluster import Cluster

logger = logging.getLogger(__name__)

# Longest wait for the first replays, and the pause between two looks at them.
REPLAY_S_MAX, REPLAY_STEP_S = 1.0, 0.002

#: Starts to serve, with the model's name and tenant if needed; returns where to report after that.
Serve = Callable[[tuple[str, str] | None], tuple[RouterCore, Cluster]]


class Workers(EndpointWorkers):
    """Keeps a core's workers in line with an endpoint in discovery.

    If events come over NATS, ``serve`` is called once the model's name is known, and a worker
    counts once it has a model card. ``min_workers`` is the number that :meth:`enough` waits for.
    """

    _fleet: RouterCore

    def __init__(
        self,
        core: RouterCore,
        discovery: Discovery,
        path: str,
        cluster: Cluster,
        *,
        serve: Serve,
        min_workers: int,
    ) -> None:
        super().__init__(core, discovery, path, cluster, model_name="default")
        self._serve = serve
        self._warned: set[int] = set()
        # Present instances without a model card.
        self._cardless: set[int] = set()
        self._first_name: str | None = None
        self._model: tuple[str, str] | None = None
        self._replays_end_s: float | None = None
        self._min_workers = min_workers
        # Once min_workers instances have been present at once, and at the end.
        self._enough = asyncio.Event()
        if not min_workers:
            self._enough.set()
        # Unless a core is being replaced.
        self._attached = asyncio.Event()
        self._attached.set()

    def start(self) -> None:
        """Follow discovery; needs a running event loop."""
        if not self._cluster.is_nats:
            self._fleet, self._cluster = self._serve(None)
        super().start()

    async def synced(self, timeout_s: float) -> None:
        """Wait until the current instances are known; TransportError if that takes too long.

        The first calls also wait until the instances have replayed their earlier events, for up to
        a second, because their caches would count as empty until then.
        """
        await super().synced(timeout_s)
        # Ends by itself once they are known.
        await self._attached.wait()
        await self._caught_up()

    async def enough(self, timeout_s: float) -> None:
        """Wait until min_workers instances have been present at once, or the time, or the end."""
        if not self._enough.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enough.wait(), timeout_s)

    async def _caught_up(self) -> None:
        loop = asyncio.get_running_loop()
        if self._replays_end_s is None:
            self._replays_end_s = loop.time() + REPLAY_S_MAX
        # The core's threads have no event to wait for, so this looks again every 2 ms.
        while loop.time() < self._replays_end_s:
            if self._fleet.is_caught_up:
                self._replays_end_s = 0.0
                return
            await asyncio.sleep(REPLAY_STEP_S)

    async def close(self) -> None:
        """Stop following."""
        self._enough.set()
        await super().close()

    def _card(self, name: Name) -> dict[str, Any] | None:
        card, worker = super()._card(name), name[1]
        if card is not None and not (self._cluster.is_nats and card.get("model_name") is None):
            self._cardless.discard(worker)
            return card
        if name[0] == self._path:
            self._note_cardless(worker, is_there=name in self._keys.instances)
        return None

    def _note_cardless(self, worker: int, *, is_there: bool) -> None:
        self._warned.discard(worker)
        if not is_there:
            self._cardless.discard(worker)
            return
        # A known worker withdraws its card when it ends.
        if worker not in self._cardless and worker not in self._told:
            logger.warning(
                "worker %d gets no requests until it calls register_llm: events over NATS are per "
                "model, and it has no model card", worker,
            )  # fmt: skip
        self._cardless.add(worker)

    async def _before(self, name: Name, card: dict[str, Any]) -> None:
        if not self._cluster.is_nats or self._model is not None:
            await super()._before(name, card)
            return
        self._attached.clear()
        try:
            self._fleet, self._cluster = self._serve(_model_of(card))
            self._model = _model_of(card)
            await super()._before(name, card)
        finally:
            self._attached.set()

    async def _put(self, name: Name, card: dict[str, Any], state: str) -> bool:
        is_changed = await super()._put(name, card, state)
        self._check(name[1], card)
        if len(self._told) >= self._min_workers:
            self._enough.set()
        return is_changed

    def _check(self, worker: int, card: dict[str, Any]) -> None:
        """Warn once of another model, or of a block size that makes every overlap 0."""
        if worker in self._warned:
            return
        name = card.get("model_name")
        self._first_name = self._first_name or name
        size, own_size = card.get("kv_cache_block_size"), self._fleet.block_size
        if self._model is not None and self._model != _model_of(card):
            logger.error(
                "worker %d serves %r of tenant %r, this router %r of %r: its cache is not counted",
                worker, *_model_of(card), *self._model,
            )  # fmt: skip
        elif self._model is None and name not in (None, self._first_name):
            logger.error(
                "worker %d serves %r, and others at the same endpoint %r: requests go to both, "
                "whatever model they name; serve each model at an endpoint of its own",
                worker, name, self._first_name,
            )  # fmt: skip
        elif size is not None and size != own_size:
            logger.error(
                "worker %d has blocks of %r tokens, this router of %d: its blocks never match; "
                "give the router block_size=%r", worker, size, own_size, size,
            )  # fmt: skip
        else:
            return
        self._warned.add(worker)


def _model_of(card: dict[str, Any]) -> tuple[str, str]:
    """A worker's model and tenant over NATS; prefill-only workers have their own."""
    is_prefill = "prefill" in (card.get("model_type") or ())
    return card["model_name"], "prefill" if is_prefill else "default"
