"""kvflash: a KV-cache-aware router for LLM engines."""

from kvflash._core import (
    ApproxKvIndexer,
    KvIndexer,
    OverlapScores,
    RadixTree,
    Tokenizer,
    compute_block_hash_array,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
)
from kvflash.errors import (
    AllBusyError,
    ClosedError,
    ConfigError,
    ConflictError,
    DecodeError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
)

__all__ = [
    "AllBusyError",
    "ApproxKvIndexer",
    "ClosedError",
    "ConfigError",
    "ConflictError",
    "DecodeError",
    "InvalidArgumentError",
    "KvIndexer",
    "KvflashError",
    "NoWorkerError",
    "NotFoundError",
    "OverlapScores",
    "OverloadedError",
    "RadixTree",
    "Tokenizer",
    "TransportError",
    "compute_block_hash_array",
    "compute_block_hash_for_seq",
    "compute_sequence_hashes",
]
