"""What replicas of a router share: events in a stream, snapshots of the index, who is alive."""
