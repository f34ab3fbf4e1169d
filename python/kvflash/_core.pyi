"""The Rust core: signatures, compared with the binary by ``stubtest``; ``help`` is the manual."""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, final

from typing_extensions import Buffer

__all__ = [
    "ApproxKvIndexer",
    "Bookings",
    "Catalog",
    "CatalogDump",
    "Decider",
    "EventOutbox",
    "FoundWorkers",
    "Frontend",
    "Indexer",
    "KvIndexer",
    "OverlapScores",
    "PolicyCandidate",
    "PolicyDesk",
    "PolicyEnded",
    "PolicyQuestion",
    "PolicyRequest",
    "RadixTree",
    "Repair",
    "Router",
    "RouterBooking",
    "RouterCore",
    "RouterWait",
    "Tokenizer",
    "ZmqDrain",
    "check_key",
    "check_keys",
    "check_policy",
    "check_shadow_policies",
    "compute_block_hash_array",
    "compute_block_hash_for_seq",
    "compute_sequence_hashes",
    "init_logging",
    "model_folder",
    "settings_table",
]

_Integers = Sequence[int] | Buffer
# Multimodal items: identifier (text), offset and length (tokens).
_Media = Sequence[Mapping[str, Any]]
# Digests of prompt embeddings: bytes, or text in hexadecimal digits.
_Embeds = Sequence[str | bytes]

def check_key(line: str, blamed: str) -> None: ...
def check_keys(text: str, blamed: str) -> None: ...
def check_policy(strategy: str) -> None: ...
def check_shadow_policies(policies: Sequence[str]) -> None: ...
def settings_table() -> str: ...
def model_folder(named: str) -> str: ...
def init_logging(level: str = "info", *, json: bool = False) -> bool: ...
def compute_block_hash_for_seq(
    tokens: _Integers,
    kv_block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    mm: _Media | None = None,
    embeds: _Embeds | None = None,
) -> list[int]: ...
def compute_block_hash_array(
    tokens: _Integers,
    kv_block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
    out: Buffer | None = None,
    mm: _Media | None = None,
    embeds: _Embeds | None = None,
) -> memoryview: ...
def compute_sequence_hashes(block_hashes: _Integers) -> list[int]: ...

@final
class OverlapScores:
    scores: Final[dict[tuple[int, int], int]]
    tier_scores: Final[dict[tuple[int, int], tuple[int, int, int, int]]]
    frequencies: Final[list[int]]
    def __len__(self) -> int: ...
    def __await__(self) -> Generator[Any, None, OverlapScores]: ...

@final
class RadixTree:
    def __new__(cls) -> RadixTree: ...
    def find_matches(self, sequence: _Integers, early_exit: bool = False) -> OverlapScores: ...
    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None: ...
    def remove_worker(self, worker_id: int) -> int: ...
    def clear_all_blocks(self, worker_id: int, dp_rank: int | None = None) -> int: ...
    def dump_tree_as_events(self) -> list[str]: ...
    def block_count(self, worker_id: int, dp_rank: int) -> int: ...

