"""Dynamo's Python names: ``python -m kvflash.compat.dynamo SCRIPT`` runs a script with them."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_dir, lazy_names

if TYPE_CHECKING:
    from kvflash.compat.dynamo.client import Client, DistributedRuntime, dynamo_worker
    from kvflash.compat.dynamo.indexer import KvIndexer, Matches
    from kvflash.compat.dynamo.modules import install
    from kvflash.compat.dynamo.router import KvPushRouter, KvRouterConfig
    from kvflash.compat.dynamo.run import main
else:
    # Imported on first use: a command does not need what only scripts need.
    __getattr__ = lazy_names(
        __name__,
        {
            "Client": "kvflash.compat.dynamo.client",
            "DistributedRuntime": "kvflash.compat.dynamo.client",
            "KvIndexer": "kvflash.compat.dynamo.indexer",
            "KvPushRouter": "kvflash.compat.dynamo.router",
            "KvRouterConfig": "kvflash.compat.dynamo.router",
            "Matches": "kvflash.compat.dynamo.indexer",
            "dynamo_worker": "kvflash.compat.dynamo.client",
            "install": "kvflash.compat.dynamo.modules",
            "main": "kvflash.compat.dynamo.run",
        },
    )

__all__ = [
    "Client",
    "DistributedRuntime",
    "KvIndexer",
    "KvPushRouter",
    "KvRouterConfig",
    "Matches",
    "dynamo_worker",
    "install",
    "main",
]

__dir__ = lazy_dir(__name__, __all__)
