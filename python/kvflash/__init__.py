"""kvflash: a KV-cache-aware router for LLM engines."""

from typing import TYPE_CHECKING

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
    DeadlineError,
    DecodeError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
    WorkerError,
)
from kvflash.lazy import lazy_names

if TYPE_CHECKING:
    from kvflash.llm import (
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        register_llm,
        unregister_llm,
    )
    from kvflash.runtime import (
        Client,
        Component,
        Context,
        DistributedRuntime,
        Endpoint,
        Namespace,
        RuntimeLimits,
        Stream,
        kvflash_worker,
    )

# Imported when they are asked for: `import kvflash` stays light.
__getattr__ = lazy_names(
    __name__,
    {
        "Client": "kvflash.runtime",
        "Component": "kvflash.runtime",
        "Context": "kvflash.runtime",
        "DistributedRuntime": "kvflash.runtime",
        "Endpoint": "kvflash.runtime",
        "ModelInput": "kvflash.llm",
        "ModelRuntimeConfig": "kvflash.llm",
        "ModelType": "kvflash.llm",
        "Namespace": "kvflash.runtime",
        "RuntimeLimits": "kvflash.runtime",
        "Stream": "kvflash.runtime",
        "kvflash_worker": "kvflash.runtime",
        "register_llm": "kvflash.llm",
        "unregister_llm": "kvflash.llm",
    },
)

__all__ = [
    "AllBusyError",
    "ApproxKvIndexer",
    "Client",
    "ClosedError",
    "Component",
    "ConfigError",
    "ConflictError",
    "Context",
    "DeadlineError",
    "DecodeError",
    "DistributedRuntime",
    "Endpoint",
    "InvalidArgumentError",
    "KvIndexer",
    "KvflashError",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "Namespace",
    "NoWorkerError",
    "NotFoundError",
    "OverlapScores",
    "OverloadedError",
    "RadixTree",
    "RuntimeLimits",
    "Stream",
    "Tokenizer",
    "TransportError",
    "WorkerError",
    "compute_block_hash_array",
    "compute_block_hash_for_seq",
    "compute_sequence_hashes",
    "kvflash_worker",
    "register_llm",
    "unregister_llm",
]
