"""The Rust core. This file is its reference manual; ``stubtest`` compares it with the binary."""

import os
from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

__all__ = [
    "Catalog",
    "Frontend",
    "Indexer",
    "OverlapScores",
    "RadixTree",
    "Tokenizer",
    "compute_block_hash_for_seq",
    "compute_sequence_hashes",
    "init_logging",
    "item_hash",
]

_Integers = Sequence[int] | Buffer

def init_logging(level: str = "info", *, json: bool = False) -> bool:
    """Send the core's log lines to stderr.

    Args:
        level: error, warn, info, debug or trace.
        json: One JSON object a line instead of text.

    Returns:
        False when the process has a log already, which then stays.

    Raises:
        ConfigError: Another level.
    """

def compute_block_hash_for_seq(
    tokens: _Integers,
    kv_block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
) -> list[int]:
    """Hash the full blocks of a prompt, each by itself.

    Args:
        tokens: Token ids, u32: a list, or any contiguous buffer (array, numpy uint32 or int64,
            memoryview). Buffers of unsigned 32-bit integers are not copied.
        kv_block_size: Tokens in a block.
        lora_name: LoRA adapter that the prompt is for; part of the hash.
        cache_salt: Cache salt of the prompt; part of the hash.
        is_eagle: Each block also covers the token after it, as EAGLE engines hash.

    Returns:
        Local block hashes, u64, in prompt order. An incomplete last block has none.

    Raises:
        InvalidArgumentError: A token outside u32, by index and value, or block size below 1.

    Cost: O(tokens); releases the GIL while hashing.
    Source: XXH3-64, seed 1337, over little-endian u32 tokens, as NVIDIA Dynamo's router hashes.
    """

def compute_sequence_hashes(block_hashes: _Integers) -> list[int]:
    """Chain local block hashes, so that each one names its whole prefix.

    Args:
        block_hashes: Local block hashes in prompt order; 64 bits, negative ones by their bits.

    Returns:
        Sequence hashes, u64, one a block.

    Raises:
        InvalidArgumentError: A hash outside 64 bits, by index and value.
    """

def item_hash(identifier: str) -> int:
    """Hash of a multimodal item's identifier, as it enters the hashes of the blocks it is in."""

@final
class OverlapScores:
    """How many leading blocks of a prompt each worker holds."""

    @property
    def scores(self) -> dict[tuple[int, int], int]:
        """Blocks by (worker id, dp rank); workers without any are left out."""

    @property
    def frequencies(self) -> list[int]:
        """Per depth, the number of workers that hold at least so many leading blocks."""

    def __len__(self) -> int: ...

@final
class RadixTree:
    """Which worker holds which blocks.

    Consistency: a query sees every event whose call returned before it began; it never waits for
    writers. Safe to use from many threads.
    """

    def __new__(cls) -> RadixTree: ...
    def find_matches(self, sequence: _Integers, early_exit: bool = False) -> OverlapScores:
        """Count, per worker, the leading blocks that it holds.

        Args:
            sequence: Local block hashes in prompt order.
            early_exit: Stop as soon as one worker is left and report the depth reached by then.

        Raises:
            InvalidArgumentError: A hash outside 64 bits, by index and value.

        Cost: one probe a block up to the deepest match; releases the GIL.
        """

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Apply one event of a worker.

        Args:
            worker_id: The engine instance.
            kv_cache_event_bytes: JSON: ``{"event_id", "data": {"stored": ...} | {"removed": ...} |
                "cleared", "dp_rank"}``.

        Raises:
            DecodeError: Not such an event.
            InvalidArgumentError: Stored under an unknown parent, or a block named twice; nothing
                of it is kept.
        """

    def remove_worker(self, worker_id: int) -> int:
        """Forget all ranks of an instance. Returns how many there were."""

    def clear_all_blocks(self, worker_id: int, dp_rank: int | None = None) -> int:
        """Drop the blocks of an instance (or one rank), which stays known. Returns how many."""

    def dump_tree_as_events(self) -> list[str]:
        """All blocks as JSON router events, one block each, parents before children."""

    def block_count(self, worker_id: int, dp_rank: int) -> int:
        """Blocks that a worker holds, all tiers."""

@final
class Tokenizer:
    """Tokenizer and chat template of a model folder, exact to the engine's own."""

    def __new__(
        cls, folder: str | os.PathLike[str], *, cache_bytes: int = 268_435_456
    ) -> Tokenizer: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, u32."""

    def decode(self, ids: _Integers, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""

    def render_chat(
        self,
        messages_json: str,
        add_generation_prompt: bool = True,
        *,
        tools_json: str | None = None,
    ) -> str | None:
        """The prompt text of a chat; None for content that is not text."""

    def chat_tokens(
        self,
        messages_json: str,
        add_generation_prompt: bool = True,
        *,
        tools_json: str | None = None,
    ) -> list[int] | None:
        """Token ids of a chat's prompt; None for content that is not text."""

