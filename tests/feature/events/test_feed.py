"""The thread that gives a catalog's orders to a receiver."""

from __future__ import annotations

from typing import Any

import pytest

from kvflash._core import RouterCore
from kvflash.transport.receiver import Feed
from service import until
from support_found import found


class Failing:
    """Fails at its first order."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def stop(self) -> None:
        pass

    def obey(self, order: Any) -> None:
        self.orders.append(order)
        if len(self.orders) == 1:
            raise OSError("too many open files")


def test_an_order_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    core, receiver = RouterCore(block_size=4), Failing()
    for worker in (1, 2):
        core.put_worker(found(worker, {0: f"tcp://127.0.0.1:{worker}"}))
    feed = Feed(core.catalog)
    feed._receivers[""] = receiver
    feed.start()
    try:
        until(lambda: len(receiver.orders) == 2, "the second order")
    finally:
        feed.stop()
    assert "failed to subscribe tcp://127.0.0.1:" in caplog.text