@final
class KvIndexer:
    def __new__(
        cls,
        block_size: int,
        *,
        count_mode: Literal["copies", "set"] = "copies",
        max_blocks: int = 0,
        capacity_blocks: int = 0,
        max_bytes: int = 0,
        ttl_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> KvIndexer: ...
    def block_size(self) -> int: ...
    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None: ...
    def apply_events(self, events: Sequence[str | bytes]) -> int: ...
    def store(
        self,
        worker_id: int,
        block_hashes: _Integers,
        local_hashes: _Integers,
        parent_hash: int | None = None,
        dp_rank: int = 0,
        tier: str = "device",
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> int: ...
    def remove(
        self, worker_id: int, block_hashes: _Integers, dp_rank: int = 0, tier: str = "device"
    ) -> int: ...
    def find_matches(self, local_hashes: _Integers, early_exit: bool = False) -> OverlapScores: ...
    def find_matches_for_request(
        self,
        token_ids: _Integers,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        *,
        mm: _Media | None = None,
        embeds: _Embeds | None = None,
    ) -> OverlapScores: ...
    def find_many(
        self,
        requests: list[_Integers],
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[OverlapScores]: ...
    def top(self, local_hashes: _Integers, k: int) -> list[tuple[int, int, int]]: ...
    def find_matches_into(
        self, local_hashes: _Integers, worker_ids: Buffer, dp_ranks: Buffer, depths: Buffer
    ) -> int: ...
    def remove_worker(self, worker_id: int) -> int: ...
    def clear_all_blocks(self, worker_id: int, dp_rank: int | None = None) -> int: ...
    def dump_tree_as_events(self) -> list[str]: ...
    def save_snapshot(self, path: str | os.PathLike[str]) -> dict[str, int]: ...
    def load_snapshot(self, path: str | os.PathLike[str]) -> dict[str, Any]: ...
    def workers(self) -> list[tuple[int, int]]: ...
    def block_count(self, worker_id: int, dp_rank: int = 0) -> int: ...
    def stats(self) -> dict[str, int]: ...

@final
class ApproxKvIndexer:
    def __new__(
        cls,
        block_size: int,
        ttl_s: float = 120.0,
        *,
        capacity_blocks: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> ApproxKvIndexer: ...
    def block_size(self) -> int: ...
    def process_routing_decision_for_request(
        self,
        token_ids: _Integers,
        worker_id: int,
        dp_rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> int: ...
    def find_matches(self, local_hashes: _Integers, early_exit: bool = False) -> OverlapScores: ...
    def find_matches_for_request(
        self,
        token_ids: _Integers,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> OverlapScores: ...
    def remove_worker(self, worker_id: int) -> int: ...
    def clear_all_blocks(self, worker_id: int, dp_rank: int | None = None) -> None: ...
    def workers(self) -> list[tuple[int, int]]: ...
    def stats(self) -> dict[str, int]: ...

@final
class Tokenizer:
    def __new__(
        cls, folder: str | os.PathLike[str], *, cache_bytes: int = 268_435_456
    ) -> Tokenizer: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: _Integers, skip_special_tokens: bool = True) -> str: ...
    def render_chat(
        self,
        messages_json: str,
        add_generation_prompt: bool = True,
        *,
        tools_json: str | None = None,
    ) -> str | None: ...
    def chat_tokens(
        self,
        messages_json: str,
        add_generation_prompt: bool = True,
        *,
        tools_json: str | None = None,
    ) -> list[int] | None: ...

@final
class Catalog:
    def __new__(cls, *, max_blocks: int = 33_554_432, index_memory_bytes: int = 0) -> Catalog: ...
    def register(
        self,
        instance_id: int,
        endpoint: str,
        *,
        model_name: str,
        block_size: int,
        tenant_id: str = "default",
        dp_rank: int = 0,
        replay_endpoint: str | None = None,
    ) -> int: ...
    def expel(self, instance_id: int, dp_rank: int | None = None) -> bool: ...
    def forget(self, instance_id: int, dp_rank: int) -> bool: ...
    def workers(self) -> list[tuple[int, int]]: ...
    def restarted(self, publisher: int) -> None: ...
    def dump(self, instance_id: int | None = None) -> CatalogDump: ...
    def restore(self, dump: bytes) -> tuple[int, int, list[str]]: ...
    def digests(self) -> list[tuple[tuple[str, str], int, int, int, int, int | None]]: ...
    def close_orders(self) -> None: ...
    def next_order(
        self, timeout_s: float | None = None
    ) -> tuple[str, int, str, str | None] | None: ...
    def take(
        self, publisher: int, messages: Sequence[Sequence[object]], *, replayed: bool = False
    ) -> tuple[int, str, int, int]: ...
    def give_up(self, publisher: int, sequence: int) -> None: ...
    def verify(self, publisher: int, message: tuple[bytes, bytes] | None = None) -> bool: ...
    def position(self, publisher: int) -> tuple[int, int | None] | None: ...
    def limit_sockets(self, most: int) -> None: ...
    def set_status(self, publisher: int, status: str, error: str | None = None) -> None: ...

@final
class CatalogDump:
    def __iter__(self) -> Iterator[bytes]: ...
    def __next__(self) -> bytes: ...

@final
class EventOutbox:
    def __new__(
        cls,
        block_size: int,
        *,
        shape: str = "own",
        dp_rank: int | None = None,
        tick_s: float = 0.001,
        event_bytes_max: int = 8388608,
        batch_bytes_max: int = 1048576,
        pending_bytes_max: int = 16777216,
        ring_batches: int = 10000,
        ring_bytes: int = 67108864,
    ) -> EventOutbox: ...
    def store(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        lora_id: int | None = None,
        parent_hash: int | None = None,
        block_mm_infos: Sequence[object] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        medium: str | None = None,
    ) -> str | None: ...
    def remove(self, block_hashes: Sequence[int], *, medium: str | None = None) -> None: ...
    def clear(self) -> None: ...
    def put(self, events: Sequence[bytes]) -> None: ...
    def cut(self) -> None: ...
    def flush(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def wait_ms(self) -> int | None: ...
    def take(self) -> tuple[int, bytes] | None: ...
    def ask(self, frames: Sequence[bytes]) -> bool: ...
    def replies(self) -> list[list[bytes]]: ...
    def is_over(self) -> bool: ...
    def end(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

@final
class Repair:
    def __new__(
        cls,
        catalog: Catalog,
        publisher: int,
        *,
        has_endpoint: bool,
        timeout_s: float,
        is_held: bool = False,
    ) -> Repair: ...
    wants_live: Final[bool]
    is_held: Final[bool]
    def wait_s(self) -> float | None: ...
    def connected(self) -> list[tuple[str, int, int, str]]: ...
    def hold(self) -> None: ...
    def release(self, is_connected: bool) -> list[tuple[str, int, int, str]]: ...
    def live(self, messages: Sequence[Sequence[object]]) -> list[tuple[str, int, int, str]]: ...
    def answered(self, messages: Sequence[Sequence[object]]) -> list[tuple[str, int, int, str]]: ...
    def silent(self, has_more: bool) -> list[tuple[str, int, int, str]]: ...
    def unreachable(self, why: str) -> list[tuple[str, int, int, str]]: ...

@final
class ZmqDrain:
    def __new__(cls, library: str) -> ZmqDrain: ...
    def take(
        self, catalog: Catalog, publisher: int, socket: object, limit: int
    ) -> tuple[int, tuple[bytes, bytes] | None]: ...
    def answer(
        self, repair: Repair, socket: object, limit: int
    ) -> list[tuple[str, int, int, str]]: ...

@final
class PolicyDesk:
    def __new__(
        cls,
        name: str,
        *,
        deadline_s: float = 0.005,
        routed: bool = False,
        finished: bool = False,
        removed: bool = False,
    ) -> PolicyDesk: ...
    def next(self) -> tuple[str, Any, Any] | None: ...
    def close(self) -> None: ...

@final
class PolicyQuestion:
    request: Final[PolicyRequest]
    candidates: Final[list[PolicyCandidate]]
    def answer(self, scores: Sequence[float | None]) -> bool: ...
    def fail(self, *, is_nonsense: bool = False) -> None: ...

@final
class PolicyRequest:
    model: Final[str]
    isl_tokens: Final[int]
    block_size: Final[int]
    prompt: Final[bytes]
    token_ids: Final[list[int]]
    user: Final[str | None]
    session_key: Final[str | None]
    session_worker: Final[tuple[int, int] | None]

@final
class PolicyCandidate:
    index: Final[int]
    worker_id: Final[int]
    dp_rank: Final[int]
    overlap_blocks: Final[int]
    predicted_blocks: Final[int]
    active_requests: Final[int]
    active_blocks: Final[int]
    queued_tokens: Final[int]
    cost: Final[float]
    metrics: Final[dict[str, float]]

@final
class PolicyEnded:
    model: Final[str]
    user: Final[str | None]
    worker_id: Final[int]
    dp_rank: Final[int]
    input_tokens: Final[int]
    cached_tokens: Final[int]
    output_tokens: Final[int]
    duration_s: Final[float]

@final
class RouterBooking:
    worker_id: Final[int]
    dp_rank: Final[int]
    overlap_blocks: Final[int]
    def first_token(self) -> None: ...
    def touch(self) -> None: ...
    def generated(self, tokens: int) -> None: ...
    def cached(self, tokens: int) -> None: ...
    def used(
        self,
        *,
        input_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None: ...
    def free(self, *, is_complete: bool = False) -> None: ...

@final
class Decider:
    def query(
        self, token_ids: _Integers, options: dict[str, Any] | None = None
    ) -> tuple[int, int, int, int]: ...
    def enter(
        self,
        token_ids: _Integers,
        options: dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
    ) -> RouterBooking | RouterWait: ...
    wake_fd: Final[int]
    def called(self) -> list[int]: ...

@final
class RouterWait:
    number: Final[int]
    def try_again(self) -> RouterBooking | None: ...
    def expire(self) -> BaseException: ...
    def leave(self) -> None: ...

# What several classes have in common; at run time each has it itself.

class _Fed:
    catalog: Final[Catalog]

class _Service(_Fed):
    def start(self, host: str, port: int) -> int: ...
    def is_listening(self) -> bool: ...
    def announce_stop(self) -> None: ...
    def stop(self) -> None: ...

class _Routing(_Fed):
    uses_events: Final[bool]
    bookings: Final[Bookings]

class _Routed(_Service, _Routing):
    def set_more_metrics(self, text: str) -> None: ...
    def set_warnings(self, warnings: list[str]) -> None: ...
    def set_remote_indexer(self, url: str | None) -> None: ...

class _Taker:
    def put_worker(self, worker: str) -> int: ...
    def set_worker_state(self, instance_id: int, state: str) -> None: ...
    def remove_worker(self, instance_id: int) -> None: ...

class _Fleet(_Taker):
    def add_worker(self, spec: str) -> int: ...

@final
class Router(_Routed, _Taker):
    def __new__(cls, *, policy_desk: PolicyDesk | None = None, **settings: Any) -> Router: ...
    def worker_changes(self) -> int: ...
    def registered(self) -> list[tuple[int, str, str, str | None, int]]: ...
    decider: Final[Decider]
    def call(self, method: str, path: str, body: Buffer) -> bytes: ...

@final
class Bookings:
    def turn_on(self) -> None: ...
    def take(self, timeout_s: float) -> list[tuple[object, ...]]: ...
    def remote_add(
        self,
        router_id: int,
        request_id: str,
        worker: tuple[int, int],
        hashes: list[int] | None,
        isl: int,
        overlap: int,
    ) -> bool: ...
    def remote_prefilled(self, router_id: int, request_id: str) -> bool: ...
    def remote_free(self, router_id: int, request_id: str) -> bool: ...
    def remote_drop_router(self, router_id: int) -> int: ...
    def remote_heard(self, router_id: int) -> None: ...
    def stats(self) -> dict[str, int]: ...

@final
class RouterCore(_Routing, _Taker):
    def __new__(
        cls,
        *,
        block_size: int,
        policy_desk: PolicyDesk | None = None,
        model_name: str = "default",
        tenant_id: str = "default",
        max_requests: int = 65_536,
        **settings: Any,
    ) -> RouterCore: ...
    block_size: Final[int]
    policy: Final[str]
    def policy_samples(self) -> list[tuple[str, str, str, float]]: ...
    is_caught_up: Final[bool]
    def report_metrics(self, worker_id: int, dp_rank: int, metrics: dict[str, float]) -> bool: ...
    def set_busy_thresholds(
        self,
        *,
        active_decode_blocks_threshold: float | None,
        active_prefill_tokens_threshold: int | None,
        active_prefill_tokens_threshold_frac: float | None,
    ) -> None: ...
    def query(
        self, token_ids: _Integers, options: dict[str, Any] | None = None
    ) -> tuple[int, int, int, int]: ...
    def reserve(
        self, token_ids: _Integers, request_id: str, options: dict[str, Any] | None = None
    ) -> tuple[int, int, int, int]: ...
    decider: Final[Decider]
    def queue_stats(self) -> dict[str, int]: ...
    def mark_prefill_complete(self, request_id: str) -> None: ...
    def touch(self, request_id: str) -> bool: ...
    def free(
        self,
        request_id: str,
        *,
        input_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> bool: ...
    def potential_loads(
        self, token_ids: _Integers, options: dict[str, Any] | None = None
    ) -> list[dict[str, int]]: ...
    def why(self, request_id: str) -> str: ...
    def dump_events(self) -> str: ...
    def totals(self) -> dict[str, int]: ...
    def tick(self) -> int: ...

@final
class FoundWorkers(_Fleet):
    def __new__(
        cls,
        catalog: Catalog,
        *,
        model_name: str,
        tenant_id: str = "default",
        block_size: int | None = None,
        max_workers: int = 4_096,
    ) -> FoundWorkers: ...

@final
class Indexer(_Service):
    def __new__(cls, **settings: Any) -> Indexer: ...
    def is_ready(self) -> bool: ...
    def register(
        self,
        instance_id: int,
        endpoint: str,
        *,
        model_name: str,
        block_size: int,
        tenant_id: str = "default",
        dp_rank: int = 0,
        replay_endpoint: str | None = None,
        lora_name: str | None = None,
        additional_salt: str | None = None,
        capacity_blocks: int | None = None,
        attention_chunk_size: int | None = None,
        offload_chunk: int | None = None,
    ) -> None: ...
    def unregister(
        self,
        instance_id: int,
        *,
        model_name: str,
        tenant_id: str | None = None,
        dp_rank: int | None = None,
    ) -> None: ...
    def query(
        self,
        token_ids: _Integers,
        *,
        model_name: str,
        tenant_id: str = "default",
        lora_name: str | None = None,
        lora_path: str | None = None,
        cache_salt: str | None = None,
        mm: _Media | None = None,
        embeds: _Embeds | None = None,
    ) -> bytes: ...

@final
class Frontend(_Routed, _Fleet):
    def __new__(
        cls,
        *,
        policy_desk: PolicyDesk | None = None,
        has_broker_events: bool = False,
        waits_for: str = "",
        **settings: Any,
    ) -> Frontend: ...
    @staticmethod
    def check_worker(spec: str) -> None: ...
    def report_load(self, report: str) -> None: ...
