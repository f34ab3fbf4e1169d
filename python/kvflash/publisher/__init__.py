"""What an engine tells a router: its KV cache events, and how loaded it is."""

from kvflash.publisher.kv_events import KvEventPublisher, ZmqKvEventPublisherConfig
from kvflash.publisher.stream import EventStream

__all__ = [
    "EventStream",
    "KvEventPublisher",
    "ZmqKvEventPublisherConfig",
]
