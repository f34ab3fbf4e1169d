"""The events of one engine rank: which blocks its KV cache holds."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, overload

from kvflash._core import EventOutbox
from kvflash.errors import ClosedError, ConflictError, InvalidArgumentError
from kvflash.publisher.announce import announce_events, events_value
from kvflash.publisher.brokered import BrokerOutlet, BrokerStream, Served, served_of
from kvflash.publisher.relay import Relay
from kvflash.publisher.stream import EventStream, Sender
from kvflash.runtime import Component
from kvflash.runtime.arguments import check_range
from kvflash.runtime.settings import own_address
from kvflash.servers import plane_of_events

logger = logging.getLogger(__name__)

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_WARNINGS_MAX = 3
_RELAY_COUNTS = dict.fromkeys(
    ("stored_blocks_total", "removed_blocks_total", "dropped_blocks_total", "open_item_blocks"), 0
)


@dataclass(frozen=True)
class ZmqKvEventPublisherConfig:
    """Settings of a publisher that relays an engine's own events.

    Attributes:
        worker_id: Instance that publishes the events; 0 means the runtime's own.
        kv_block_size: Tokens in a block.
        zmq_endpoint: Where the engine publishes.
        zmq_topic: Topic of its messages; receivers read all topics.
        zmq_replay_endpoint: Where the engine replays; None without a replay endpoint.
        dp_rank: Data parallel rank of the events.
    """

    worker_id: int = 0
    kv_block_size: int = 0
    zmq_endpoint: str = "tcp://127.0.0.1:5557"
    zmq_topic: str = ""
    _: KW_ONLY
    zmq_replay_endpoint: str | None = None
    dp_rank: int = 0


class KvEventPublisher(AbstractContextManager["KvEventPublisher"]):
    """Publishes the KV cache events of one data parallel rank of an engine.

    Call it where the engine allocates and evicts blocks, from any thread, with or without an event
    loop. Calls never wait for routers. It binds its own sockets, for a stream and its replay, which
    routers find through discovery.

    With `zmq_endpoint` it relays instead: it announces the endpoint where the engine itself
    publishes, in the format of vLLM and SGLang, and forwards no bytes. With ``nats`` it also reads
    the events there, repairs gaps from the engine's replay, and writes them to NATS.

    ::

        publisher = KvEventPublisher(component, kv_block_size=16)
        publisher.publish_stored(
            token_ids=tokens, num_block_tokens=[16, 16], block_hashes=[71, 72], parent_hash=None
        )
        publisher.publish_removed(block_hashes=[72])

    Attributes:
        endpoint: Where the events are published.
        replay_endpoint: Where they are replayed; None if the relayed engine has no replay.
        kv_block_size: Tokens in a block.
        dp_rank: Data parallel rank of the events.
    """

    def __init__(  # noqa: PLR0917 - the order that engines know
        self,
        component: Component | None,
        worker_id: int = 0,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        *,
        zmq_replay_endpoint: str | None = None,
        host: str | None = None,
        port: int = 0,
        replay_port: int = 0,
        tick_ms: float = 1.0,
        ring_batches: int = 10_000,
        ring_bytes: int = 64 << 20,
        loop: asyncio.AbstractEventLoop | None = None,
        event_plane: str | None = None,
        model_name: str | None = None,
    ) -> None:
        """Bind or relay, then announce.

        Args:
            component: Component of the runtime that the engine serves; with None nothing is
                announced.
            worker_id: Instance that publishes the events; 0 means the runtime's own.
            kv_block_size: Tokens in a block, at least 1.
            dp_rank: Data parallel rank; each rank needs its own publisher.
            enable_local_indexer: With ``nats``: keep an index of the worker's own blocks, which
                routers query for events they missed, and publish over NATS Core instead of the
                stream. With ``zmq`` routers always recover from the replay.
            zmq_endpoint: Relay mode: where the engine publishes.
            zmq_topic: Topic; default "kv-events". Receivers read all topics.
            zmq_replay_endpoint: Relay mode: where the engine replays.
            host: Interface to bind to; default: that of the component's host, or all if this
                machine has no such address; without a component 127.0.0.1. With a wildcard such as
                0.0.0.0 the component's host is announced.
            port: Port of the events; 0 picks a free one.
            replay_port: Port of the replay; 0 picks a free one.
            tick_ms: How long the first event of a batch waits for more events; 0..1000.
            ring_batches: Batches kept for replay, at least 1.
            ring_bytes: Memory for these batches, at least 1 MiB; the oldest are dropped first.
            loop: The runtime's event loop, if this is called outside of it.
            event_plane: ``zmq``, or ``nats`` for the server that NATS_SERVER names, which requires
                a component; default: KVFLASH_EVENT_PLANE, else zmq.
            model_name: With ``nats``: model that the events belong to; default: the one passed to
                register_llm.

        Raises:
            InvalidArgumentError: An argument is out of range; the message names it.
            ConfigError: The address can't be bound, or the event plane is unknown.
            ConflictError: Another publisher of this process announces the same rank.
            TransportError: NATS or discovery can't be reached. Inside the event loop a failure of
                discovery is only logged.
        """
        self.kv_block_size = check_range("kv_block_size", kv_block_size, 1, _U32)
        self.dp_rank = check_range("dp_rank", dp_rank, 0, _U32)
        worker_id = check_range("worker_id", worker_id, 0, _U64)
        check_range("ring_batches", ring_batches, 1, 1 << 24)
        check_range("ring_bytes", ring_bytes, 1 << 20, 1 << 40)
        for field, value in (("port", port), ("replay_port", replay_port)):
            check_range(field, value, 0, 65535)
        if not 0 <= tick_ms <= 1000:
            raise InvalidArgumentError(f"tick_ms must be in 0..=1000, got {tick_ms!r}")
        self._warnings = 0
        #: None if routers read the engine's own socket.
        self._source: EventStream | BrokerStream | Relay | None = None
        self.endpoint = ""
        self.replay_endpoint: str | None = None
        if zmq_endpoint is not None:
            self.endpoint = _endpoint("zmq_endpoint", zmq_endpoint)
            if zmq_replay_endpoint is not None:
                self.replay_endpoint = _endpoint("zmq_replay_endpoint", zmq_replay_endpoint)
        if component is not None and plane_of_events(event_plane) == "nats":
            outlet = self._outlet(component, worker_id, model_name, enable_local_indexer)
            if zmq_endpoint is None:
                self._source = BrokerStream(outlet, tick_ms=tick_ms)
            else:
                # The engine may use its own prefix, so its topic is unknown here.
                topic = zmq_topic or ""
                self._source = Relay(outlet, self.endpoint, self.replay_endpoint, topic)
        elif zmq_endpoint is None:
            self._source = EventStream(
                host=host or (own_address(component.runtime.host) if component else "127.0.0.1"),
                own_host=component.runtime.host if component else None,
                port=port,
                replay_port=replay_port,
                topic="kv-events" if zmq_topic is None else zmq_topic,
                dp_rank=self.dp_rank,
                tick_ms=tick_ms,
                ring_batches=ring_batches,
                ring_bytes=ring_bytes,
                block_size=self.kv_block_size,
            )
        kind = "zmq"
        if self._source is not None:
            kind, self.endpoint = self._source.kind, self._source.endpoint
            self.replay_endpoint = self._source.replay_endpoint
        withdraw = None
        if component is not None:
            where = events_value(kind, self.endpoint, self.replay_endpoint, self.kv_block_size)
            try:
                withdraw = announce_events(
                    component, self.dp_rank, where, worker_id=worker_id, loop=loop
                )
            except BaseException:
                if self._source is not None:
                    self._source.close()
                raise
        # Also runs at process exit, and when the publisher is garbage-collected.
        self._end = weakref.finalize(self, _close, self._source, withdraw, os.getpid())

    def _outlet(
        self, component: Component, worker_id: int, model_name: str | None, has_index: bool
    ) -> BrokerOutlet:
        runtime = component.runtime
        known = None if model_name is None else Served(model_name)
        cards = f"v1/models/{component.namespace.name}/{component.name}/"
        return BrokerOutlet(
            component,
            instance_id=worker_id or runtime.instance_id,
            dp_rank=self.dp_rank,
            block_size=self.kv_block_size,
            # Holds no reference to the publisher, so that only its user keeps it alive.
            served=lambda: known or served_of(runtime.announced(cards)),
            has_local_index=has_index,
        )

    @overload
    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        lora_id: int | None = None,
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Any] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        medium: str | None = "GPU",
        event_id: int | None = None,
    ) -> None: ...
    @overload
    def publish_stored(
        self,
        event_id: int,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        lora_id: int | None = None,
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Any] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        medium: str | None = "GPU",
    ) -> None: ...
    def publish_stored(self, *args: Any, **named: Any) -> None:
        """Publish that blocks can now be reused; each block continues the one before.

        Args:
            *args: The arguments below in their order, with or without a leading event id.
            **named: token_ids: tokens of all the blocks, u32; num_block_tokens: tokens of each
                block; block_hashes: the engine's names of the blocks, 64 bits, signed or unsigned;
                lora_id: number of the adapter, 0 or None for no adapter; parent_hash: name of the
                block before the first, None only at the start of a prompt; block_mm_infos:
                multimodal items per block, None or ``{"mm_objects": [{"mm_hash": u64, "offsets":
                [[start, end], ...]}]}``; lora_name: name of the adapter that prompts are matched
                by; cache_salt: salt of the prompt, which later blocks inherit from their parent;
                medium: where the blocks are, GPU, CPU or DISK; event_id: accepted for compatibility
                and ignored, because the publisher numbers batches.

        Each of ``offsets`` is a separate item: its first token and the one after its last, both
        counted from the block's first token. An item that reaches the end of a block continues from
        0 in the next block that names it, also in a later call; its start may instead be given as a
        negative offset. A prompt matches these blocks if its ``mm`` has the item's identifier (64
        hexadecimal digits, the first 16 of which are ``mm_hash``) at the same place in the prompt.

        A block with a token count other than `kv_block_size` is dropped, together with all blocks
        that follow it in this call, because no prompt could match them. Drops are counted; the
        first three are logged.

        Raises:
            InvalidArgumentError: An argument has the wrong type, range or length; the message names
                it. Nothing of the call is published.
            ConflictError: The publisher relays an engine's events.
            ClosedError: The publisher is shut down.

        Cost: O(tokens) for validation and encoding. Waits only while 16 MiB are queued.
        """
        outbox = self._outbox("publish_stored")
        args = _without_event_id(args, named, "token_ids")
        dropped = outbox.store(*args, **{"medium": "GPU", **named})
        if dropped is not None:
            self._warnings += 1
            if self._warnings <= _WARNINGS_MAX:
                logger.warning("%s of this call", dropped)

    @overload
    def publish_removed(
        self,
        block_hashes: Sequence[int],
        *,
        medium: str | None = "GPU",
        event_id: int | None = None,
    ) -> None: ...
    @overload
    def publish_removed(
        self, event_id: int, block_hashes: Sequence[int], *, medium: str | None = "GPU"
    ) -> None: ...
    def publish_removed(self, *args: Any, **named: Any) -> None:
        """Publish that blocks were evicted, in the order of eviction.

        Args:
            *args: The names of the blocks, with or without a leading event id.
            **named: block_hashes: names of the blocks, as passed to publish_stored; medium: where
                the blocks were; event_id: accepted for compatibility and ignored.

        Raises:
            InvalidArgumentError: An argument has the wrong type or range; the message names it.
            ConflictError: The publisher relays an engine's events.
            ClosedError: The publisher is shut down.
        """
        outbox = self._outbox("publish_removed")
        args = _without_event_id(args, named, "block_hashes")
        outbox.remove(*args, **{"medium": "GPU", **named})

    def publish_cleared(self) -> None:
        """Publish that the cache was reset: it holds no blocks, in any medium.

        Raises:
            ConflictError: The publisher relays an engine's events.
            ClosedError: The publisher is shut down.
        """
        self._outbox("publish_cleared").clear()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything published so far is handed to the socket.

        Returns:
            False if that took longer than the timeout.
        """
        return self._source is None or self._source.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters and gauges; names include units. A relay has none of a stream's."""
        return _RELAY_COUNTS | (self._source.stats() if self._source is not None else {})

    def shutdown(self) -> None:
        """Withdraw the announcement, send queued events, close. Further calls do nothing."""
        self._end()

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _outbox(self, call: str) -> EventOutbox:
        if not self._end.alive:
            raise ClosedError("the publisher is shut down")
        if not isinstance(self._source, Sender):
            raise ConflictError(
                f"{call}: this publisher relays {self.endpoint}, where the engine publishes "
                "itself; create it without zmq_endpoint"
            )
        return self._source.outbox


