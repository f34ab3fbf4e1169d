"""KV-aware routing inside your own process."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_dir, lazy_names

if TYPE_CHECKING:
    from kvflash.routing.choice import BestWorker
    from kvflash.routing.config import KvRouterConfig
    from kvflash.routing.router import KvPushRouter
    from kvflash.routing.stream import RoutedStream
else:
    # Imported on first use: services need only what their replicas share.
    __getattr__ = lazy_names(
        __name__,
        {
            "BestWorker": "kvflash.routing.choice",
            "KvPushRouter": "kvflash.routing.router",
            "KvRouterConfig": "kvflash.routing.config",
            "RoutedStream": "kvflash.routing.stream",
        },
    )

__all__ = ["BestWorker", "KvPushRouter", "KvRouterConfig", "RoutedStream"]

__dir__ = lazy_dir(__name__, __all__)
