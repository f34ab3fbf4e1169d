"""The Rust core. This file is its reference manual; ``stubtest`` compares it with the binary."""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, final

from typing_extensions import Buffer

__all__ = [
    "ApproxKvIndexer",
    "Bookings",
    "Catalog",
    "CatalogDump",
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
    "check_policy",
    "check_shadow_policies",
    "compute_block_hash_array",
    "compute_block_hash_for_seq",
    "compute_sequence_hashes",
    "init_logging",
    "item_hash",
]

_Integers = Sequence[int] | Buffer
# Multimodal items: identifier (text), offset and length (tokens).
_Media = Sequence[Mapping[str, Any]]
# Digests of prompt embeddings: bytes, or text in hexadecimal digits.
_Embeds = Sequence[str | bytes]

def check_policy(strategy: str) -> None:
    """Check the name of a policy, or a weighted strategy such as ``prefix-cache:2,least-request``.

    Raises:
        InvalidArgumentError: Lists the policies there are.
    """

def check_shadow_policies(policies: Sequence[str]) -> None:
    """Check policies that only watch: strategies, or one with settings: ``kv:temperature=0.5``.

    Raises:
        InvalidArgumentError: Names the policy, the parameter and what is legal; also for more than
            four, and for the same policy with the same parameters twice.
    """

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
    mm: _Media | None = None,
    embeds: _Embeds | None = None,
) -> list[int]:
    """Hash the full blocks of a prompt, each by itself.

    Args:
        tokens: Token ids, u32: a list, or any contiguous buffer (array, numpy uint32 or int64,
            memoryview). Buffers of unsigned 32-bit integers are not copied.
        kv_block_size: Tokens in a block.
        lora_name: LoRA adapter that the prompt is for; part of the hash.
        cache_salt: Cache salt of the prompt; part of the hash.
        is_eagle: Each block also covers the token after it, as EAGLE engines hash.
        mm: Multimodal items, mappings with ``identifier`` (text, 1 to 1,024 bytes), ``offset`` and
            ``length`` (tokens of the prompt, u32); shape [items], 65,536 at most, in any order.
        embeds: Digests of the prompt's embeddings, as bytes or in hexadecimal digits, 1 to 1,024
            bytes each; shape [blocks], 65,536 at most. Hashes end at the first block without one.

    Returns:
        Local block hashes, u64, in prompt order. An incomplete last block has none.

    Raises:
        InvalidArgumentError: A token outside u32, by index and value; a block size below 1; a wrong
            item or digest, by index and field; or one of these with is_eagle.

    Cost: O(tokens); releases the GIL while hashing. Making the list takes longer than hashing: see
        compute_block_hash_array.
    Source: XXH3-64, seed 1337, over little-endian u32 tokens, as NVIDIA Dynamo's router hashes.
    """

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
) -> memoryview:
    """Hash the full blocks of a prompt into memory instead of a list.

    Args:
        tokens: As for compute_block_hash_for_seq, and so are the other arguments.
        kv_block_size: Tokens in a block.
        lora_name: LoRA adapter that the prompt is for; part of the hash.
        cache_salt: Cache salt of the prompt; part of the hash.
        is_eagle: Each block also covers the token after it, as EAGLE engines hash.
        out: Writable, contiguous buffer of u64 (numpy uint64, array "Q") with room for all hashes,
            to be used again from call to call; new memory when not given.
        mm: Multimodal items of the prompt, as for compute_block_hash_for_seq; shape [items].
        embeds: Digests of its embeddings, as there; shape [blocks].

    Returns:
        Local block hashes as a view of u64: of the beginning of ``out``, or of new read-only bytes.
        ``numpy.asarray`` and all functions here take it without a copy.

    Raises:
        InvalidArgumentError: A token outside u32; a block size below 1; a wrong item or digest, or
            one of these with is_eagle; or an ``out`` that is too short, of another type, read-only,
            or in the same memory as the tokens.

    Cost: O(tokens), some gigatokens a second from a buffer of u32; releases the GIL for long
        prompts.
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
    """How many leading blocks of a prompt each worker holds.

    A snapshot. The dictionaries are built when they are read, anew each time: keep what you use
    twice.

    It can be awaited and is its own result, since the published classes answer coroutines: nothing
    here ever waits, ``index.find_matches(...)`` and ``await index.find_matches(...)`` are the same.
    """

    @property
    def scores(self) -> dict[tuple[int, int], int]:
        """Blocks on the device by (worker id, dp rank); workers without any are left out.

        Of an ApproxKvIndexer: blocks predicted.
        """

    @property
    def tier_scores(self) -> dict[tuple[int, int], tuple[int, int, int, int]]:
        """Blocks by (worker id, dp rank) as (device, host, disk, external).

        Each figure includes the one before it: host memory goes on where the device ends, and so
        on.
        """

    @property
    def frequencies(self) -> list[int]:
        """Per depth, the number of workers that hold at least so many leading blocks."""

    def __len__(self) -> int:
        """Workers in ``scores``."""

    def __await__(self) -> Generator[Any, None, OverlapScores]: ...

@final
class RadixTree:
    """Which worker holds which blocks, by hashes only; KvIndexer is the same with a block size.

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

        Cost: one probe per branching point, a comparison of the blocks; releases the GIL for long
            prompts.
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
        """Everything held as JSON router events, which fill an empty tree alike.

        Chains come as stored events. A block that is not held but has to be told, so that others
        find their place, is stored and then removed by an event at its worker's end.
        """

    def block_count(self, worker_id: int, dp_rank: int) -> int:
        """Blocks that a worker holds, all tiers."""

