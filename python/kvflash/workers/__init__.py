"""Lists the workers of a running frontend, router or indexer."""
