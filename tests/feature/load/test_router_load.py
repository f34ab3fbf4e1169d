"""Load besides device blocks and prompts: other tiers, generated blocks."""

from __future__ import annotations

import pytest

from kvflash import ConfigError
from kvflash.router import RouterService
from service import Http, batch, stored, until
from support_router import IDS, SIZE, add, ask, load, rank


@pytest.fixture
def router():
    """Makes routers that end with the test."""
    made = []

    def make(**settings):
        service = RouterService(host="127.0.0.1", port=0, seed=1, **settings).start()
        made.append((service, Http(service.url)))
        return made[-1][1]

    yield make
    for service, http in made:
        http.close()
        service.stop()


def hold(http, engine, worker_id, count, **extras):
    """Have a worker store the first ``count`` blocks of the prompt."""
    before = rank(http, worker_id)["blocks"]
    names = [worker_id * 1_000 + at for at in range(count)]
    tokens = IDS[: count * SIZE]
    engine.publish(batch(stored(names, tokens, block_size=SIZE, **extras)))
    until(lambda: rank(http, worker_id)["blocks"] == before + count, f"{count} blocks more")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2),
        ({"router_host_cache_hit_weight": 0.0}, 1),
        ({"router_host_cache_hit_weight": 0.1}, 1),
    ],
)
def test_blocks_in_host_memory_are_worth_their_weight(router, engine, settings, expected):
    http = router(**settings)
    first, second = engine(), engine()
    add(http, 1, engine=first)
    add(http, 2, engine=second)
    hold(http, first, 1, 2)
    hold(http, second, 2, 1)
    hold(http, second, 2, 4, medium="CPU")
    answer = ask(http, "/reserve", request_id="r")
    assert answer["worker_id"] == expected
    # 1 + 3 * 0.75 blocks are saved, whole ones are booked so.
    left = {1: 8, 2: 4}[expected]
    assert load(http, expected) == (1, 4, left)
    assert answer["overlap_blocks"] == {1: 2, 2: 1}[expected]


def test_generated_blocks_count_as_touches_tell_them(router):
    http = router(track_output_blocks=True)
    add(http, 1)
    ask(http, "/reserve", request_id="r", expected_output_tokens=16)
    http.post("/touch", {"request_id": "r", "generated_tokens": 3})
    assert load(http, 1)[1] == 4
    http.post("/touch", {"request_id": "r", "generated_tokens": 8})
    assert load(http, 1)[1] == 3, "half of six"
    ask(http, "/reserve", request_id="endless")
    http.post("/touch", {"request_id": "endless", "generated_tokens": 2**64 - 1})
    assert load(http, 1)[1] >= 2**20
    for name in ("r", "endless"):
        http.post("/free", {"request_id": name})
    assert load(http, 1) == (0, 0, 0)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="track_output_blocks requires track_active_blocks"):
        RouterService(
            host="127.0.0.1", port=0, track_output_blocks=True, track_active_blocks=False
        ).start()
