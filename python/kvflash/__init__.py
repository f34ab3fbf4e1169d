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
    DrainingError,
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
    from kvflash.llm import ModelInput, ModelRuntimeConfig, ModelType, register_llm, unregister_llm
    from kvflash.policy import Policy, PolicyCandidate, PolicyEnded, PolicyRequest
    from kvflash.publisher import (
        ForwardPassMetrics,
        KvEventPublisher,
        KvStats,
        SpecDecodeStats,
        WorkerMetricsPublisher,
        WorkerStats,
        ZmqKvEventListener,
        ZmqKvEventPublisher,
        ZmqKvEventPublisherConfig,
    )
    from kvflash.routing.config import KvRouterConfig
    from kvflash.routing.router import KvPushRouter
    from kvflash.routing.stream import RoutedStream
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
    from kvflash.version import __version__ as __version__
else:
    # Imported on first use, so that `import kvflash` stays light.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvflash.llm": "ModelInput ModelRuntimeConfig ModelType register_llm unregister_llm",
            "kvflash.policy": "Policy PolicyCandidate PolicyEnded PolicyRequest",
            "kvflash.publisher": (
                "ForwardPassMetrics KvEventPublisher KvStats SpecDecodeStats "
                "WorkerMetricsPublisher WorkerStats ZmqKvEventListener ZmqKvEventPublisher "
                "ZmqKvEventPublisherConfig"
            ),
            "kvflash.routing.config": "KvRouterConfig",
            "kvflash.routing.router": "KvPushRouter",
            "kvflash.routing.stream": "RoutedStream",
            "kvflash.runtime": (
                "Client Component Context DistributedRuntime Endpoint Namespace RuntimeLimits "
                "Stream kvflash_worker"
            ),
            "kvflash.version": "__version__",
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
    "DrainingError",
    "Endpoint",
    "ForwardPassMetrics",
    "InvalidArgumentError",
    "KvEventPublisher",
    "KvIndexer",
    "KvPushRouter",
    "KvRouterConfig",
    "KvStats",
    "KvflashError",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "Namespace",
    "NoWorkerError",
    "NotFoundError",
    "OverlapScores",
    "OverloadedError",
    "Policy",
    "PolicyCandidate",
    "PolicyEnded",
    "PolicyRequest",
    "RadixTree",
    "RoutedStream",
    "RuntimeLimits",
    "SpecDecodeStats",
    "Stream",
    "Tokenizer",
    "TransportError",
    "WorkerError",
    "WorkerMetricsPublisher",
    "WorkerStats",
    "ZmqKvEventListener",
    "ZmqKvEventPublisher",
    "ZmqKvEventPublisherConfig",
    "compute_block_hash_array",
    "compute_block_hash_for_seq",
    "compute_sequence_hashes",
    "kvflash_worker",
    "register_llm",
    "unregister_llm",
]
