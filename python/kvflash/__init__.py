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
from kvflash.lazy import lazy_dir, lazy_names

if TYPE_CHECKING:
    from kvflash.llm import (
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        register_llm,
        unregister_llm,
    )
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
    __getattr__ = lazy_names(
        __name__,
        {
            "__version__": "kvflash.version",
            "Client": "kvflash.runtime",
            "Component": "kvflash.runtime",
            "Context": "kvflash.runtime",
            "DistributedRuntime": "kvflash.runtime",
            "Endpoint": "kvflash.runtime",
            "ForwardPassMetrics": "kvflash.publisher",
            "KvEventPublisher": "kvflash.publisher",
            "KvStats": "kvflash.publisher",
            "KvPushRouter": "kvflash.routing.router",
            "KvRouterConfig": "kvflash.routing.config",
            "ModelInput": "kvflash.llm",
            "ModelRuntimeConfig": "kvflash.llm",
            "ModelType": "kvflash.llm",
            "Namespace": "kvflash.runtime",
            "Policy": "kvflash.policy",
            "PolicyCandidate": "kvflash.policy",
            "PolicyEnded": "kvflash.policy",
            "PolicyRequest": "kvflash.policy",
            "RoutedStream": "kvflash.routing.stream",
            "RuntimeLimits": "kvflash.runtime",
            "SpecDecodeStats": "kvflash.publisher",
            "Stream": "kvflash.runtime",
            "WorkerMetricsPublisher": "kvflash.publisher",
            "WorkerStats": "kvflash.publisher",
            "ZmqKvEventListener": "kvflash.publisher",
            "ZmqKvEventPublisher": "kvflash.publisher",
            "ZmqKvEventPublisherConfig": "kvflash.publisher",
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

__dir__ = lazy_dir(__name__, (*__all__, "__version__"))
