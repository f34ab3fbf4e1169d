"""Continuous batching in virtual time: admission, chunks, preemption, and the order of events."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflash.errors import InvalidArgumentError, OverloadedError
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.scheduler import Pass, Request, Scheduler
from support_blocks import HeldBlocks

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "mocker_cases.json").read_text())


@dataclass(frozen=True, kw_only=True)
class BlockStored:
    token_ids: Sequence[int]
    block_hashes: Sequence[int]
    lora_id: int | None
    parent_block_hash: int | None
    lora_name: str | None
    cache_salt: str | None


@dataclass(frozen=True)
class BlockRemoved:
    block_hashes: Sequence[int]


@dataclass(frozen=True)
class AllBlocksCleared:
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Outbox:
    """Keeps the events of one batch after the other."""

    def __init__(self) -> None:
        self._open: list[Event] = []
        self._batches: list[list[Event]] = []

    def store(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        lora_id: int | None,
        parent_hash: int | None,
        *,
        medium: str,
        **names: str | None,
    ) -> None:
        assert medium == "GPU"
        assert len(num_block_tokens) == len(block_hashes)
        assert len(token_ids) == sum(num_block_tokens) > 0
        assert len(set(num_block_tokens)) == 1
        self._open.append(
            BlockStored(
                token_ids=token_ids,
                block_hashes=block_hashes,
                lora_id=lora_id,
                parent_block_hash=parent_hash,
                **names,
            )
        )

    def remove(self, block_hashes: Sequence[int], *, medium: str) -> None:
        assert medium == "GPU"
        self._open.append(BlockRemoved(block_hashes))

    def clear(self) -> None:
        self._open.append(AllBlocksCleared())

    def cut(self) -> None:
        if self._open:
            self._batches.append(self._open)
            self._open = []

    def take(self) -> list[Event]:
        """The events since the last call, which are a single batch."""
        assert not self._open and len(self._batches) <= 1
        return self._batches.pop() if self._batches else []


class Watched(Scheduler):
    """A scheduler, and what it publishes."""

    def __init__(self, config: MockerConfig) -> None:
        self.outbox: Any = Outbox()
        super().__init__(config, self.outbox)

    def result(self, planned: Pass) -> PassResult:
        return PassResult(self.complete(planned), self.outbox.take())


class PassResult(NamedTuple):
    advanced: list[Request]
    events: list[Event]


class BruteIndex(HeldBlocks):
    """Believes the events."""

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockRemoved):
                self.remove(event.block_hashes)
            else:
                parent, lora = event.parent_block_hash, event.lora_name
                self.store(event.block_hashes, event.token_ids, parent, lora, event.cache_salt)


def answered(one: Request) -> list[int]:
    """The answer so far."""
    return one.tokens[len(one.prompt_ids) :]


def small(**options: Any) -> Watched:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_gpu_blocks": 12,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "watermark": 0.0,
    }
    return Watched(MockerConfig(**{**defaults, **options}))


def request(prompt: Iterable[int], output: int = 1, **options: Any) -> Request:
    planned = list(range(1000, 1000 + output))
    return Request(prompt_ids=list(prompt), planned_ids=planned, **options)


def step(scheduler: Watched) -> PassResult:
    planned = scheduler.schedule()
    assert planned is not None
    return scheduler.result(planned)


def finish(scheduler: Watched, *requests: Request) -> list[Event]:
    """Run until idle; returns all events."""
    for one in requests:
        scheduler.add(one)
    events: list[Event] = []
    while (planned := scheduler.schedule()) is not None:
        events += scheduler.result(planned).events
    return events


VARIANTS = list(product((True, False), repeat=3))


@pytest.mark.parametrize(("caching", "chunked", "shared"), VARIANTS)
def test_recorded_case(caching: bool, chunked: bool, shared: bool) -> None:
    (case,) = CASES["scheduler"]
    load = case["input"]
    scheduler = Watched(
        MockerConfig(
            num_gpu_blocks=load["num_gpu_blocks"],
            block_size=load["block_size"],
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
        )
    )
    rng = random.Random(7)
    common = [rng.randrange(50_000) for _ in range(load["input_tokens"] // 2)]
    requests = []
    for _ in range(load["requests"]):
        own = [rng.randrange(50_000) for _ in range(load["input_tokens"])]
        prompt = (common + own)[: load["input_tokens"]] if shared else own
        requests.append(request(prompt, load["output_tokens"]))
        scheduler.add(requests[-1])
    outputs = 0
    index = BruteIndex()
    while (planned := scheduler.schedule()) is not None:
        assert scheduler.blocks.used_blocks <= load["num_gpu_blocks"]
        assert sum(tokens for _, tokens in planned.chunks) <= 8192
        assert len(planned.chunks) <= 256
        result = scheduler.result(planned)
        outputs += len(result.advanced)
        index.apply(result.events)
    assert outputs == case["expected"]["total_output_tokens"]
    assert (scheduler.running_count, scheduler.waiting_count) == (0, 0)
    assert scheduler.blocks.used_blocks == 0
    assert all(answered(one) == list(one.planned_ids) for one in requests)
    assert set(index.held) == set(scheduler.blocks._inactive)
    hits = scheduler.counters.cached_tokens
    if caching and shared:
        # 7 full blocks are common; only requests of the very first passes can miss them.
        assert hits >= 100 * 7 * load["block_size"]
    else:
        assert hits == 0
    assert bool(index.held) == caching


def test_last_prompt_token_is_always_computed() -> None:
    scheduler = small()
    finish(scheduler, request(range(8)))
    again, longer = request(range(8)), request(range(9))
    finish(scheduler, again)
    finish(scheduler, longer)
    assert (again.cached_tokens, longer.cached_tokens) == (4, 8)
    assert scheduler.counters.prompt_tokens == 25
    assert scheduler.counters.cached_tokens == 12


def test_blocks_are_visible_only_when_computed() -> None:
    scheduler = small()
    first, twin = request(range(9)), request(range(9), output=2)
    scheduler.add(first)
    scheduler.add(twin)
    planned = scheduler.schedule()
    assert planned is not None
    assert [tokens for _, tokens in planned.chunks] == [9, 7]
    assert not scheduler.blocks._active
    result = scheduler.result(planned)
    # The twin has computed one block of the same tokens, which is not stored a second time.
    (stored,) = result.events
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.token_ids) == (None, list(range(8)))
    assert (first.cached_tokens, twin.cached_tokens) == (0, 0)
    assert step(scheduler).events == []
    late = request(range(9))
    scheduler.add(late)
    step(scheduler)
    assert late.cached_tokens == 8


def test_a_block_of_output_is_stored_when_its_last_token_is_computed() -> None:
    scheduler = small()
    events = finish(scheduler, request(range(6), output=3))
    # 6 prompt tokens and 2 of the 3 output tokens were computed; the last one never is.
    assert [e.token_ids for e in events if isinstance(e, BlockStored)] == [
        [0, 1, 2, 3],
        [4, 5, 1000, 1001],
    ]
    first, second = events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1]
    assert len(finish(scheduler, request(range(100, 107), output=1))) == 1


def test_chunked_prefill_cuts_the_prompt_that_does_not_fit() -> None:
    scheduler = small(enable_chunked_prefill=True)
    long, short = request(range(20)), request(range(50, 60), output=2)
    scheduler.add(long)
    scheduler.add(short)
    chunks = []
    while (planned := scheduler.schedule()) is not None:
        chunks.append([(one is long, tokens) for one, tokens in planned.chunks])
        assert planned.prefill_tokens + planned.decode_count == sum(n for _, n in planned.chunks)
        scheduler.result(planned)
    assert chunks == [[(True, 16)], [(True, 4), (False, 10)], [(False, 1)]]


def test_whole_prefill_waits_for_room() -> None:
    scheduler = small(enable_chunked_prefill=False)
    first, second = request(range(10)), request(range(50, 60))
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler).advanced == [first]
    assert step(scheduler).advanced == [second]


def test_admission_keeps_the_watermark_and_the_order() -> None:
    scheduler = small(watermark=0.25, max_num_batched_tokens=1000)
    # 9 of 12 blocks may be filled: 5 + 4 fit, another 1 does not, although it has come.
    requests = [request(range(17)), request(range(100, 116)), request([1]), request([2])]
    for one in requests:
        scheduler.add(one)
    planned = scheduler.schedule()
    assert planned is not None
    assert [one for one, _ in planned.chunks] == requests[:2]
    assert scheduler.kv_usage == 0.75
    assert scheduler.waiting_count == 2


def test_admission_counts_cached_blocks_once() -> None:
    scheduler = small(max_num_batched_tokens=1000)
    finish(scheduler, request(range(40)))
    running, sharing = request(range(41), output=2), request([*range(40), 7])
    scheduler.add(running)
    step(scheduler)
    # 11 of 12 blocks are in use, 10 of them shared: one more is enough.
    scheduler.add(sharing)
    step(scheduler)
    assert sharing.cached_tokens == 40


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = small(max_num_seqs=2)
    for token in range(3):
        scheduler.add(request([token], output=2))
    step(scheduler)
    assert (scheduler.running_count, scheduler.waiting_count) == (2, 1)


def test_youngest_is_preempted_and_still_answers() -> None:
    scheduler = small(num_gpu_blocks=4)
    old, young = request(range(8), output=6), request(range(50, 57), output=6)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    assert scheduler.blocks.used_blocks == 4
    # The preempted one waits in front of what came later, however little that needs.
    late = request([1])
    scheduler.add(late)
    # The old one needs a third block for its next token.
    planned = scheduler.schedule()
    assert planned is not None
    assert [one for one, _ in planned.chunks] == [old]
    assert (scheduler.running_count, scheduler.waiting_count) == (1, 2)
    assert scheduler.counters.preemptions == 1
    scheduler.result(planned)
    order = []
    while (planned := scheduler.schedule()) is not None:
        order += [one for one in scheduler.result(planned).advanced if one is not old]
    assert order.index(young) < order.index(late)
    assert answered(old) == answered(young) == list(range(1000, 1006))
    assert young.cached_tokens == 0, "what it found when it came back is not counted"


def test_abort_frees_blocks() -> None:
    scheduler = small(max_num_seqs=1)
    running, waiting = request(range(9), output=5), request(range(5))
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.abort(waiting)
    assert scheduler.waiting_count == 1
    planned = scheduler.schedule()
    assert planned is not None
    scheduler.abort(running)
    scheduler.abort(running)
    assert scheduler.blocks.used_blocks == 3, "the pass still writes into them"
    result = scheduler.result(planned)
    assert (result.advanced, result.events) == ([], [])
    assert (scheduler.blocks.used_blocks, scheduler.running_count) == (0, 0)
    between = request(range(9), output=5)
    scheduler.add(between)
    step(scheduler)
    scheduler.abort(between)
    assert scheduler.blocks.used_blocks == 0
    assert scheduler.counters.aborted_requests == 3
    assert scheduler.schedule() is None


def test_reset_only_when_nothing_runs() -> None:
    scheduler = small()
    scheduler.add(request(range(9), output=2))
    step(scheduler)
    assert not scheduler.reset()
    finish(scheduler)
    assert scheduler.reset()
    assert scheduler.outbox.take() == [AllBlocksCleared()]
    again = request(range(9))
    finish(scheduler, again)
    assert again.cached_tokens == 0


def test_evicted_and_stored_again_in_one_pass_ends_stored() -> None:
    scheduler = small(num_gpu_blocks=4)
    index = BruteIndex()
    index.apply(finish(scheduler, request(range(12))))
    index.apply(finish(scheduler, request(range(50, 54))))
    assert len(scheduler.blocks._inactive) == 4
    # The last block cannot be a hit, is evicted to make room, and is computed again.
    events = finish(scheduler, request(range(12)))
    removed, stored = events
    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert list(removed.block_hashes) == list(stored.block_hashes)
    index.apply(events)
    assert set(index.held) == set(scheduler.blocks._inactive)


def test_salts_and_adapters_share_nothing() -> None:
    scheduler = small(num_gpu_blocks=100, lora_adapters=("b", "a"))
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_name": "a"},
        {"lora_name": "a", "cache_salt": "a"},
    ]
    for kind in kinds:
        new = request(range(9), **kind)
        (event,) = finish(scheduler, new)
        assert isinstance(event, BlockStored)
        assert new.cached_tokens == 0
        salt = kind.get("cache_salt")
        assert event.cache_salt == salt
        expected = (2, "a") if "lora_name" in kind else (None, None)
        assert (event.lora_id, event.lora_name) == expected
    for kind in kinds:
        again = request(range(9), **kind)
        finish(scheduler, again)
        assert again.cached_tokens == 8


def test_a_prompt_that_came_from_elsewhere_costs_one_token() -> None:
    scheduler = small()
    first = request(range(18), 2, is_transferred=True)
    scheduler.add(first)
    assert scheduler.prefill_tokens == 0
    planned = scheduler.schedule()
    assert planned is not None
    # More than a pass could compute, and none of it is prefill.
    assert (planned.chunks, planned.prefill_tokens, planned.decode_count) == ([(first, 1)], 0, 1)
    result = scheduler.result(planned)
    assert result.advanced == [first]
    (stored,) = result.events
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 4, "its blocks are held like computed ones"
    assert first.cached_tokens == 0, "nothing was found in the own cache"
    finish(scheduler)
    assert scheduler.blocks.used_blocks == 0


def test_what_came_from_elsewhere_is_lost_with_its_blocks() -> None:
    scheduler = small(num_gpu_blocks=5)
    older = request(range(8), 12)
    younger = request(range(100, 108), 4, is_transferred=True)
    scheduler.add(older)
    scheduler.add(younger)
    while not scheduler.counters.preemptions:
        step(scheduler)
    assert not younger.is_transferred
    assert scheduler.prefill_tokens == len(younger.prompt_ids)
    finish(scheduler)
    assert younger.is_finished


def test_limits_refuse() -> None:
    scheduler = small(max_waiting=1)
    for bad in (request([]), request([1], output=0), request(range(48))):
        with pytest.raises(InvalidArgumentError, match="at most 48 tokens"):
            scheduler.add(bad)
    scheduler.add(request(range(47)))
    with pytest.raises(OverloadedError, match="1 requests"):
        scheduler.add(request([1]))
    assert scheduler.counters.rejected_requests == 1


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.tuples(PROMPTS, st.sampled_from([None, "s"])), min_size=1, max_size=20),
    chunked=st.booleans(),
)
def test_one_at_a_time_the_index_predicts_cached_tokens(
    prompts: list[tuple[list[int], str | None]], chunked: bool
) -> None:
    scheduler = small(num_gpu_blocks=8, max_num_batched_tokens=32, enable_chunked_prefill=chunked)
    index = BruteIndex()
    for prompt, salt in prompts:
        expected = index.cached_tokens(prompt, 4, None, salt)
        new = request(prompt, output=3, cache_salt=salt)
        index.apply(finish(scheduler, new))
        assert new.cached_tokens == expected
        assert set(index.held) == set(scheduler.blocks._inactive)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), chunked=st.booleans(), caching=st.booleans())
def test_random_life(data: st.DataObject, chunked: bool, caching: bool) -> None:
    scheduler = small(
        num_gpu_blocks=9,
        max_num_batched_tokens=36,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
    )
    index = BruteIndex()
    alive: list[Request] = []
    ended: set[Request] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(
            st.sampled_from(["add", "step", "step", "abort", "abort in pass", "reset"])
        )
        if action == "add":
            new = request(
                data.draw(PROMPTS),
                data.draw(st.integers(1, 12)),
                cache_salt=data.draw(st.sampled_from([None, "s"])),
            )
            scheduler.add(new)
            alive.append(new)
        elif action == "abort" and alive:
            one = data.draw(st.sampled_from(alive))
            scheduler.abort(one)
            ended.add(one)
        elif action == "reset":
            scheduler.reset()
            index.apply(scheduler.outbox.take())
        elif (planned := scheduler.schedule()) is not None:
            assert 0 < sum(tokens for _, tokens in planned.chunks) <= 36
            if action == "abort in pass":
                one = data.draw(st.sampled_from(alive))
                scheduler.abort(one)
                ended.add(one)
            result = scheduler.result(planned)
            index.apply(result.events)
            assert not any(one in ended for one in result.advanced)
        blocks = scheduler.blocks
        assert blocks.used_blocks + len(blocks._inactive) <= 9
        cached = {*blocks._active, *blocks._inactive}
        assert cached == set(index.held)
        alive = [one for one in alive if not one.is_finished and one not in ended]
    index.apply(finish(scheduler))
    assert all(one.is_finished for one in alive)
    assert scheduler.blocks.used_blocks == 0
    assert set(index.held) == set(scheduler.blocks._inactive)
