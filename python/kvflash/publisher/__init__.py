"""What an engine tells a router: its KV cache events, and how loaded it is."""

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