class ZmqKvEventPublisher(KvEventPublisher):
    """Relays an engine's own events; a KvEventPublisher under the name that older engines use."""

    def __init__(self, component: Component | None, config: ZmqKvEventPublisherConfig) -> None:
        """Announce the engine's endpoint.

        Raises:
            InvalidArgumentError: A setting is out of range; the message names it.
        """
        super().__init__(
            component,
            config.worker_id,
            config.kv_block_size,
            config.dp_rank,
            zmq_endpoint=config.zmq_endpoint,
            zmq_topic=config.zmq_topic,
            zmq_replay_endpoint=config.zmq_replay_endpoint,
        )


def _without_event_id(args: tuple[Any, ...], named: dict[str, Any], first: str) -> tuple[Any, ...]:
    """Return the arguments, from ``first`` on, without the event id that older engines pass."""
    given = named.pop("event_id", None)
    if given is None and (len(args) > 1 or (args and first in named)):
        try:
            given, args = operator.index(args[0]), args[1:]
        except TypeError:
            return args
    if given is not None:
        check_range("event_id", given, 0, _U64)
    return args


def _endpoint(field: str, value: str) -> str:
    is_url = isinstance(value, str) and "://" in value
    if not is_url or (value.startswith("tcp:") and not value.rpartition(":")[2].isdecimal()):
        raise InvalidArgumentError(f"{field} must look like tcp://host:port, got {value!r}")
    return value


def _close(
    source: Sender | Relay | None, withdraw: Callable[[], None] | None, process: int
) -> None:
    if os.getpid() != process:
        # A fork has none of the threads that would close these, and they are its parent's.
        return
    try:
        if withdraw is not None:
            withdraw()
    finally:
        if source is not None:
            source.close()
