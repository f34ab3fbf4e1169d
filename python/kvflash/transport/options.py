"""Settings of the event transport."""

import resource
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ZmqOptions:
    """Limits of the event transport."""

    #: Messages that may wait in one socket.
    receive_queue_messages: int = 4_096
    #: Messages of a replay that may wait. Engines send all that they keep at once, 10,000 batches
    #: by vLLM's defaults, and drop what finds no room.
    replay_queue_messages: int = 131_072
    #: Largest frame; a publisher of a larger one is disconnected.
    message_bytes_max: int = 16 * 1024 * 1024
    #: Messages passed to the core at once.
    batch_messages: int = 256
    #: Time without progress after which a replay is given up.
    replay_timeout_s: float = 5.0
    #: Longest pause between two attempts to connect.
    reconnect_ms_max: int = 2_000
    #: Receive without Python where libzmq's functions can be found; the fastest way.
    is_native: bool = True


def most_streams() -> int:
    """Maximum of streams in this process, with three open files each and some left for others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return max(limit // 4, limit // 3 - 1_000)