@final
class KvIndexer:
    """Which worker holds which blocks, by what engines report.

    Has the names of NVIDIA Dynamo's class of this name. Its methods are plain ones, since they
    never wait for anything; answers of queries can be awaited all the same (see OverlapScores).

    Consistency: a query sees every change whose call returned before it began; it never waits for
    writers. Safe to use from many threads.
    """

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
    ) -> KvIndexer:
        """An empty index.

        Args:
            block_size: Tokens in a block of the engines.
            count_mode: What a second store of a name means: ``copies``: it is held until it was
                removed as often, as vLLM publishes; ``set``: nothing.
            max_blocks: Blocks that the index may hold; beyond it stores are refused. 0: no limit.
            capacity_blocks: Blocks that one worker keeps; beyond it its least recently stored ones
                go. 0: no limit.
            max_bytes: Memory that the index may occupy; near it the least recently stored blocks of
                all workers go. 0: no limit; less than 512 KiB counts as that.
            ttl_s: Seconds for which a block stands after its worker stored it last, or anything
                behind it; from 0.001. It goes at most a 64th of that and 2 ms later. None: until it
                is removed.
            clock: Returns seconds and does not go back, for ``ttl_s`` in tests and simulations; the
                machine's monotonic clock when not given.

        Raises:
            InvalidArgumentError: Block size 0, another count mode, a time out of range, or a clock
                without ``ttl_s``.
        """

    def block_size(self) -> int:
        """Tokens in a block."""

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Apply one event of a worker; see RadixTree.apply_event."""

    def apply_events(self, events: Sequence[str | bytes]) -> int:
        """Apply router events in order, with one release of the GIL.

        Args:
            events: JSON as ``dump_tree_as_events`` and GET /dump give them: ``{"worker_id",
                "event", "storage_tier"}``.

        Returns:
            How many: all.

        Raises:
            DecodeError: Not such an event; names its place in the list. Those before it stay.
            InvalidArgumentError: As apply_event; the same.
        """

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
    ) -> int:
        """Record that a worker holds a chain of blocks.

        Args:
            worker_id: The engine instance.
            block_hashes: The engine's names of the blocks, in prompt order; 64 bits.
            local_hashes: Local block hashes; as many.
            parent_hash: The engine's name of the block before the first; None at a prompt's start.
            dp_rank: Data-parallel rank within the instance.
            tier: device, host_pinned, disk, external, or an engine's word for one of them.
            lora_name: Adapter that the local hashes were made with; dumps carry it.
            cache_salt: Salt that they were made with; dumps carry it.

        Returns:
            Blocks that were not held under these names before.

        Raises:
            InvalidArgumentError: Lists of different length, an unknown parent, a block named twice;
                nothing is kept.

        Cost: O(blocks); releases the GIL. Buffers of 64-bit integers are not copied.
        """

    def remove(
        self, worker_id: int, block_hashes: _Integers, dp_rank: int = 0, tier: str = "device"
    ) -> int:
        """Record that a worker evicted blocks, by its names; unknown ones are skipped.

        Returns:
            Blocks that were held and no longer are.
        """

    def find_matches(self, local_hashes: _Integers, early_exit: bool = False) -> OverlapScores:
        """Count, per worker, the leading blocks that it holds.

        Args:
            local_hashes: Local block hashes in prompt order.
            early_exit: Stop as soon as one worker is left and report the depth reached by then.

        Raises:
            InvalidArgumentError: A hash outside 64 bits, by index and value.

        Cost: one probe per branching point, a comparison of the blocks; releases the GIL for long
            prompts.
        """

    def find_matches_for_request(
        self,
        token_ids: _Integers,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        *,
        mm: _Media | None = None,
        embeds: _Embeds | None = None,
    ) -> OverlapScores:
        """Hash a prompt and count, per worker, the leading blocks that it holds.

        Args:
            token_ids: Token ids, u32; buffers of unsigned 32-bit integers are not copied.
            lora_name: LoRA adapter that the prompt is for.
            cache_salt: Cache salt of the prompt.
            mm: Multimodal items, as for compute_block_hash_for_seq; shape [items].
            embeds: Digests of the prompt's embeddings, as there; shape [blocks].

        Raises:
            InvalidArgumentError: A token outside u32, by index and value, or a wrong item or
                digest, by index and field.

        Cost: O(tokens), then as find_matches; releases the GIL for long prompts.
        """

    def find_many(
        self,
        requests: list[_Integers],
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[OverlapScores]:
        """As find_matches_for_request for many prompts, with one release of the GIL.

        Returns:
            An answer for each prompt, in their order; they are not of one moment.

        Cost: as find_matches_for_request for each; what queries share is done once for some dozens.
        """

    def top(self, local_hashes: _Integers, k: int) -> list[tuple[int, int, int]]:
        """The ``k`` workers with the deepest match: (worker id, dp rank, blocks).

        Deepest first, ties in ascending order of worker; device only.
        """

    def find_matches_into(
        self, local_hashes: _Integers, worker_ids: Buffer, dp_ranks: Buffer, depths: Buffer
    ) -> int:
        """As find_matches, into the caller's memory: no object is made.

        Args:
            local_hashes: Local block hashes in prompt order.
            worker_ids: Writable, contiguous buffer of u64 for the instances.
            dp_ranks: The same of u32 for their ranks.
            depths: The same of u32 for the leading blocks on the device.

        Returns:
            Entries written, in no order. When the shortest buffer has no room for all matches, the
            deepest ones are written.

        Raises:
            InvalidArgumentError: A buffer of another type, or a read-only one.
        """

    def remove_worker(self, worker_id: int) -> int:
        """Forget all ranks of an instance. Returns how many there were."""

    def clear_all_blocks(self, worker_id: int, dp_rank: int | None = None) -> int:
        """Drop the blocks of an instance (or one rank), which stays known. Returns how many."""

    def dump_tree_as_events(self) -> list[str]:
        """Everything held as JSON router events; see RadixTree. ``apply_events`` takes them."""

    def save_snapshot(self, path: str | os.PathLike[str]) -> dict[str, int]:
        """Write everything held to a file, whole or not at all.

        It is written beside ``path`` first and then renamed over it.

        Returns:
            ``workers``, ``blocks`` and ``bytes`` written.

        Raises:
            OSError: What the file system says; ``path`` is as it was.
            InvalidArgumentError: ``path`` names no file.

        Consistency: each worker as it was at one moment, workers at different ones. Queries go on;
            events wait while the names of one worker are copied.

        Cost: 16 bytes a block, and memory for two copies of the largest worker; releases the GIL.
        """

    def load_snapshot(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take in what a file says, before events of its workers are applied.

        Returns:
            ``workers`` and ``blocks`` that were loaded; ``lost``: (worker id, dp rank, cause) of
            workers of which nothing was taken: damaged, cut off, refused by the index, or holding
            blocks already; ``cut``: whether the file ended early; ``created_ms``: when it was
            saved, in milliseconds since 1970.

        Raises:
            InvalidArgumentError: No snapshot, a damaged head, another version or block size; names
                field, expected and found. Nothing is loaded.
            OSError: What the file system says.

        Cost: O(blocks), and memory for the largest worker; releases the GIL.
        """

    def workers(self) -> list[tuple[int, int]]:
        """Known workers as (worker id, dp rank), ascending."""

    def block_count(self, worker_id: int, dp_rank: int = 0) -> int:
        """Blocks that a worker holds, all tiers."""

    def stats(self) -> dict[str, int]:
        """Sizes and counters; those that only grow end in ``_total``, ``bytes`` is its memory."""

