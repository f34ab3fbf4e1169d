"""Keeps an endpoint's workers in discovery registered with the router."""

from __future__ import annotations

import asyncio
from typing import Any

from kvflash._core import Router
from kvflash.discovery import Discovery
from kvflash.roster.core import Replicas
from kvflash.roster.endpoint import EndpointWorkers
from kvflash.roster.keys import Name

# Discovery may show an instance before its card, although the card was written first, because a
# folder is read while it changes. Longer than the pause between two reads.
CARD_S = 2.0
# Refused workers that /health names; it counts the others.
TOLD_MAX = 100


class DiscoveredWorkers(EndpointWorkers):
    """Keeps the router's workers equal to an endpoint's instances in discovery.

    A removed card has no effect for CARD_S, because its instance is usually about to go as well;
    after that the worker is removed. ``model_name`` is the model of workers without a card; where
    others have one, only after CARD_S.
    """

    _fleet: Router

    def __init__(
        self,
        router: Router,
        discovery: Discovery,
        path: str,
        cluster: Replicas,
        *,
        model_name: str,
    ) -> None:
        super().__init__(router, discovery, path, cluster, model_name=model_name)
        # Current or last cards of the workers; workers without one, and since when.
        self._cards: dict[Name, dict[str, Any]] = {}
        self._bare: dict[Name, float] = {}
        # For /health.
        self._warnings: list[str] = []

    def _card(self, name: Name) -> dict[str, Any] | None:
        now = self._keys.cards.get(name)
        if now is not None or name not in self._keys.instances:
            self._bare.pop(name, None)
            self._cards.pop(name, None)
        if name not in self._keys.instances or name[0] != self._path:
            return None
        if now is not None:
            self._cards[name] = now
            return now
        card = self._cards.get(name)
        if card is None:
            is_known = name[1] in self._told
            # If no worker has a card, waiting is pointless.
            if self._cluster.is_nats or is_known or not self._keys.cards:
                return super()._card(name)
        loop = asyncio.get_running_loop()
        if loop.time() - self._bare.setdefault(name, loop.time()) >= CARD_S:
            # A worker that lost its card goes; one that never had one joins.
            return None if card is not None else {}
        loop.call_later(CARD_S, self._keys.resettle, [name])
        return card

    async def _settle(self) -> None:
        await super()._settle()
        told = [
            f"worker {number} found in discovery is refused: {reason}"
            for (_, number), reason in list(self._refused.items())[:TOLD_MAX]
        ]
        if (more := len(self._refused) - len(told)) > 0:
            told.append(f"{more} more workers found in discovery are refused; see the log")
        if told != self._warnings:
            self._warnings = told
            self._fleet.set_warnings(told)
