"""A request in the engine, which the scheduler alone changes, and the work of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvflash.mocker.block_hash import root_hash


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
