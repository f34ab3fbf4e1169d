"""Discovery: keys by which processes find each other, deleted when their process ends."""

from typing import TYPE_CHECKING

from kvflash.discovery.opening import open_discovery
from kvflash.lazy import lazy_names

if TYPE_CHECKING:
    from kvflash.discovery.base import Delete, Discovery, Lease, Put, Synced, Watch
    from kvflash.discovery.file import FileDiscovery
    from kvflash.discovery.memory import MemoryDiscovery
else:
    # Imported on first use: asyncio, for which a service without discovery need not wait.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvflash.discovery.base": "Delete Discovery Lease Put Synced Watch",
            "kvflash.discovery.file": "FileDiscovery",
            "kvflash.discovery.memory": "MemoryDiscovery",
        },
    )

__all__ = [
    "Delete",
    "Discovery",
    "FileDiscovery",
    "Lease",
    "MemoryDiscovery",
    "Put",
    "Synced",
    "Watch",
    "open_discovery",
]
