"""Discovery: keys by which processes find each other, deleted when their process ends."""

from kvflash.discovery.base import Delete, Discovery, Lease, Put, Synced, Watch
from kvflash.discovery.file import FileDiscovery
from kvflash.discovery.memory import MemoryDiscovery
from kvflash.discovery.opening import open_discovery

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
