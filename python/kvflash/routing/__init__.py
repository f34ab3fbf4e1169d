"""KV-aware routing inside your own process."""

from kvflash.routing.choice import BestWorker
from kvflash.routing.config import KvRouterConfig
from kvflash.routing.router import KvPushRouter
from kvflash.routing.stream import RoutedStream

__all__ = ["BestWorker", "KvPushRouter", "KvRouterConfig", "RoutedStream"]
