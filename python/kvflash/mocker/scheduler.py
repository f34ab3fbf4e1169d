"""Continuous batching over the block manager, without clock, sockets and randomness.

`schedule` plans a pass and `complete` applies it. Running requests come first, oldest first, then
waiting ones. Admission reserves all blocks of a prompt, which is computed in chunks; decoding
reserves more as needed. If none is left, the youngest running request releases its blocks and
starts again from the front of the queue, with what is still cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflash.errors import InvalidArgumentError, OverloadedError
from kvflash.mocker.blocks import BlockManager, extend_hashes, root_hash
from kvflash.mocker.config import MockerConfig

if TYPE_CHECKING:
    from kvflash.publisher.stream import EventOutbox

MEDIUM = "GPU"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request in the scheduler."""

    prompt_ids: Sequence[int]  # At least one.
    planned_ids: Sequence[int]  # Tokens of the answer, at least one.
    lora_name: str | None = None
    cache_salt: str | None = None  # Separates the cache of tenants.
    # The KV comes from a prefill worker: only the last token of the prompt is computed here.
    is_transferred: bool = False
    tokens: list[int] = field(init=False)  # The prompt and the answer so far.
    cached_tokens: int | None = field(init=False, default=None)  # At admission; None before.
    root: int = field(init=False)  # Root of its chain of block hashes.
    block_hashes: list[int] = field(init=False, default_factory=list)  # As far as needed.
    held_blocks: int = field(init=False, default=0)
    stored_blocks: int = field(init=False, default=0)  # The leading ones that are held by hash.
    computed_tokens: int = field(init=False, default=0)  # Leading tokens in those blocks.
    is_aborted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.root = root_hash(self.lora_name, self.cache_salt)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.output_tokens == len(self.planned_ids)


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one pass."""

    chunks: Sequence[tuple[Request, int]]  # Requests, and how many tokens of each are computed.
    prefill_tokens: int  # Tokens of prompts (or of preempted requests) among them.
    decode_count: int  # Requests that only decode one token.
    kv_usage: float  # Share of the KV cache in use during the pass.


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    rejected_requests: int = 0
    preemptions: int = 0


class Scheduler:
    """First come, first served continuous batching with prefix caching and preemption.

    Block events go to the outbox, those of a pass as one batch.
    """

    def __init__(self, config: MockerConfig, outbox: EventOutbox | None = None) -> None:
        self.counters = Counters()
        self._config = config
        # A disabled cache is never searched, so no events are published.
        self._outbox = outbox if config.enable_prefix_caching else None
        #: The KV cache, for inspection.
        self.blocks = BlockManager(config.num_gpu_blocks)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._is_in_pass = False

    @property
    def waiting_count(self) -> int:
        """Requests that wait for admission."""
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def request_count(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that requests hold, 0..1."""
        return self.blocks.used_blocks / self.blocks.capacity_blocks

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that remain to be computed, including waiting requests."""
        running = (len(r.prompt_ids) - r.computed_tokens for r in self._running)
        waiting = (0 if r.is_transferred else len(r.prompt_ids) for r in self._waiting)
        return sum(max(0, left) for left in running) + sum(waiting)

    def add(self, request: Request) -> None:
        """Queue a request; raises OverloadedError if the queue is full."""
        total = len(request.prompt_ids) + len(request.planned_ids)
        if not request.prompt_ids or not request.planned_ids or total > self._config.model_len:
            raise InvalidArgumentError(
                f"a request needs a prompt and an output of together at most "
                f"{self._config.model_len} tokens, got {len(request.prompt_ids)} and "
                f"{len(request.planned_ids)}"
            )
        if len(self._waiting) >= self._config.max_waiting:
            self.counters.rejected_requests += 1
            raise OverloadedError(f"{self._config.max_waiting} requests are already waiting")
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request early; its blocks are free at once, or at the end of the current pass."""
        if request.is_aborted or request.is_finished:
            return
        request.is_aborted = True
        self.counters.aborted_requests += 1
        if request not in self._running:
            self._waiting.remove(request)
        elif not self._is_in_pass:
            self._running.remove(request)
            self._free(request)

    def reset(self) -> bool:
        """Empty the cache; False, and no change, while a request holds a block."""
        is_cleared = self.blocks.clear()
        if is_cleared and self._outbox is not None:
            self._outbox.clear()
            self._outbox.cut()
        return is_cleared

    def schedule(self) -> Pass | None:
        """Plan the next pass and reserve its blocks; None if there is nothing to do."""
        assert not self._is_in_pass, "complete() comes before the next schedule()"
        budget = self._config.max_num_batched_tokens
        chunks: list[tuple[Request, int]] = []
        while len(chunks) < len(self._running) and budget:
            request = self._running[len(chunks)]
            count = min(len(request.tokens) - request.computed_tokens, budget)
            if not self._reserve(request, count):
                break
            chunks.append((request, count))
            budget -= count
        # A request that was just preempted is not admitted again at once: it needs at least the
        # blocks it released, and one of them has been taken. As the first in the queue it holds
        # back the others.
        while budget and (admitted := self._admit(budget)):
            chunks.append(admitted)
            budget -= admitted[1]
        if not chunks:
            assert not self._waiting, "a request that fits the cache is always admitted in the end"
            return None
        self._is_in_pass = True
        decodes = sum(
            count == 1
            and (request.is_transferred or request.computed_tokens >= len(request.prompt_ids))
            for request, count in chunks
        )
        tokens = sum(count for _, count in chunks)
        return Pass(chunks, tokens - decodes, decodes, self.kv_usage)

    def complete(self, done: Pass) -> list[Request]:
        """Apply the pass of the last `schedule`; returns the requests that got one output token.

        Removals come before stores: evicted blocks were gone when the pass began, and computed
        blocks exist when it ends.
        """
        assert self._is_in_pass, "schedule() comes before complete()"
        self._is_in_pass = False
        evicted = self.blocks.drain_evicted()
        if evicted and self._outbox is not None:
            self._outbox.remove(evicted, medium=MEDIUM)
        advanced: list[Request] = []
        for request, count in done.chunks:
            if request.is_aborted:
                continue
            request.computed_tokens += count
            self._store(request)
            if request.computed_tokens == len(request.tokens):
                request.tokens.append(request.planned_ids[request.output_tokens])
                advanced.append(request)
        self.counters.generation_tokens += len(advanced)
        self._sweep()
        if self._outbox is not None:
            self._outbox.cut()
        return advanced

    def _reserve(self, request: Request, count: int) -> bool:
        """Reserve blocks, preempting younger requests; False if it was the youngest itself."""
        missing = self._block_count(request.computed_tokens + count) - request.held_blocks
        if missing <= 0:
            return True
        while not self.blocks.use((), missing):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.held_blocks += missing
        return True

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.computed_tokens = 0
        # Transferred KV is gone with the blocks.
        request.is_transferred = False
        self._waiting.appendleft(request)
        self.counters.preemptions += 1

    def _admit(self, budget: int) -> tuple[Request, int] | None:
        """Run the first waiting request, if it fits; returns it with its tokens in this pass."""
        if not self._waiting or len(self._running) >= self._config.max_num_seqs:
            return None
        request = self._waiting[0]
        hits = self._cached_hashes(request)
        cached = len(hits) * self._config.block_size
        computed = len(request.tokens) - 1 if request.is_transferred else cached
        count = len(request.tokens) - computed
        if count > budget:
            if not self._config.enable_chunked_prefill:
                return None
            count = budget
        needed = self._block_count(len(request.tokens))
        if not self.blocks.use(hits, needed - len(hits), most=self._config.admissible_blocks):
            return None
        self._waiting.popleft()
        self._running.append(request)
        request.held_blocks = needed
        request.stored_blocks = len(hits)
        request.computed_tokens = computed
        # A preempted request is admitted again; only its first hit counts.
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self.counters.prompt_tokens += len(request.prompt_ids)
            self.counters.cached_tokens += cached
        return request, count

    def _cached_hashes(self, request: Request) -> list[int]:
        if not self._config.enable_prefix_caching:
            return []
        block_size = self._config.block_size
        extend_hashes(request.block_hashes, request.root, request.tokens, block_size)
        # The last token is always computed: its result is the next token.
        usable = request.block_hashes[: (len(request.tokens) - 1) // block_size]
        return usable[: self.blocks.cached_prefix(usable)]

    def _store(self, request: Request) -> None:
        """Make the blocks visible that a request filled in this pass."""
        block_size = self._config.block_size
        full = request.computed_tokens // block_size
        first = request.stored_blocks
        if full == first or not self._config.enable_prefix_caching:
            return
        extend_hashes(request.block_hashes, request.root, request.tokens, block_size)
        new = [self.blocks.promote(block_hash) for block_hash in request.block_hashes[first:full]]
        request.stored_blocks = full
        # Another request may have stored the first ones meanwhile.
        first += new.count(False)
        assert all(new[first - full :]) or first == full, "a cached block's parent is cached"
        if first == full or self._outbox is None:
            return
        lora_name = request.lora_name
        self._outbox.store(
            request.tokens[first * block_size : full * block_size],
            [block_size] * (full - first),
            request.block_hashes[first:full],
            self._config.lora_adapters.index(lora_name) + 1 if lora_name else None,
            request.block_hashes[first - 1] if first else None,
            lora_name=lora_name,
            cache_salt=None if first else request.cache_salt,
            medium=MEDIUM,
        )

    def _sweep(self) -> None:
        ended = [r for r in self._running if r.is_aborted or r.is_finished]
        if not ended:
            return
        self._running = [r for r in self._running if not (r.is_aborted or r.is_finished)]
        for request in ended:
            self._free(request)
            self.counters.finished_requests += request.is_finished

    def _free(self, request: Request) -> None:
        self.blocks.release(request.held_blocks - request.stored_blocks)
        self.blocks.deref(request.block_hashes[: request.stored_blocks])
        request.held_blocks = request.stored_blocks = 0

    def _block_count(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)
