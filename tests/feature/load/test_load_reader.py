"""How often a worker's load stream is opened again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvflash.errors import NotFoundError, TransportError
from kvflash.roster import loads
from kvflash.roster.loads import PAUSE_S, LoadReader
from kvflash.runtime.frame import pack


class Worker:
    """Breaks off each stream after one report; all planes and all replies at once."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.closed_total = 0

    def of(self, _transport: dict[str, Any]) -> Worker:
        return self

    async def ask(self, _transport: dict[str, Any], _request: object) -> Worker:
        self.items.append(pack({"kv_used_blocks": 1}, "item"))
        return self

    async def receive(self) -> bytes:
        if not self.items:
            raise TransportError("it broke off", was_sent=True)
        return self.items.pop()

    def close(self) -> None:
        self.closed_total += 1


@pytest.mark.parametrize("is_known", [False, True])
def test_a_stream_that_gave_a_report_is_soon_opened_again(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def report(text: str) -> None:
        assert text == '{"kv_used_blocks": 1, "id": 7}'
        if not is_known:
            raise NotFoundError("no worker 7")

    async def work() -> None:
        worker: Any = Worker()
        is_enough = asyncio.Event()

        class Asyncio:
            """Notes the pauses, and makes none until there are enough."""

            def __getattr__(self, name: str) -> Any:
                return getattr(asyncio, name)

            async def sleep(self, pause_s: float) -> None:
                pauses.append(pause_s)
                if len(pauses) == 4:
                    is_enough.set()
                    await asyncio.Event().wait()

        monkeypatch.setattr(loads, "asyncio", Asyncio())
        reader = LoadReader(report, worker)
        reader.follow("ns/backend/load_metrics", 7, {})
        await asyncio.wait_for(is_enough.wait(), 30)
        await reader.close()
        assert worker.closed_total == 4

    asyncio.run(work())
    assert pauses == [PAUSE_S * (1 if is_known else 2**at) for at in range(4)]
