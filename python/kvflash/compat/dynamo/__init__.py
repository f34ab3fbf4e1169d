"""Dynamo's Python names: ``python -m kvflash.compat.dynamo SCRIPT`` runs a script with them."""

from kvflash.compat.dynamo.client import Client, DistributedRuntime, dynamo_worker
from kvflash.compat.dynamo.indexer import KvIndexer, Matches
from kvflash.compat.dynamo.modules import install
from kvflash.compat.dynamo.router import KvPushRouter, KvRouterConfig
from kvflash.compat.dynamo.run import main

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
