"""What both kinds of an engine's double have: see double.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL = "tiny"
LOOK_S = 0.01
DRIP_S = 0.5
DRIPS = 5


def words_of(name: str) -> str:
    return f"{name} says hello to you"


def ready(**fields: Any) -> None:
    print(json.dumps({"event": "ready", **fields}), flush=True)


class Gate:
    """The double's side of the files."""

    def __init__(self, name: str, role: str) -> None:
        folder = Path(os.environ["HOLD_DIR"])
        self._mute, self._hold, self._drip = (
            folder / f"{name}.{word}" for word in ("mute", "hold", "drip")
        )
        self._is_prefill = role == "prefill"
        self._count = folder / f"{name}.running"
        self._running = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request that runs."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    async def before(self, item: int, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for what the files say of an item, the first one being 0."""
        if item < DRIPS and self._drip.exists():
            await asyncio.sleep(DRIP_S)
        # Another process decides.
        while self._is_shut(item) and not is_stopped():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _is_shut(self, item: int) -> bool:
        if item == 0 and self._mute.exists():
            return True
        return (item == 2 or self._is_prefill) and self._hold.exists()

    def _add(self, count: int) -> None:
        self._running += count
        draft = self._count.with_suffix(".draft")
        draft.write_text(str(self._running))
        draft.rename(self._count)
