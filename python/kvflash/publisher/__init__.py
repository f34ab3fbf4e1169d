"""What an engine tells a router: its KV cache events, and how loaded it is."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_names

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
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvflash.publisher.kv_events": (
                "KvEventPublisher ZmqKvEventPublisher ZmqKvEventPublisherConfig"
            ),
            "kvflash.publisher.listener": "ZmqKvEventListener",
            "kvflash.publisher.load": (
                "ForwardPassMetrics KvStats SpecDecodeStats WorkerMetricsPublisher WorkerStats"
            ),
            "kvflash.publisher.stream": "EventStream",
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
