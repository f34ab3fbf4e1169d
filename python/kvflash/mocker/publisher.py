"""The ZMQ sockets of an engine's events."""

from kvflash.mocker.config import MockerConfig, PortChoice
from kvflash.publisher.stream import EventStream

_FIELDS = ("--host, or KVFLASH_HOST with --endpoint", "--zmq-events-port", "--zmq-replay-port")
# Each pass closes its batch explicitly.
TICK_MS = 1_000.0


def open_stream(config: MockerConfig, host: str, *, offset: int, dp_rank: int) -> EventStream:
    """Bind the sockets of one rank, and start answering replay requests.

    ``offset`` is added to the configured ports, if they are not free ones. Raises ConfigError if a
    port is taken or the host is not local.
    """
    # Discovery announces the replay of a runtime's worker; an HTTP worker has one if asked to.
    has_replay = config.endpoint is not None or config.zmq_replay_port != 0
    return EventStream(
        host=host,
        port=_port(config.zmq_events_port, offset),
        replay_port=_port(config.zmq_replay_port, offset) if has_replay else None,
        topic=config.event_topic,
        dp_rank=dp_rank,
        tick_ms=TICK_MS,
        ring_batches=config.replay_buffer,
        # Like engines, which only limit batches.
        ring_bytes=1 << 40,
        block_size=config.block_size,
        shape=config.event_era,
        fields=_FIELDS,
    )


def _port(first: PortChoice, offset: int) -> int:
    """The port at an offset from the first one; 0 for a free one."""
    return first + offset if isinstance(first, int) and first else 0