@final
class Catalog:
    """Orders for the event transport, and the frames that it brings.

    Made by a service (``Indexer.catalog``, ``Frontend.catalog``). Safe to use from many threads.
    """

    def next_order(self, timeout_s: float) -> tuple[str, int, str, str | None] | None:
        """Wait for the next order.

        Returns:
            ``("subscribe", publisher, endpoint, replay_endpoint)``,
            ``("unsubscribe", publisher, "", None)`` or None after ``timeout_s`` seconds.
        """

    def take(
        self, publisher: int, messages: Sequence[Sequence[object]], *, replayed: bool = False
    ) -> tuple[int, str, int, int]:
        """Take in messages in the order they came.

        Args:
            publisher: Whose messages.
            messages: Multipart messages as lists; the last two parts are sequence (8 bytes, big
                endian) and payload: bytes, or objects with a buffer such as ``zmq.Frame``.
            replayed: They were sent again on request.

        Returns:
            ``(consumed, outcome, first, last)``: ``applied`` when all were taken; ``gap`` when
            message ``consumed`` shows that batches ``first..=last`` are missing: repair, then offer
            it again; ``closed`` when the publisher is gone.

        Cost: one GIL release for all messages.
        """

    def give_up(self, publisher: int, sequence: int) -> None:
        """Missing batches will not come: the stream goes on at ``sequence``."""

    def verify(self, publisher: int, message: tuple[bytes, bytes] | None = None) -> bool:
        """After a reconnect: is it still the stream that was applied so far?

        Args:
            publisher: Which publisher.
            message: First ``(sequence, payload)`` of a replay from the last applied sequence
                number; None when the engine had nothing to replay.

        Returns:
            False when the engine restarted; its blocks are then forgotten already.
        """

    def position(self, publisher: int) -> tuple[int, int | None] | None:
        """``(next wanted, last applied)`` sequence number; None when the publisher is gone."""

    def set_status(self, publisher: int, status: str, error: str | None = None) -> None:
        """Report the socket's state: pending, active, paused or failed."""

@final
class Indexer:
    """The standalone indexer's HTTP service in this process."""

    def __new__(
        cls,
        *,
        threads: int = 4,
        max_body_bytes: int = 8_388_608,
        max_blocks: int = 33_554_432,
        index_memory_bytes: int = 0,
        drain_timeout_s: float = 5.0,
    ) -> Indexer: ...
    @property
    def catalog(self) -> Catalog: ...
    def start(self, host: str, port: int) -> int:
        """Bind and serve in the background. Returns the bound port.

        Raises:
            ConfigError: The address can't be bound.
        """

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
    ) -> None:
        """Register a publisher, as POST /register does.

        Raises:
            ConflictError: Registered already, or another block size.
            InvalidArgumentError: Block size below 1.
        """

    def stop(self) -> None:
        """Stop serving; open requests get the drain time. Blocks until done."""

@final
class Frontend:
    """The OpenAI-compatible frontend in this process."""

    def __new__(
        cls,
        *,
        policy: str = "kv",
        overlap_score_weight: float = 1.0,
        temperature: float = 0.0,
        kv_cache_block_size: int | None = None,
        track_active_blocks: bool = True,
        assume_kv_reuse: bool = True,
        active_request_expiry_s: float = 300.0,
        seed: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        tokenizer_cache_bytes: int = 268_435_456,
        worker_api_key: str | None = None,
        threads: int = 2,
        max_body_bytes: int = 33_554_432,
        max_concurrent_requests: int = 4_096,
        max_workers: int = 4_096,
        max_attempts: int = 5,
        max_blocks: int = 33_554_432,
        index_memory_bytes: int = 0,
        body_timeout_s: float = 60.0,
        connect_timeout_s: float = 2.0,
        first_byte_timeout_s: float = 600.0,
        tokenize_timeout_s: float = 2.0,
        health_interval_s: float = 2.0,
        drain_timeout_s: float = 30.0,
    ) -> Frontend: ...
    @property
    def catalog(self) -> Catalog: ...
    def add_worker(self, spec: str) -> int:
        """Add an engine: ``URL[,events=tcp://...][,replay=tcp://...][,id=N][,dp=N]``.

        Returns:
            Its instance id.

        Raises:
            ConfigError: A bad spec.
            ConflictError: The id or address is there already.
        """

    def start(self, host: str, port: int) -> int:
        """Bind and serve in the background. Returns the bound port.

        Raises:
            ConfigError: The address can't be bound.
        """

    def stop(self) -> None:
        """Stop serving; open requests get the drain time. Blocks until done."""
