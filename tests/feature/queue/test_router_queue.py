"""Reservations wait until a worker has room to prefill."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from kvflash import ConfigError
from kvflash.router import RouterService
from service import Http, until
from support_router import IDS, add, ask, load

TOKENS = len(IDS)


@contextmanager
def router(**settings) -> Iterator[Http]:
    """A router of workers that take a batch of one prompt."""
    service = RouterService(
        host="127.0.0.1", port=0, seed=1, router_queue_threshold=0.5, **settings
    ).start()
    http = Http(service.url)
    try:
        yield http
    finally:
        http.close()
        service.stop()


class Reservation(threading.Thread):
    """POST /reserve on a connection of its own, which may take its time."""

    def __init__(self, http, name, expect=200, **fields):
        super().__init__()
        self.http, self.name, self.expect, self.fields = Http(http.url), name, expect, fields
        self.answer = None
        self.start()

    def run(self):
        try:
            self.answer = ask(
                self.http, "/reserve", request_id=self.name, expect=self.expect, **self.fields
            )
        finally:
            self.http.close()

    def finish(self):
        self.join(30)
        assert not self.is_alive()
        return self.answer


def pending(http):
    answer = ask(http, "/potential_loads")
    return answer["pending_count"], answer["pending_isl_tokens"]


def wait_pending(http, count):
    until(lambda: pending(http) == (count, count * TOKENS), f"{count} to wait")
    by_method = http.post("/", {"method": "potential_loads", "tokens": IDS})
    assert by_method["pending_count"] == count


def test_reservations_wait_for_room_and_leave_in_order():
    with router() as http:
        add(http, 1, max_num_batched_tokens=TOKENS)
        ask(http, "/reserve", request_id="first")
        assert load(http, 1) == (1, 4, TOKENS)
        waiting = {}
        for count, (name, fields) in enumerate(
            [("plain", {}), ("soon", {"priority": 60}), ("now", {"strict_priority": 1})], 1
        ):
            waiting[name] = Reservation(http, name, **fields)
            wait_pending(http, count)
        by_method = http.post("/", {"method": "potential_loads", "tokens": IDS})
        assert (by_method["pending_count"], by_method["pending_isl_tokens"]) == (3, 3 * TOKENS)
        # Previews do not wait.
        assert ask(http)["worker_id"] == 1
        text = http.get("/metrics").decode()
        label = '{model="m",tenant="default"}'
        assert f"kvflash_queue_pending_requests{label} 3" in text
        assert f"kvflash_queue_pending_isl_tokens{label} {3 * TOKENS}" in text
        http.post("/prefill_complete", {"request_id": "first"})
        assert waiting["now"].finish()["worker_id"] == 1
        wait_pending(http, 2)
        http.post("/free", {"request_id": "now"})
        assert waiting["soon"].finish()["worker_id"] == 1
        wait_pending(http, 1)
        # A worker more has room, too.
        add(http, 2, max_num_batched_tokens=TOKENS)
        assert waiting["plain"].finish()["worker_id"] == 2
        wait_pending(http, 0)
        text = http.get("/metrics").decode()
        placed = 'kvflash_queued_total{model="m",tenant="default",outcome="placed"} 3'
        assert placed in text
        assert "kvflash_queue_wait_seconds_count 4" in text


def test_a_message_waits_in_the_same_line_and_says_how_urgent_it_is():
    with router() as http:
        add(http, 1, max_num_batched_tokens=TOKENS)
        ask(http, "/reserve", request_id="first")
        late = Reservation(http, "late")
        wait_pending(http, 1)
        new = {"method": "new", "tokens": IDS}
        for count, fields in enumerate(({"priority": 60}, {"strict_priority": 1}), 2):
            message = {**new, **fields, "request_id": f"new-{count}", "expected_output_tokens": 5}
            threading.Thread(target=http_post, args=(http.url, message), daemon=True).start()
            wait_pending(http, count)
        for count, name in zip((2, 1, 0), ("first", "new-3", "new-2"), strict=True):
            assert http.post("/free", {"request_id": name})["freed"]
            wait_pending(http, count)
        assert late.finish()["worker_id"] == 1
        # Without a name nothing is booked, and no request waits.
        assert http.post("/", {**new, "priority": 1})["worker_id"] == 1
        for field in ({"priority": "high"}, {"strict_priority": -1}):
            http.post("/", {**new, **field}, expect=400)


def http_post(url, message):
    with closing(Http(url)) as http:
        http.post("/", message)


def test_one_that_wants_a_worker_with_room_passes_those_that_want_another():
    with router() as http:
        for worker_id in (1, 2):
            add(http, worker_id, max_num_batched_tokens=TOKENS)
            ask(http, "/reserve", request_id=f"at {worker_id}", worker_id=worker_id)
        waits = Reservation(http, "choosy", worker_id=1)
        wait_pending(http, 1)
        http.post("/free", {"request_id": "at 2"})
        assert ask(http, "/reserve", request_id="any")["worker_id"] == 2
        wait_pending(http, 1)
        http.post("/free", {"request_id": "at 1"})
        assert waits.finish()["worker_id"] == 1


def test_a_full_queue_is_429_and_a_long_wait_503():
    with router(router_queue_limit=1, router_queue_timeout=3) as http:
        add(http, 1, max_num_batched_tokens=TOKENS)
        ask(http, "/reserve", request_id="first")
        late = Reservation(http, "late", expect=503)
        wait_pending(http, 1)
        refused = ask(http, "/reserve", request_id="refused", expect=429)
        assert "router_queue_limit" in refused["error"]
        assert "3 s (router_queue_timeout)" in late.finish()["error"]
        assert load(http, 1) == (1, 4, TOKENS)


def test_workers_that_told_no_batch_have_the_flag_s():
    with router(router_queue_batched_tokens=2 * TOKENS) as http:
        add(http, 1)
        # As much as the threshold is not more than it.
        ask(http, "/reserve", request_id="first")
        ask(http, "/reserve", request_id="second")
        waits = Reservation(http, "third")
        wait_pending(http, 1)
        http.post("/free", {"request_id": "first"})
        assert waits.finish()["worker_id"] == 1


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"router_queue_threshold": -1.0}, "router_queue_threshold"),
        ({"router_queue_limit": 0, "router_queue_threshold": 1.0}, "router_queue_limit"),
        ({"router_queue_timeout": 0.0, "router_queue_threshold": 1.0}, "router_queue_timeout"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, wanted):
    with pytest.raises(ConfigError, match=wanted):
        RouterService(host="127.0.0.1", port=0, **settings).start()
