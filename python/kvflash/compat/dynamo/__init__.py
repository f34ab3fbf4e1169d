"""Dynamo's Python names: ``python -m kvflash.compat.dynamo SCRIPT`` runs a script with them."""

from typing import TYPE_CHECKING

from kvflash.lazy import lazy_names

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
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvflash.compat.dynamo.classes": (
                "Client DistributedRuntime KvIndexer KvPushRouter KvRouterConfig Matches "
                "dynamo_worker"
            ),
            "kvflash.compat.dynamo.modules": "install",
            "kvflash.compat.dynamo.run": "main",
        },
    )
