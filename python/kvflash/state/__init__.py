"""State that router replicas share: events in a stream, snapshots of the index, live routers."""
