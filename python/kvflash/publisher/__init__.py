"""What an engine tells a router: its KV cache events, and how loaded it is."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_dir, lazy_names

if TYPE_CHECKING:
    from kvflash.publisher.kv_events import (
        KvEventPublisher,
        ZmqKvEventPublisher,
        ZmqKvEventPublisherConfig,
    )
    from kvflash.publisher.listener import ZmqKvEventListener
    from kvflash.publisher.load import (
        ForwardPassMetrics,
        KvStats,
        SpecDecodeStats,
        WorkerMetricsPublisher,
        WorkerStats,
    )
    from kvflash.publisher.stream import EventStream
else:
    # Imported on first use: a publisher of one kind need not wait for the packages of the others.
    __getattr__ = lazy_names(
        __name__,
        {
            "EventStream": "kvflash.publisher.stream",
            "ForwardPassMetrics": "kvflash.publisher.load",
            "KvEventPublisher": "kvflash.publisher.kv_events",
            "KvStats": "kvflash.publisher.load",
            "SpecDecodeStats": "kvflash.publisher.load",
            "WorkerMetricsPublisher": "kvflash.publisher.load",
            "WorkerStats": "kvflash.publisher.load",
            "ZmqKvEventListener": "kvflash.publisher.listener",
            "ZmqKvEventPublisher": "kvflash.publisher.kv_events",
            "ZmqKvEventPublisherConfig": "kvflash.publisher.kv_events",
        },
    )

__all__ = [
    "EventStream",
    "ForwardPassMetrics",
    "KvEventPublisher",
    "KvStats",
    "SpecDecodeStats",
    "WorkerMetricsPublisher",
    "WorkerStats",
    "ZmqKvEventListener",
    "ZmqKvEventPublisher",
    "ZmqKvEventPublisherConfig",
]

__dir__ = lazy_dir(__name__, __all__)
