"""The runtime: processes that serve endpoints and call those of others."""

from kvflash.runtime.client import Client, Stream
from kvflash.runtime.component import Component, Endpoint, Namespace
from kvflash.runtime.context import Context
from kvflash.runtime.distributed import DistributedRuntime, kvflash_worker
from kvflash.runtime.limits import RuntimeLimits

__all__ = [
    "Client",
    "Component",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "Namespace",
    "RuntimeLimits",
    "Stream",
    "kvflash_worker",
]
