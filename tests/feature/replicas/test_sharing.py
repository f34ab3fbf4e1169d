"""Bookings that are made while a router is still looking for its replicas."""

from __future__ import annotations

import json
import threading
from typing import Any

from kvflash._core import Router
from kvflash.discovery import open_discovery
from kvflash.discovery.base import Discovery
from kvflash.routing.sharing import Sharing
from service import until

COMPONENT = ("ns", "backend")


def test_what_is_booked_before_it_is_connected_is_told_when_it_is(tmp_path) -> None:
    """Requests that come before discovery has answered are shared like all others."""
    is_there = threading.Event()

    def discovery() -> Discovery:
        assert is_there.wait(30)
        return open_discovery("file", folder=tmp_path)

    router = Router()
    sharing = Sharing(router.bookings, open_discovery=discovery)

    def post(path: str, **body: Any) -> None:
        router.call("POST", path, json.dumps({"model_name": "m", **body}).encode())

    def book(name: str) -> None:
        post("/reserve", isl_tokens=100, request_id=name)

    post("/workers", worker_id=7, block_size=4)
    book("before it looks")
    joining = threading.Thread(target=sharing.worker_joined, args=(COMPONENT, 7))
    joining.start()
    try:
        until(lambda: 7 in sharing._component_of, "it to look for others")
        sharing.start()
        until(lambda: router.bookings.stats()["waiting"] == 0, "the booking to be taken")
        book("while it looks")
        is_there.set()
        joining.join()
        until(lambda: sharing.stats()["sent_events_total"] == 2, "both to be told")
    finally:
        is_there.set()
        sharing.stop()
