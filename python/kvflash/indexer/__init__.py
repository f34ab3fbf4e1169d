"""The standalone indexer: ``python -m kvflash.indexer``, or an object in the caller's process."""

from kvflash.indexer.args import IndexerArgs, WorkerEntry
from kvflash.indexer.service import IndexerService

__all__ = ["IndexerArgs", "IndexerService", "WorkerEntry"]
