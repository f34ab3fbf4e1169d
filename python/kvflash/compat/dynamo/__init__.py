"""Dynamo's Python names: ``python -m kvflash.compat.dynamo SCRIPT`` runs a script with them."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_dir, lazy_names

if TYPE_CHECKING:
    from kvflash.compat.dynamo.classes import (
        Client,
        DistributedRuntime,
        KvIndexer,
        KvPushRouter,
        KvRouterConfig,
        Matches,
        dynamo_worker,
    )
    from kvflash.compat.dynamo.modules import install
    from kvflash.compat.dynamo.run import main
else:
    # Imported on first use: a command does not need what only scripts need.
    __getattr__ = lazy_names(
        __name__,
        {
            "Client": "kvflash.compat.dynamo.classes",
            "DistributedRuntime": "kvflash.compat.dynamo.classes",
            "KvIndexer": "kvflash.compat.dynamo.classes",
            "KvPushRouter": "kvflash.compat.dynamo.classes",
            "KvRouterConfig": "kvflash.compat.dynamo.classes",
            "Matches": "kvflash.compat.dynamo.classes",
            "dynamo_worker": "kvflash.compat.dynamo.classes",
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
