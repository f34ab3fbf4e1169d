"""Replica sync over a real network: the protocol, a channel, and liveness from discovery."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from kvflash._core import Bookings
from kvflash.background import Background
from kvflash.discovery import Discovery, Put, Synced
from kvflash.discovery.announcer import Announcer
from kvflash.errors import KvflashError
from kvflash.outage import Outage
from kvflash.routing.replica_sync import ReplicaSync
from kvflash.transport.channel import Channel, ZmqChannel

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_RETRY_S = 0.5
# Pause between two attempts to connect.
_CONNECT_S = 2.0
# A service stops within this time while discovery does not answer.
_LEAVE_TIMEOUT_S = 2.0


class ReplicaSyncService(Background):
    """Shares this router's active requests with all others of a component.

    Call ``sync.add``, ``sync.mark_prefill_completed`` and ``sync.free`` for every request of this
    router, from any thread; ``bookings`` count other routers' requests. When it stops, others drop
    this router's load at once; when it dies, with its lease. The discovery and the channel are
    opened in the event loop that uses them, and tried again until their servers answer.
    """

    def __init__(
        self,
        namespace: str,
        component: str,
        bookings: Bookings,
        *,
        open_discovery: Callable[[], Discovery],
        open_channel: Callable[[Discovery], Awaitable[Channel]],
        local_of: Mapping[int, int] | None = None,
    ) -> None:
        # Below 2^63, so that every JSON reader accepts it.
        self.sync = ReplicaSync(secrets.randbelow(2**63 - 1) + 1, bookings, local_of)
        self._place = f"{namespace}/{component}"
        self._prefix = f"v1/replica_sync/{self._place}/"
        self._open_discovery, self._open_channel = open_discovery, open_channel
        self._has_strangers = False
        super().__init__(
            "replica sync, which tells other routers' load,", self._serve, is_cancelled=False
        )

    async def _serve(self) -> None:
        outage = Outage(logger, "replica sync: the requests of other routers are counted")
        while not self.ending.is_set():
            try:
                await self._share(outage)
            except Exception as error:
                logger.debug("replica sync is not connected", exc_info=True)
                text = "replica sync: can't learn of the requests of other routers: "
                outage.lasts(f"{text}{error}; trying again", kind=type(error))
                # Peers that connect later are sent the state, and need no events of the past.
                self.sync.drop_waiting()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), _CONNECT_S)

    async def _share(self, outage: Outage) -> None:
        discovery = self._open_discovery()
        announcer = Announcer(discovery, f"the router of replica sync in {self._place}")
        channel: Channel | None = None
        try:
            channel = await self._open_channel(discovery)
            await channel.open(lambda data: self.sync.received(data, time.monotonic()))
            outage.ends()
            value = json.dumps({"endpoint": channel.endpoint}).encode()
            announcer.announce_soon(f"{self._prefix}{self.sync.router_id}", value)
            work: list[Callable[[], Awaitable[None]]] = [
                partial(self._watch, discovery, channel),
                partial(self._send, channel),
            ]
            if isinstance(channel, ZmqChannel):
                work.append(channel.hear)
            await self.run_until_ending([_keep(one) for one in work])
        finally:
            if channel is not None:
                await channel.close()
            await announcer.close(_LEAVE_TIMEOUT_S)
            with contextlib.suppress(KvflashError):
                await discovery.close()

    async def _watch(self, discovery: Discovery, channel: Channel) -> None:
        routers: dict[int, str | None] = {}
        is_synced = False
        async with discovery.watch(self._prefix) as watch:
            async for event in watch:
                if isinstance(event, Synced):
                    is_synced = True
                elif isinstance(event, Put):
                    routers.update(_router(event.key[len(self._prefix) :], event.value))
                else:
                    for router_id in _router(event.key[len(self._prefix) :], b"{}"):
                        routers.pop(router_id, None)
                if is_synced:
                    self._warn_of_strangers(routers, channel)
                    channel.follow({url for url in routers.values() if url})
                    self.sync.listed(set(routers), time.monotonic())

    def _warn_of_strangers(self, routers: Mapping[int, str | None], channel: Channel) -> None:
        """Warn, once while there are any, of routers on the other plane: only ZMQ has endpoints."""
        is_zmq = channel.endpoint is not None
        strangers = sum((endpoint is not None) != is_zmq for endpoint in routers.values())
        if strangers and not self._has_strangers:
            own, other = ("zmq", "nats") if is_zmq else ("nats", "zmq")
            logger.warning(
                "replica sync: %d router(s) of %s share load over %s, but this one uses %s, so "
                "they do not count each other's requests; use the same --event-plane everywhere",
                strangers, self._place, other, own,
            )  # fmt: skip
        self._has_strangers = strangers > 0

    async def _send(self, channel: Channel) -> None:
        while True:
            messages = self.sync.outgoing(time.monotonic())
            failures: list[KvflashError] = []
            for data in messages:
                try:
                    await channel.send(data)
                except KvflashError as error:
                    # The next digest reveals lost messages.
                    failures.append(error)
            if failures:
                text = "replica sync: %d of %d messages were not sent: %s"
                logger.warning(text, len(failures), len(messages), failures[-1])
                await asyncio.sleep(_RETRY_S)
            if len(messages) < 256:
                await asyncio.sleep(_TICK_S)


async def _keep(work: Callable[[], Awaitable[None]]) -> None:
    """Restart it after an unexpected exception; log the traceback once."""
    said = ""
    while True:
        try:
            await work()
        except Exception as error:
            logger.warning("replica sync: %s; going on", repr(error), exc_info=repr(error) != said)
            said = repr(error)
        await asyncio.sleep(_RETRY_S)


def _router(name: str, value: bytes) -> dict[int, str | None]:
    """A router's number and endpoint; empty for an invalid key or value."""
    try:
        endpoint = json.loads(value).get("endpoint")
        return {int(name): endpoint if isinstance(endpoint, str) else None}
    except (ValueError, AttributeError):
        logger.warning("replica sync: %r in discovery is not a router", name)
        return {}
