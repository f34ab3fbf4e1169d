"""A request in the engine, and the results of passes.

Data only: the scheduler alone changes a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvflash.mocker.block_hash import root_hash
from kvflash.mocker.events import Event


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter: its number, from 1, and its name."""

    lora_id: int
    name: str


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request in the scheduler.

    Attributes:
        request_id: Unique among the requests of a scheduler.
        prompt_ids: Tokens of the prompt, at least one.
        planned_ids: Tokens of the answer, at least one.
        lora: LoRA adapter, or None.
        cache_salt: Separates the cache of tenants, or None.
        is_transferred: Whether its KV comes from a prefill worker: then only the last token of the
            prompt is computed here.
        tokens: The prompt and the answer so far.
        cached_tokens: Prompt tokens found in the cache at admission; None before.
        root: Root of its chain of block hashes.
        block_hashes: Hashes of the full blocks of `tokens`, as far as needed.
        stored_blocks: Leading blocks that it holds by hash.
        partial_blocks: Blocks that it holds beyond these.
        computed_tokens: Leading tokens whose KV is in those blocks.
        is_aborted: Whether it was ended early.
    """

    request_id: int
    prompt_ids: Sequence[int]
    planned_ids: Sequence[int]
    lora: Lora | None = None
    cache_salt: str | None = None
    is_transferred: bool = False
    tokens: list[int] = field(init=False)
    cached_tokens: int | None = field(init=False, default=None)
    root: int = field(init=False)
    block_hashes: list[int] = field(init=False, default_factory=list)
    stored_blocks: int = field(init=False, default=0)
    partial_blocks: int = field(init=False, default=0)
    computed_tokens: int = field(init=False, default=0)
    is_aborted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Start with the prompt, not computed."""
        self.tokens = list(self.prompt_ids)
        self.root = root_hash(self.lora.name if self.lora else None, self.cache_salt)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return len(self.tokens) == len(self.prompt_ids) + len(self.planned_ids)


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one pass.

    Attributes:
        chunks: Requests and how many tokens of each are computed.
        prefill_tokens: Tokens of prompts (or of preempted requests) among them.
        decode_count: Requests that only decode one token.
        kv_usage: Share of the KV cache in use during the pass.
    """

    chunks: Sequence[tuple[Request, int]]
    prefill_tokens: int
    decode_count: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass.

    Attributes:
        advanced: Requests that got one output token.
        events: Block events in order.
    """

    advanced: Sequence[Request]
    events: Sequence[Event]


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