@final
class ApproxKvIndexer:
    """Which worker probably holds which blocks, by where requests were sent.

    For engines that publish no events. A block counts for ``ttl_s`` seconds from the last request
    with it that was sent to the worker; asking does not prolong it. What the engine evicted
    meanwhile is not known. Methods never wait; answers can be awaited all the same (see
    OverlapScores).

    Consistency: a query sees every decision whose call returned before it began, and none that had
    run out by then. Safe to use from many threads.
    """

    def __new__(
        cls,
        block_size: int,
        ttl_s: float = 120.0,
        *,
        capacity_blocks: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> ApproxKvIndexer:
        """An empty index.

        Args:
            block_size: Tokens in a block of the engines.
            ttl_s: Seconds for which a prediction stands; from 0.001.
            capacity_blocks: Blocks predicted of one worker at a time; beyond it the oldest ones go.
                0: no limit.
            clock: Returns seconds and does not go back, for tests and simulations; the machine's
                monotonic clock when not given.

        Raises:
            InvalidArgumentError: Block size 0, or a time out of range.
        """

    def block_size(self) -> int:
        """Tokens in a block."""

    def process_routing_decision_for_request(
        self,
        token_ids: _Integers,
        worker_id: int,
        dp_rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Note that a request was sent to a worker, which will soon hold its prompt.

        Returns:
            Blocks that were not predicted of it before.

        Raises:
            InvalidArgumentError: A token outside u32, by index and value.
        """

    def find_matches(self, local_hashes: _Integers, early_exit: bool = False) -> OverlapScores:
        """Count, per worker, the leading blocks predicted.

        Args:
            local_hashes: Local block hashes in prompt order.
            early_exit: Changes nothing here.
        """

    def find_matches_for_request(
        self,
        token_ids: _Integers,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> OverlapScores:
        """Hash a prompt and count, per worker, the leading blocks predicted."""

    def remove_worker(self, worker_id: int) -> int:
        """Forget all ranks of an instance. Returns how many there were."""

    def clear_all_blocks(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Drop the predictions of an instance (or one rank), which stays known."""

    def workers(self) -> list[tuple[int, int]]:
        """Known workers as (worker id, dp rank), ascending."""

    def stats(self) -> dict[str, int]:
        """Sizes and counters, as KvIndexer.stats; ``predicted`` counts blocks per worker."""

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

    A service has one (``Indexer.catalog``, ``Frontend.catalog``); one of its own serves nobody, and
    is what a worker keeps of its own blocks. Safe to use from many threads.

    Args:
        max_blocks: Blocks that one index may hold; beyond it stores are refused. 0: no limit.
        index_memory_bytes: Memory that one index may occupy; near it the least recently stored
            blocks go. 0: no limit.
    """

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
    ) -> int:
        """Register a publisher.

        Returns:
            Its number. Of a worker that is registered at the same ``nats://`` or ``jetstream://``
            endpoint already: the number that it has.

        Raises:
            ConflictError: Registered already at another endpoint, or another block size.
            InvalidArgumentError: An endpoint, a name or a block size that can't be.
            OverloadedError: The limit of publishers or models is reached.
        """

    def expel(self, instance_id: int, dp_rank: int | None = None) -> bool:
        """Unregister an instance, or one rank of it, whatever its model; its blocks are gone.

        Returns:
            False when nothing was known of it.
        """

    def forget(self, instance_id: int, dp_rank: int) -> bool:
        """Forget what a worker holds and its place in the stream, before a dump brings both anew.

        Returns:
            False when nothing was known of it.
        """

    def workers(self) -> list[tuple[int, int]]:
        """(instance id, dp rank) of all that are registered or were named by a dump."""

    def restarted(self, publisher: int) -> None:
        """Its process is another one than before: its blocks are forgotten, it counts from 0."""

    def dump(self, instance_id: int | None = None) -> CatalogDump:
        """Everything held, with the place of every publisher's stream, as GET /dump's snapshot.

        Args:
            instance_id: Of this instance only.
        """

    def restore(self, dump: bytes) -> tuple[int, int, list[str]]:
        """Take over a dump: blocks and places of publishers that have none yet.

        Returns:
            ``(publishers, blocks, reasons)``: whose share was taken over, how many blocks that
            brought, and the first reasons for what was left out.

        Raises:
            DecodeError: It is no dump, or cut; what came whole before stays.

        Cost: O(blocks); releases the GIL.
        """

    def digests(self) -> list[tuple[tuple[str, str], int, int, int, int, int | None]]:
        """What every worker holds, in short; equal states have equal digests.

        Returns:
            ``((model, tenant), instance id, dp rank, blocks, digest, last sequence number)``, in
            order.

        Cost: O(n log n) for n blocks of a worker; releases the GIL.
        """

    def close_orders(self) -> None:
        """End :meth:`next_order`: a call that waits, and later ones, return None at once."""

    def next_order(self, timeout_s: float | None = None) -> tuple[str, int, str, str | None] | None:
        """Wait for the next order, for ever without a timeout.

        Returns:
            ``("subscribe", publisher, endpoint, replay_endpoint)``; the same with ``"hold"``:
            connect, but read nothing before ``("resume", publisher, "", None)``;
            ``("pause", publisher, "", None)``: read no more; ``("unsubscribe", publisher, "",
            None)``; or None after ``timeout_s`` seconds, or after :meth:`close_orders`.
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
class CatalogDump:
    """The bytes of a dump in chunks of up to 1 MiB: joined they are what ``restore`` takes.

    The first chunk is the mark of its form and the last one that of its end; what lies between may
    be joined with that of other dumps.

    Consistency: each publisher's share is of the moment in which its first chunk was asked for.
    Cost: 16 bytes a block; that publisher's frames wait while its share is made. Releases the GIL,
    but for the copy of a chunk.
    """

    def __iter__(self) -> Iterator[bytes]: ...
    def __next__(self) -> bytes: ...

@final
class EventOutbox:
    """The events of one data parallel rank on their way to the sockets that Python has.

    Any thread puts events. One thread polls ``fileno`` and its sockets for at most ``wait_ms``,
    hands requests to ``ask``, and sends what ``take`` and ``replies`` return, until ``is_over``.

    Args:
        block_size: Tokens in a block, at least 1.
        shape: Of events: ``tagged``, the maps of vLLM 0.27, ``positional``, the arrays of 0.22, or
            ``own``, maps with ``cache_salt`` in place of a first extra key.
        dp_rank: Rank in every batch.
        tick_s: How long the first event of a batch waits for more.
        event_bytes_max: Of an event of several blocks.
        batch_bytes_max: A batch is closed at this many bytes, or 1,024 events.
        pending_bytes_max: Encoded events that may wait; beyond it calls wait.
        ring_batches: Batches kept for replay.
        ring_bytes: Memory that they may take; the oldest go first.

    Raises:
        InvalidArgumentError: The block size is 0.
    """

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
    ) -> str | None:
        """Queue stored blocks; see ``KvEventPublisher.publish_stored``.

        Returns:
            What to say of blocks that were dropped, if any were.
        """

    def remove(self, block_hashes: Sequence[int], *, medium: str | None = None) -> None:
        """Queue removed blocks."""

    def clear(self) -> None:
        """Queue that no block is left."""

    def put(self, events: Sequence[bytes]) -> None:
        """Queue encoded events, which stay together.

        Raises:
            ClosedError: It is closed, or belongs to the process that this one was forked from.
        """

    def cut(self) -> None:
        """Close the batch of the events that wait; never waits."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is sent; False if that took longer."""

    def close(self) -> None:
        """Take no more; the thread sends what is queued. Raises ClosedError in a fork."""

    def fileno(self) -> int:
        """A descriptor that is readable when the thread has something to do."""

    def wait_ms(self) -> int | None:
        """How long the thread may wait; None = until the descriptor is readable."""

    def take(self) -> tuple[int, bytes] | None:
        """Number and payload of the next batch; the one before counts as sent from here on."""

    def ask(self, frames: Sequence[bytes]) -> bool:
        """Take a request ``[client, b"", number]`` for a replay; False when it is none."""

    def replies(self) -> list[list[bytes]]:
        """``[client, number, payload]`` of what is to be replayed now."""

    def is_over(self) -> bool:
        """Closed, and everything handed over."""

    def end(self) -> None:
        """The thread has ended, however; nobody waits for it any more."""

    def stats(self) -> dict[str, int]:
        """Counters and gauges; units are in the names."""

@final
class Repair:
    """What to do about one publisher's lost batches, for the one who has its sockets.

    Calls return effects ``(kind, first, last, why)`` in their order: ``ask``: open a socket to the
    replay endpoint, in place of an earlier one, and ask for the batches from ``first`` on;
    ``dismiss``: close it; ``peek``: hand what waits in the subscription to ``live``, be it nothing;
    ``lost``: batches ``first..=last`` are given up, as nobody can be asked; ``failed``: the replay
    from ``first`` failed.

    Args:
        catalog: Where frames go.
        publisher: Whose.
        has_endpoint: Whether it can be asked for a replay.
        timeout_s: Silence after which a replay is given up.
        is_held: Read nothing before ``release``.
    """

    def __new__(
        cls,
        catalog: Catalog,
        publisher: int,
        *,
        has_endpoint: bool,
        timeout_s: float,
        is_held: bool = False,
    ) -> Repair: ...
    @property
    def wants_live(self) -> bool:
        """Whether the subscription is to be read; else its messages wait in the socket."""

    @property
    def is_held(self) -> bool:
        """Whether nothing is read before ``release``."""

    def wait_s(self) -> float | None:
        """Seconds until ``silent`` is to be called; None without a replay under way."""

    def connected(self) -> list[tuple[str, int, int, str]]:
        """The subscription has connected."""

    def hold(self) -> None:
        """Read no more."""

    def release(self, is_connected: bool) -> list[tuple[str, int, int, str]]:
        """Read on."""

    def live(self, messages: Sequence[Sequence[object]]) -> list[tuple[str, int, int, str]]:
        """Messages came over the subscription, as lists of parts; see ``Catalog.take``."""

    def answered(self, messages: Sequence[Sequence[object]]) -> list[tuple[str, int, int, str]]:
        """Messages came as a replay; what is behind its end is passed over."""

    def silent(self, has_more: bool) -> list[tuple[str, int, int, str]]:
        """The time is over; ``has_more``: something is here, and will be handed over."""

    def unreachable(self, why: str) -> list[tuple[str, int, int, str]]:
        """The replay endpoint can't be asked."""

@final
class ZmqDrain:
    """Reads publishers' messages from pyzmq's sockets into the index, without Python between them.

    pyzmq opens, polls and closes the sockets; libzmq's own functions are called on them, those of
    the library that pyzmq has loaded.

    Args:
        library: Path of a loaded library that is, or is linked with, libzmq 4.1 or a later 4.x.

    Raises:
        TransportError: It is not loaded, or its functions can't be found.
    """

    def __new__(cls, library: str) -> ZmqDrain: ...
    def take(
        self, catalog: Catalog, publisher: int, socket: object, limit: int
    ) -> tuple[int, tuple[bytes, bytes] | None]:
        """Receive what waits and take it in as live messages, like Catalog.take.

        Stops at a message that shows a gap: it is handed back and the rest is left in the socket.
        Messages of a publisher that is gone are read and dropped.

        Args:
            catalog: Where messages go.
            publisher: Whose messages.
            socket: A ``zmq.Socket``; no other thread may use or close it meanwhile.
            limit: Most messages to receive.

        Returns:
            ``(taken, unread)``: how many messages were taken in, and the ``(sequence, payload)``
            that shows a gap: offer it to ``Catalog.take``, which tells the gap.

        Raises:
            ClosedError: The socket is closed.
            TransportError: libzmq can't receive.

        Cost: one GIL release for all messages; nothing is copied or allocated per message.
        """

@final
class PolicyDesk:
    """Where a service asks a policy in Python; :class:`kvflash.Policy` is what users write.

    Args:
        name: The policy's name.
        deadline_s: How long an answer is waited for; at least 0.001.
        routed, finished, removed: Whether the policy wants to be told of these.

    Raises:
        ConfigError: A deadline that is none.
    """

    def __new__(
        cls,
        name: str,
        *,
        deadline_s: float = 0.005,
        routed: bool = False,
        finished: bool = False,
        removed: bool = False,
    ) -> PolicyDesk: ...
    def next(self) -> tuple[str, Any, Any] | None:
        """Wait, without the GIL, for something to do; ``None`` once it is closed.

        Returns:
            ``("choose", PolicyQuestion, None)``, ``("routed", PolicyRequest, PolicyCandidate)``,
            ``("finished", PolicyEnded, None)`` or ``("removed", worker_id, dp_rank)``.
        """

    def close(self) -> None:
        """Nothing is asked any more; what waits is done without."""

@final
class PolicyQuestion:
    """A question that waits for its answer; dropped without one it is a failure."""

    @property
    def request(self) -> PolicyRequest: ...
    @property
    def candidates(self) -> list[PolicyCandidate]: ...
    def answer(self, scores: Sequence[float | None]) -> bool:
        """Answer with a score for each candidate, ``None`` where it is not to be taken.

        False when there are not as many, or one is not finite.
        """

    def fail(self, *, is_nonsense: bool = False) -> None:
        """There is no answer: the policy failed, or what it said is none."""

@final
class PolicyRequest:
    """A request, as a policy sees it."""

    @property
    def model(self) -> str: ...
    @property
    def isl_tokens(self) -> int:
        """Length of the prompt in tokens; guessed where they are not known."""

    @property
    def block_size(self) -> int:
        """Tokens in a block; 0 while unknown."""

    @property
    def prompt(self) -> bytes:
        """Its text in UTF-8, without the JSON around it; of token ids four bytes each."""

    @property
    def token_ids(self) -> list[int]:
        """The model's own tokens, a new list each time; empty while unknown."""

    @property
    def user(self) -> str | None: ...
    @property
    def session_key(self) -> str | None: ...
    @property
    def session_worker(self) -> tuple[int, int] | None:
        """The worker and rank that the client names."""

@final
class PolicyCandidate:
    """A worker that may take a request."""

    @property
    def index(self) -> int:
        """Its place among the candidates."""

    @property
    def worker_id(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that it holds, or soon will."""

    @property
    def predicted_blocks(self) -> int:
        """How many of these it does not hold yet."""

    @property
    def active_requests(self) -> int: ...
    @property
    def active_blocks(self) -> int:
        """Distinct blocks in use."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be prefilled there."""

    @property
    def cost(self) -> float:
        """What the request would cost there, as the policy ``kv`` reckons."""

    @property
    def metrics(self) -> dict[str, float]:
        """What its engine reports of itself: running_requests, gpu_kv_usage and others."""

@final
class PolicyEnded:
    """A request that has ended, and what it used."""

    @property
    def model(self) -> str: ...
    @property
    def user(self) -> str | None: ...
    @property
    def worker_id(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def duration_s(self) -> float:
        """From the decision to the end."""

@final
class RouterBooking:
    """A request that was given to a worker.

    Its load is freed by :meth:`free`, and with the object at the latest. All calls are cheap, and
    harmless after the load is gone: freed, expired, or with its worker.
    """

    @property
    def worker_id(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that the worker holds."""

    def first_token(self) -> None:
        """The first token came: the prompt is prefilled. Again it is activity."""

    def touch(self) -> None:
        """Something came: the request is alive."""

    def generated(self, tokens: int) -> None:
        """So many tokens were generated up to now; counts their blocks where these count."""

    def cached(self, tokens: int) -> None:
        """The engine says how many tokens of the prompt it reused; for :meth:`RouterCore.why`."""

    def used(
        self,
        *,
        input_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """What the engine says was used, for policies; the last word on each figure counts."""

    def free(self, *, is_complete: bool = False) -> None:
        """Give the load back; ``is_complete``: its answer came to its end."""

@final
class Decider:
    """Books requests for an event loop: at once, or when a worker has room to prefill.

    ``options`` are those of :class:`RouterCore`, and ``model_name`` where a router serves several.
    """

    def query(
        self, token_ids: _Integers, options: dict[str, Any] | None = None
    ) -> tuple[int, int, int, int]:
        """Which worker would be selected now; see :meth:`RouterCore.query`."""

    def enter(
        self,
        token_ids: _Integers,
        options: dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
    ) -> RouterBooking | RouterWait:
        """Book a request as :meth:`RouterCore.book` does.

        Returns:
            A place in the line, with ``router_queue_threshold`` and where every worker that may
            take the request has more to prefill than that.

        Raises:
            OverloadedError: As many wait as may, too.
        """

    @property
    def wake_fd(self) -> int:
        """A socket, readable while :meth:`called` has something."""

    def called(self) -> list[int]:
        """Numbers of those in the line whose turn it is to try; each call of one is told once."""

@final
class RouterWait:
    """A request in the line of those that no worker has room to prefill.

    It leaves with :meth:`leave`, and with the object at the latest; nothing is booked then.
    """

    @property
    def number(self) -> int:
        """What :meth:`Decider.called` names it by."""

    def try_again(self) -> RouterBooking | None:
        """Book it where there is room by now; to be called when it is called.

        Returns:
            None while there is none: it goes on waiting, and the next one is called.

        Raises:
            KvflashError: As :meth:`RouterCore.book`; it has left the line then.
            ClosedError: It waits no more.
        """

    def expire(self) -> BaseException:
        """Leave, because it took too long: the AllBusyError to raise."""

    def leave(self) -> None:
        """Leave the line. Again, or after :meth:`try_again` has booked, it does nothing."""

@final
class Router:
    """The routing decision as an HTTP service in this process; docs/router.md is its manual."""

    def __new__(
        cls,
        *,
        policy: str | None = None,
        policy_desk: PolicyDesk | None = None,
        policy_profile: str | None = None,
        shadow_policies: Sequence[str] = ...,
        overlap_score_weight: float = 1.0,
        temperature: float = 0.0,
        block_size: int | None = None,
        track_active_blocks: bool = True,
        assume_kv_reuse: bool = True,
        track_prefill_tokens: bool = True,
        active_request_expiry_s: float = 300.0,
        seed: int | None = None,
        use_kv_events: bool = True,
        predicted_ttl_s: float = 5.0,
        router_ttl_s: float = 120.0,
        router_max_tree_size: int = 1_048_576,
        router_prune_target_ratio: float = 0.8,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        decision_journal_bytes: int = 16_777_216,
        log_decisions: bool = False,
        threads: int = 2,
        max_body_bytes: int = 8_388_608,
        max_requests: int = 65_536,
        max_workers: int = 4_096,
        max_blocks: int = 33_554_432,
        index_memory_bytes: int = 0,
        min_initial_workers: int = 0,
        serve_indexer: bool = False,
        remote_indexer: str | None = None,
        remote_indexer_deadline_s: float = 0.05,
        body_timeout_s: float = 60.0,
        drain_timeout_s: float = 5.0,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        active_request_weight: float = 0.0,
        router_queue_threshold: float | None = None,
        router_queue_policy: str = "fcfs",
        router_queue_limit: int = 1_024,
        router_queue_timeout_s: float = 60.0,
        router_queue_batched_tokens: int = 10_000_000,
        track_output_blocks: bool = False,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        prefill_tokens_per_s: float | Literal["auto"] | None = None,
        session_affinity_ttl_s: int | None = None,
        tls_cert_path: str | os.PathLike[str] | None = None,
        tls_key_path: str | os.PathLike[str] | None = None,
        metrics_prefix: str = "kvflash",
    ) -> Router:
        """Make a service that does not listen yet, without workers.

        Raises:
            ConfigError: A setting that can't work, by its flag.
        """

    @property
    def bookings(self) -> Bookings:
        """What it tells replicas, and what they tell it."""

    @property
    def catalog(self) -> Catalog: ...
    def set_more_metrics(self, text: str) -> None:
        """What ``/metrics`` tells besides its own: lines of the OpenMetrics text format."""

    def set_warnings(self, warnings: list[str]) -> None:
        """What only the caller knows, for ``/health``; replaces others."""

    def set_remote_indexer(self, url: str | None) -> None:
        """Ask this indexer from now on; none while there is None. Where it was not named at first.

        Raises:
            ConfigError: It is no ``http://host:port``.
        """

    def worker_changes(self) -> int:
        """How often a worker was registered or forgotten. Cost: O(1)."""

    def registered(self) -> list[tuple[int, str, str, str | None, int]]:
        """The workers that are registered now.

        Returns:
            ``(worker_id, model_name, tenant_id, url, joined)``, by model; ``joined`` is another
            number when a worker comes again.

        Cost: O(workers); releases the GIL.
        """

    def start(self, host: str, port: int) -> int:
        """Bind and serve in the background. Returns the bound port.

        Raises:
            ConfigError: The address can't be bound.
        """

    @property
    def decider(self) -> Decider:
        """The same decisions for an event loop of this process; a new one each time."""

    def call(self, method: str, path: str, body: Buffer) -> bytes:
        """Ask a route without HTTP between: the answer as JSON.

        Works before the start, too, and until the stop. Releases the GIL; blocks as long as the
        route takes, with a remote indexer up to its deadline.

        Args:
            method: Such as ``"POST"``.
            path: Such as ``"/reserve"``.
            body: JSON; empty for none.

        Raises:
            InvalidArgumentError: No method or no path, or what HTTP answers with 400.
            KvflashError: What HTTP answers with another status, by its cause.
            ClosedError: It is stopped.
        """

    def stop(self) -> None:
        """Stop serving; open calls get the drain time. Blocks until done."""

@final
class Bookings:
    """This router's bookings as replicas are to hear of them, and theirs as they count here.

    ``RouterCore.bookings`` and ``Frontend.bookings`` are one, for all models. A request is named
    by its router; an instance and rank say where it went.

    Consistency: every decision sees what returned before it. A booking of another router counts
    like one's own (blocks shared with one's own count once), but not against the limit of
    requests, until it is freed, its worker or router leaves, or it was idle for the expiry time.
    """

    def turn_on(self, *, waiting_max: int = 100_000) -> None:
        """Keep what is booked from now on, for :meth:`take`.

        Args:
            waiting_max: Bookings that may wait; at the limit new ones are not told, and counted.

        Raises:
            InvalidArgumentError: 0.
        """

    def take(self, timeout_s: float, limit: int = 1_000) -> list[tuple[object, ...]]:
        """What happened, in order; empty after ``timeout_s``. Releases the GIL.

        Returns:
            ``("add", name, (instance id, dp rank), sequence hashes or None, isl, overlap)``,
            ``("prefilled", name)`` or ``("free", name)``.

        Raises:
            ConfigError: A negative time.
        """

    def remote_add(
        self,
        router_id: int,
        request_id: str,
        worker: tuple[int, int],
        hashes: list[int] | None,
        isl: int,
        overlap: int,
    ) -> bool:
        """Another router has booked a request; again it changes nothing.

        Returns:
            False when it does not count: the worker is not known here, or a limit (1,024 routers,
            1,048,576 requests of a model) is reached.

        Cost: O(blocks).
        """

    def remote_prefilled(self, router_id: int, request_id: str) -> bool:
        """Its prompt is computed; False when it is not known."""

    def remote_free(self, router_id: int, request_id: str) -> bool:
        """It has ended; False when it is not known."""

    def remote_drop_router(self, router_id: int) -> int:
        """A router is gone with its requests; how many."""

    def remote_heard(self, router_id: int) -> None:
        """A router says that its requests are active: they do not expire."""

    def stats(self) -> dict[str, int]:
        """Counters.

        Returns:
            remote_requests, remote_refused_total (at a limit), remote_ignored_total (of workers
            that are not known here), waiting (to be taken), dropped_total (not told).
        """

@final
class RouterCore:
    """Chooses workers for prompts, and keeps account of who is busy with what.

    What :class:`kvflash.routing.KvPushRouter` decides with; it opens no socket. Several may live in
    one process. ``options`` of a call is a dict with any of ``overlap_score_weight``,
    ``overlap_score_credit``, ``prefill_load_scale``,
    ``router_temperature``, ``assume_kv_reuse``, ``worker_id``, ``dp_rank``, ``allowed_worker_ids``,
    ``lora_name``, ``lora_path``, ``cache_salt``, ``mm`` and ``embeds`` (as for
    compute_block_hash_for_seq), ``user``, ``prompt`` (its text, for policies),
    ``session_key`` and ``session_worker`` (id and rank), ``priority``, ``strict_priority``,
    ``expected_output_tokens``; ``None`` is as good as absent, an unknown name is refused.

    Raises:
        ConfigError: A setting out of range, or a policy that is not known, by name.
        InvalidArgumentError: A block size of 0, or a threshold out of range, by name.

    Cost: O(tokens) to hash, O(blocks + workers) to decide; microseconds. Prompts of more than 8,192
    tokens release the GIL, and so does every call that asks a policy in Python: it waits for that
    one's deadline at most.
    """

    def __new__(
        cls,
        *,
        block_size: int,
        model_name: str = "default",
        tenant_id: str = "default",
        policy: str | None = None,
        policy_desk: PolicyDesk | None = None,
        policy_profile: str | None = None,
        shadow_policies: Sequence[str] = ...,
        overlap_score_weight: float = 1.0,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        track_active_blocks: bool = True,
        assume_kv_reuse: bool = True,
        track_prefill_tokens: bool = True,
        active_request_expiry_s: float = 300.0,
        predicted_ttl_s: float = 5.0,
        router_ttl_s: float = 120.0,
        router_max_tree_size: int = 1_048_576,
        router_prune_target_ratio: float = 0.8,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        max_requests: int = 65_536,
        min_initial_workers: int = 0,
        max_blocks: int = 33_554_432,
        index_memory_bytes: int = 0,
        decision_journal_bytes: int = 16_777_216,
        log_decisions: bool = False,
        seed: int | None = None,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        active_request_weight: float = 0.0,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        prefill_tokens_per_s: float | Literal["auto"] | None = None,
        session_affinity_ttl_s: int | None = None,
        router_queue_threshold: float | None = None,
        router_queue_policy: str = "fcfs",
        router_queue_limit: int = 1_024,
        router_queue_timeout_s: float = 60.0,
        router_queue_batched_tokens: int = 10_000_000,
        track_output_blocks: bool = False,
    ) -> RouterCore: ...
    @property
    def bookings(self) -> Bookings:
        """What it tells replicas, and what they tell it."""

    @property
    def catalog(self) -> Catalog:
        """Where the transport finds its orders and brings its frames."""

    @property
    def block_size(self) -> int: ...
    @property
    def policy(self) -> str:
        """The name of the policy that chooses."""

    def policy_samples(self) -> list[tuple[str, str, str, float]]:
        """What policies and shadows count: name, label, its value, and the figure.

        Names are without the program's prefix; those of counters end in ``_total``.
        """

    @property
    def uses_events(self) -> bool:
        """Whether events can change a decision: they are on, and overlap weighs something."""

    def set_workers(self, workers: Sequence[tuple[int, int]]) -> None:
        """Make these (instance, rank) the workers; what is known of others is forgotten.

        Raises:
            OverloadedError: More than 65,535; nothing changes then.
        """

    def subscribe(
        self, worker_id: int, dp_rank: int, endpoint: str, replay_endpoint: str | None = None
    ) -> None:
        """Listen to the KV events of a rank.

        Raises:
            ConflictError: It is listened to already.
            InvalidArgumentError: A bad address.
        """

    def unsubscribe(self, worker_id: int, dp_rank: int) -> bool:
        """Listen no more; its blocks are forgotten. False when nobody listened."""

    def report(
        self,
        worker_id: int,
        dp_rank: int = 0,
        *,
        kv_used_blocks: int | None = None,
        active_decode_blocks: int | None = None,
        active_prefill_tokens: int | None = None,
        kv_total_blocks: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> bool:
        """Note what a rank says of itself; ``None`` leaves what it said before.

        Returns:
            False when it is no worker: nothing is kept then.
        """

    def report_metrics(self, worker_id: int, dp_rank: int, metrics: dict[str, float]) -> bool:
        """Tell what an engine reports of itself, for policies; what is left out stays as it was.

        Returns:
            Whether the worker is there.

        Raises:
            InvalidArgumentError: An unknown figure, or one out of range, by name.
        """

    def busy_workers(self) -> list[int]:
        """Instances that are busy by the thresholds in force, ascending."""

    def set_busy_thresholds(
        self,
        *,
        active_decode_blocks_threshold: float | None,
        active_prefill_tokens_threshold: int | None,
        active_prefill_tokens_threshold_frac: float | None,
    ) -> None:
        """Put other thresholds in force; ``None`` unsets.

        Raises:
            InvalidArgumentError: One is out of range, by name.
        """

    def query(
        self, token_ids: _Integers, options: dict[str, Any] | None = None
    ) -> tuple[int, int, int, int]:
        """Which worker would be selected now, drawn anew where chance decides; nothing changes.

        Returns:
            Instance, rank, leading blocks of the prompt that it holds, and the seed of the draw:
            as the option ``seed`` it repeats the choice.

        Raises:
            NoWorkerError: None is there or allowed, or the pinned one is not there.
            AllBusyError: All of these are busy.
            InvalidArgumentError: An empty prompt, or an option that can't be.
        """

    def reserve(
        self, token_ids: _Integers, request_id: str, options: dict[str, Any] | None = None
    ) -> tuple[int, int, int, int]:
        """As :meth:`query`, and book it under ``request_id`` until :meth:`free`.

        Raises:
            ConflictError: A request of that name is active.
            OverloadedError: ``max_requests`` are active.
        """

    def book(
        self,
        token_ids: _Integers,
        options: dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
    ) -> RouterBooking:
        """As :meth:`query`, and book it; ``request_id`` is its name for :meth:`why` only."""

    @property
    def decider(self) -> Decider:
        """What books requests for an event loop; a new one each time."""

    def queue_stats(self) -> dict[str, int]:
        """Who waits, ``pending`` and ``pending_isl_tokens``, and what became of the others.

        That is ``placed``, ``refused``, ``expired``, ``failed`` and ``left``, each with ``_total``.
        """

    def mark_prefill_complete(self, request_id: str) -> None:
        """The prompt of a reserved request is prefilled.

        Raises:
            NotFoundError: No request of that name is active.
        """

    def touch(self, request_id: str) -> bool:
        """Something was heard of a reserved request. False when it is not active."""

    def free(
        self,
        request_id: str,
        *,
        input_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> bool:
        """A reserved request has ended. False when it was not active, which is no error."""

    def potential_loads(
        self, token_ids: _Integers, options: dict[str, Any] | None = None
    ) -> list[dict[str, int]]:
        """What the prompt would make of each worker's load; nothing changes.

        Returns:
            For each: worker_id, dp_rank, potential_prefill_tokens, potential_decode_blocks,
            active_requests, overlap_blocks.
        """

    def explain(self, token_ids: _Integers, options: dict[str, Any] | None = None) -> str:
        """The decision that would be made now, with every candidate's terms; JSON."""

    def why(self, request_id: str) -> str:
        """The decisions that were made for a request, and what became of it; a JSON list.

        Raises:
            NotFoundError: None is kept.
        """

    def dump_events(self) -> str:
        """Everything the index holds, as a JSON list of router events."""

    def totals(self) -> dict[str, int]:
        """Sums over all workers.

        Returns:
            workers, requests, prefill_tokens, blocks, reserved, predicted_blocks.
        """

    def tick(self) -> int:
        """Let go of what is too old. Returns how many bookings expired. Call it every second."""

@final
class FoundWorkers:
    """Engines whose events a catalog follows though nobody registers them."""

    def __new__(
        cls,
        catalog: Catalog,
        *,
        model_name: str,
        tenant_id: str = "default",
        block_size: int | None = None,
        max_workers: int = 4_096,
    ) -> FoundWorkers:
        """None yet.

        Args:
            catalog: Where events go.
            model_name: What engines serve that are known by their address alone.
            tenant_id: Their tenant; those that only prefill have ``prefill``.
            block_size: Tokens in a block of theirs; None: as their events say.
            max_workers: Limit of workers.
        """

    def add_worker(self, spec: str) -> int:
        """Follow an engine, ``URL[,events=...][,replay=...][,id=N][,dp=N][,role=...]``; its number.

        Raises:
            ConfigError: Names the field, what is legal and what came.
            ConflictError: The number is taken, or another block size than the model's.
            OverloadedError: The limit is reached.
        """

    def put_worker(self, worker: str) -> int:
        """Follow a worker of discovery, or what has changed of it; its number.

        Args:
            worker: As :meth:`Frontend.put_worker` takes it.

        Raises:
            ConfigError: Names the field, what is legal and what came.
            ConflictError: Another block size than the model's.
            OverloadedError: The limit is reached.
        """

    def remove_worker(self, instance_id: int) -> None:
        """Follow it no more, and forget what it holds.

        Raises:
            NotFoundError: It is not followed.
        """

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
        peers: Sequence[str] = ...,
        min_initial_workers: int = 0,
        test_endpoints: bool = False,
        drain_timeout_s: float = 5.0,
        metrics_prefix: str = "kvflash",
    ) -> Indexer:
        """Make a service that does not listen yet.

        Args:
            threads: Threads that serve.
            max_body_bytes: Largest request body.
            max_blocks: Blocks that one index may hold; 0 = no limit.
            index_memory_bytes: Memory that one index may occupy, bytes; 0 = no limit.
            peers: Peers to recover from, ``http://host:port``: the first healthy one serves.
                Engines are not read before that is over.
            min_initial_workers: Workers that must have registered before GET /ready says so.
            test_endpoints: Serve POST /test/pause_listener and /test/resume_listener.
            drain_timeout_s: Time that open requests get at the stop, seconds.
            metrics_prefix: What the names in GET /metrics begin with.
        """

    @property
    def catalog(self) -> Catalog: ...
    def start(self, host: str, port: int) -> int:
        """Bind and serve in the background. Returns the bound port.

        Raises:
            ConfigError: The address can't be bound, or metrics_prefix begins no name.
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
        lora_name: str | None = None,
        additional_salt: str | None = None,
        capacity_blocks: int | None = None,
        attention_chunk_size: int | None = None,
        offload_chunk: int | None = None,
    ) -> None:
        """Register a publisher, as POST /register does.

        Args:
            instance_id: The engine's number, u64.
            endpoint: Where it publishes: ``tcp://host:port``, ``ipc://path`` or ``inproc://name``.
            model_name: Model that it serves.
            block_size: Tokens in a block of its, at least 1.
            tenant_id: Tenant of the model.
            dp_rank: Data parallel rank, u32.
            replay_endpoint: Where it replays; None if it does not.
            lora_name: Adapter of events and queries that name none.
            additional_salt: Salt of events and queries that name none.
            capacity_blocks: Blocks that the device of a rank has, at least 1.
            attention_chunk_size: Tokens of a chunk of the engine's chunked local attention, at
                least 1. Without it a prefix counts only where all its chunks are held.
            offload_chunk: Tokens that the engine copies to a farther tier at once; a multiple of
                block_size. Without it, the most tokens that one event named there.

        Raises:
            ConflictError: Registered already, or another block size, adapter or salt than the
                index's.
            InvalidArgumentError: Block size or capacity below 1, an endpoint that is none, no
                model name, or a chunk out of range; names the field.
            OverloadedError: The limit of publishers or models is reached.
        """

    def unregister(
        self,
        instance_id: int,
        *,
        model_name: str,
        tenant_id: str | None = None,
        dp_rank: int | None = None,
    ) -> None:
        """Remove an instance or one rank of it, as POST /unregister does.

        Raises:
            NotFoundError: Nothing fits.
        """

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
    ) -> bytes:
        """The answer of POST /query, as JSON.

        Args:
            token_ids: Tokens of the prompt, u32; shape [tokens].
            model_name: Model to ask about.
            tenant_id: Its tenant.
            lora_name: Adapter; None = the index's, "" = none.
            lora_path: Path of the adapter as the engine was given it.
            cache_salt: Salt; None = the index's, "" = none.
            mm: Multimodal items, as for compute_block_hash_for_seq; shape [items].
            embeds: Digests of the prompt's embeddings, as there; shape [blocks].

        Raises:
            InvalidArgumentError: A token outside u32, by index, or a wrong item or digest, by index
                and field.
            NotFoundError: Unknown model and tenant.
        """

    def stop(self) -> None:
        """Stop serving; open requests get the drain time. Blocks until done."""

@final
class Frontend:
    """The OpenAI-compatible frontend in this process."""

    def __new__(
        cls,
        *,
        policy: str | None = None,
        policy_desk: PolicyDesk | None = None,
        policy_profile: str | None = None,
        shadow_policies: Sequence[str] = ...,
        overlap_score_weight: float = 1.0,
        temperature: float = 0.0,
        kv_cache_block_size: int | None = None,
        track_active_blocks: bool = True,
        assume_kv_reuse: bool = True,
        active_request_expiry_s: float = 300.0,
        seed: int | None = None,
        use_kv_events: bool = True,
        predicted_ttl_s: float = 5.0,
        router_ttl_s: float = 120.0,
        router_max_tree_size: int = 1_048_576,
        router_prune_target_ratio: float = 0.8,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        decision_journal_bytes: int = 16_777_216,
        log_decisions: bool = False,
        serve_indexer: bool = False,
        remote_indexer: str | None = None,
        remote_indexer_deadline_s: float = 0.05,
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
        stream_idle_timeout_s: float = 300.0,
        health_interval_s: float = 2.0,
        drain_timeout_s: float = 30.0,
        enforce_disagg: str = "off",
        waits_for: str = "",
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        active_request_weight: float = 0.0,
        track_prefill_tokens: bool = True,
        min_initial_workers: int = 0,
        fairness: str | None = None,
        fairness_weights: Sequence[tuple[str, float]] = ...,
        fairness_queue_limit: int = 1_024,
        fairness_queue_timeout_s: float = 60.0,
        fairness_max_running: int = 256,
        fairness_cached_share: float = 0.0,
        router_queue_threshold: float | None = None,
        router_queue_policy: str = "fcfs",
        router_queue_limit: int = 1_024,
        router_queue_timeout_s: float = 60.0,
        router_queue_batched_tokens: int = 10_000_000,
        track_output_blocks: bool = False,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        prefill_tokens_per_s: float | Literal["auto"] | None = None,
        session_affinity_ttl_s: int | None = None,
        tls_cert_path: str | os.PathLike[str] | None = None,
        tls_key_path: str | os.PathLike[str] | None = None,
        metrics_prefix: str = "kvflash",
        has_broker_events: bool = False,
    ) -> Frontend: ...
    @property
    def bookings(self) -> Bookings:
        """What it tells replicas, and what they tell it."""

    def set_more_metrics(self, text: str) -> None:
        """What ``/metrics`` tells besides its own: lines of the OpenMetrics text format."""

    @property
    def catalog(self) -> Catalog: ...
    def set_warnings(self, warnings: list[str]) -> None:
        """What makes matching fail and only the caller knows, for ``/health``; replaces others."""

    def set_remote_indexer(self, url: str | None) -> None:
        """Ask this indexer from now on; none while there is None. Where it was not named at first.

        Raises:
            ConfigError: It is no ``http://host:port``.
        """

    @staticmethod
    def check_worker(spec: str) -> None:
        """Check a spec as :meth:`add_worker` takes it; nothing is added.

        Raises:
            ConfigError: A bad spec; names the field, what is legal and what came.
        """

    def add_worker(self, spec: str) -> int:
        """Add an engine: ``URL[,events=tcp://...][,replay=tcp://...][,id=N][,dp=N][,role=prefill|decode]``.

        Returns:
            Its instance id.

        Raises:
            ConfigError: A bad spec.
            ConflictError: The id or address is there already.
        """

    def put_worker(self, worker: str) -> int:
        """Add a worker of the runtime, or change it.

        Args:
            worker: JSON: ``{"id", "plane": {"kind": "tcp", "address"} | {"kind": "http", "url"},
                "endpoint": "namespace/component/endpoint", "card": the model card, "events":
                {dp rank: {"endpoint", "replay_endpoint"}}}``. An endpoint ``nats://`` is subscribed
                to, and a stream's ``jetstream://`` heard by its follower, with has_broker_events
                only. The same worker with other events keeps its connections and load; with
                another card or address it is a new one.

        Returns:
            Its instance id.

        Raises:
            ConfigError: Names the field at fault or the tokenizer's file.
            ConflictError: The id belongs to an engine that was added by hand.
            OverloadedError: The limit of workers or tokenizers is reached.

        Cost: the first worker of a model loads its tokenizer, up to seconds; releases the GIL.
        """

    def remove_worker(self, instance_id: int) -> None:
        """Remove a worker: no new requests, its blocks are forgotten; requests in flight go on.

        Raises:
            NotFoundError: There is none.
        """

    def report_load(self, report: str) -> None:
        """Take a runtime worker's own report of its load.

        Args:
            report: JSON: ``{"id", "dp_rank", "kv_used_blocks", "kv_total_blocks",
                "active_decode_blocks", "active_prefill_tokens"}``; what is missing is not known.

        Raises:
            ConfigError: Names the field at fault.
            NotFoundError: No such worker.
        """

    def start(self, host: str, port: int) -> int:
        """Bind and serve in the background. Returns the bound port.

        Raises:
            ConfigError: The address can't be bound.
        """

    def stop(self) -> None:
        """Stop serving; open requests get the drain time. Blocks until done."""
