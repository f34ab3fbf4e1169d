"""kvflash.ApproxKvIndexer: predictions count, and end by age, by capacity, with their worker."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from kvflash import ApproxKvIndexer, InvalidArgumentError, compute_block_hash_for_seq

SIZE = 4
IDS = list(range(100, 116))
LOCALS = compute_block_hash_for_seq(IDS, SIZE)


class Clock:
    """Seconds, as the test sets them."""

    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_what_was_sent_counts_in_full(clock):
    index = ApproxKvIndexer(SIZE, clock=clock)
    assert index.block_size() == SIZE
    assert index.process_routing_decision_for_request([*IDS, 1], 7) == 4
    assert index.process_routing_decision_for_request(np.array(IDS[:8], np.uint32), 8, 2) == 2
    assert index.process_routing_decision_for_request(IDS, 7) == 0
    wanted = {(7, 0): 4, (8, 2): 2}
    for found in (
        index.find_matches(LOCALS),
        index.find_matches(LOCALS, early_exit=True),
        index.find_matches_for_request(IDS),
    ):
        assert found.scores == wanted
        assert found.frequencies == [2, 2, 1, 1]
        assert len(found) == 2
    assert index.workers() == [(7, 0), (8, 2)]
    assert index.stats()["predicted"] == 6
    assert index.stats()["memberships"] == 0, "predictions are no facts"


def test_answers_can_be_awaited(clock):
    index = ApproxKvIndexer(SIZE, clock=clock)
    index.process_routing_decision_for_request(IDS, 7)

    async def ask():
        return (await index.find_matches_for_request(IDS)).scores

    assert asyncio.run(ask()) == {(7, 0): 4}


def test_a_prediction_ends_by_age_unless_it_is_made_again(clock):
    index = ApproxKvIndexer(SIZE, 10.0, clock=clock)
    index.process_routing_decision_for_request(IDS, 7)
    clock.now += 9.0
    index.process_routing_decision_for_request(IDS[:8], 7)
    # Asking does not prolong it.
    assert index.find_matches(LOCALS).scores == {(7, 0): 4}
    clock.now += 2.0
    assert index.find_matches(LOCALS).scores == {(7, 0): 2}
    assert index.stats()["expired_blocks_total"] == 2
    clock.now += 9.0
    assert len(index.find_matches_for_request(IDS)) == 0
    assert index.stats()["predicted"] == 0
    assert index.workers() == [(7, 0)]


def test_a_clock_that_goes_back_stands(clock):
    index = ApproxKvIndexer(SIZE, 10.0, clock=clock)
    index.process_routing_decision_for_request(IDS, 7)
    clock.now = 5.0
    assert index.find_matches(LOCALS).scores == {(7, 0): 4}
    clock.now = 1_020.0
    assert len(index.find_matches(LOCALS)) == 0


@pytest.mark.parametrize("now", [float("nan"), float("inf"), -1.0])
def test_a_clock_must_say_seconds(clock, now):
    index = ApproxKvIndexer(SIZE, clock=clock)
    clock.now = now
    with pytest.raises(InvalidArgumentError, match="clock must return finite seconds"):
        index.find_matches(LOCALS)


def test_the_error_of_a_clock_passes_through():
    def broken():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        ApproxKvIndexer(SIZE, clock=broken).find_matches(LOCALS)


def test_a_capacity_lets_the_oldest_go(clock):
    index = ApproxKvIndexer(SIZE, clock=clock, capacity_blocks=3)
    for first in range(5):
        index.process_routing_decision_for_request([first] * SIZE, 7)
    assert index.stats()["predicted"] == 3
    assert [len(index.find_matches_for_request([n] * SIZE)) for n in range(5)] == [0, 0, 1, 1, 1]


def test_identities_stay_apart(clock):
    index = ApproxKvIndexer(SIZE, clock=clock)
    index.process_routing_decision_for_request(IDS, 1)
    index.process_routing_decision_for_request(IDS, 2, lora_name="a")
    index.process_routing_decision_for_request(IDS, 3, cache_salt="a")
    assert index.find_matches_for_request(IDS).scores == {(1, 0): 4}
    assert index.find_matches_for_request(IDS, "a").scores == {(2, 0): 4}
    assert index.find_matches_for_request(IDS, cache_salt="a").scores == {(3, 0): 4}


def test_workers_go_with_what_is_predicted_of_them(clock):
    index = ApproxKvIndexer(SIZE, clock=clock)
    for worker, rank in ((1, 0), (1, 1), (2, 0)):
        index.process_routing_decision_for_request(IDS, worker, rank)
    index.clear_all_blocks(1, 1)
    assert index.find_matches(LOCALS).scores == {(1, 0): 4, (2, 0): 4}
    assert index.remove_worker(1) == 2
    assert index.find_matches(LOCALS).scores == {(2, 0): 4}
    index.clear_all_blocks(2)
    assert len(index.find_matches(LOCALS)) == 0
    assert index.workers() == [(2, 0)]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e13])
def test_a_time_out_of_range_is_refused(ttl_s):
    with pytest.raises(InvalidArgumentError, match="ttl_s must be seconds in"):
        ApproxKvIndexer(SIZE, ttl_s)


def test_a_block_size_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="block_size must be at least 1"):
        ApproxKvIndexer(0)


def test_the_machines_clock_is_used_otherwise():
    index = ApproxKvIndexer(SIZE, ttl_s=0.05)
    index.process_routing_decision_for_request(IDS, 7)
    deadline = time.monotonic() + 10
    while len(index.find_matches(LOCALS)):
        assert time.monotonic() < deadline, "the prediction never ends"
    assert index.stats()["expired_blocks_total"] == 4


def test_threads_share_it():
    index = ApproxKvIndexer(SIZE, ttl_s=3_600)
    wrong, barrier = [], threading.Barrier(4)

    def work(worker):
        barrier.wait()
        for n in range(200):
            ids = [worker * 1_000 + n] * SIZE
            index.process_routing_decision_for_request(ids, worker)
            if index.find_matches_for_request(ids).scores != {(worker, 0): 1}:
                wrong.append((worker, n))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert index.stats()["predicted"] == 800
