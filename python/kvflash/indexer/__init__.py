"""The standalone indexer: ``python -m kvflash.indexer``."""
