"""What discovery's keys say of workers, checked where it comes in.

::

    v1/instances/namespace/component/endpoint/number
    v1/models/namespace/component/endpoint/number
    v1/events/namespace/component/number/rank
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from kvflash.discovery import Delete, Discovery, Put, Synced
from kvflash.errors import ClosedError, DecodeError, KvflashError, TransportError

__all__ = ["BATCH_S", "WorkerKeys", "announced", "is_brokered", "read_key"]

logger = logging.getLogger(__name__)

# A worker's keys come by three watches: what belongs together is there after that, also over the
# connections to etcd. It bounds how often a large fleet is gone through, too.
BATCH_S = 0.02
RESTART_PAUSE_S = 0.5
PARTS = 6
NUMBER_MAX, RANK_MAX = 2**64 - 1, 2**32 - 1
# Fields that are used here, by kind: another type of theirs would be met far from its key.
_TYPES: dict[str, dict[str, type]] = {
    "instances": {"transport": dict},
    "models": {
        "model_name": str,
        "model_type": list,
        "dp_size": int,
        "kv_cache_block_size": int,
        "total_kv_blocks": int,
        "max_num_batched_tokens": int,
    },
    "events": {"endpoint": str, "replay_endpoint": str, "block_size": int},
}
_NEEDED = {"instances": "transport", "events": "endpoint"}
_TRANSPORT: dict[str, type] = {"kind": str, "address": str, "url": str, "subject": str}


def read_key(key: str, value: bytes) -> dict[str, Any]:
    """A key's value.

    Raises:
        DecodeError: The key names no worker, or the value is not what it should be; says what.
    """
    parts = key.split("/")
    kind = parts[1] if len(parts) == PARTS else ""
    if kind not in _TYPES:
        raise DecodeError("is no key of a worker")
    worker, rank = parts[-2:] if kind == "events" else (parts[-1], "0")
    if not (_is_number(worker, NUMBER_MAX) and _is_number(rank, RANK_MAX)):
        raise DecodeError("does not end with numbers of a worker or rank")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DecodeError(f"must be an object, got {value[:80]!r}")
    _check(fields, _TYPES[kind], "")
    if (needed := _NEEDED.get(kind)) is not None and fields.get(needed) is None:
        raise DecodeError(f"has no {needed}")
    if kind == "instances":
        _check(fields["transport"], _TRANSPORT, "transport.")
    return fields


def _is_number(text: str, number_max: int) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= number_max


def _check(fields: dict[str, Any], types: dict[str, type], path: str) -> None:
    """Refuse fields of another type; each may be missing or null."""
    for name, kind in types.items():
        field = fields.get(name)
        if field is not None and (not isinstance(field, kind) or isinstance(field, bool)):
            raise DecodeError(f"{path}{name} must be of type {kind.__name__}, got {field!r}")


def announced(events: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Where a worker says that its events are, by rank, in the form that the core takes."""
    return {
        str(rank): {key: where.get(key) for key in ("endpoint", "replay_endpoint")}
        for rank, where in events.items()
    }


def is_brokered(where: dict[str, Any]) -> bool:
    """Whether a broker carries these events."""
    return str(where.get("endpoint")).partition("://")[0] in ("jetstream", "nats")


class WorkerKeys:
    """What discovery says of an endpoint's workers: noted as it comes, settled batch by batch.

    Args:
        discovery: Where to look.
        path: ``namespace/component/endpoint``.
        settle: Makes of the keys what they say, once for all that changed since the last time. It
            is first called when everything that was there is known, and never twice at once.

    Attributes:
        instances: What instances of all of the component's endpoints say, by ``endpoint/number``:
            what is in a component's stream is of all.
        cards: Model cards, by ``number``.
        events: Where events are told, by ``number/rank``, of the whole component.
    """

    def __init__(
        self, discovery: Discovery, path: str, settle: Callable[[], Awaitable[None]]
    ) -> None:
        self._discovery, self._settle = discovery, settle
        self._path = path
        component, _, self._endpoint = path.rpartition("/")
        self.instances: dict[str, dict[str, Any]] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self._values = {
            f"v1/instances/{component}/": self.instances,
            f"v1/models/{path}/": self.cards,
            f"v1/events/{component}/": self.events,
        }
        self._unsynced = set(self._values)
        self._synced, self._settled = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def served(self) -> Iterator[tuple[int, dict[str, Any], dict[str, Any] | None]]:
        """The endpoint's instances: number, what it says, and its model card if it has one."""
        for name, instance in self.instances.items():
            endpoint, _, number = name.rpartition("/")
            if endpoint == self._endpoint:
                yield int(number), instance, self.cards.get(number)

    def start(self) -> None:
        """Follow discovery; needs a running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(prefix)) for prefix in self._values]
        self._tasks.append(loop.create_task(self._settle_for_ever()))

    def resettle(self) -> None:
        """Settle again, though no key may have changed."""
        self._changed.set()

    async def synced(self, timeout_s: float) -> None:
        """Wait until what is there is known and settled.

        Raises:
            TransportError: Discovery did not answer in time.
        """
        if self._settled.is_set():
            return
        try:
            await asyncio.wait_for(self._synced.wait(), timeout_s)
        except asyncio.TimeoutError as error:
            raise TransportError(f"discovery has not answered within {timeout_s:g} s") from error
        await self._settled.wait()

    async def close(self) -> None:
        """Follow no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Whoever waits goes on, with what is there.
        self._settled.set()

    async def _follow(self, prefix: str) -> None:
        while True:
            try:
                async with self._discovery.watch(prefix) as watch:
                    # What waits comes without a pause.
                    async for event in watch:
                        self._take(prefix, event)
                return
            except ClosedError:
                return
            except KvflashError as error:
                # Backends reconnect by themselves; what they give up on is tried again anyway.
                logger.warning("%s: %s", prefix, error)
                await asyncio.sleep(RESTART_PAUSE_S)

    def _take(self, prefix: str, event: Put | Delete | Synced) -> None:
        values = self._values[prefix]
        if isinstance(event, Synced):
            self._unsynced.discard(prefix)
            if not self._unsynced:
                self._synced.set()
        elif isinstance(event, Put):
            try:
                values[event.key.removeprefix(prefix)] = read_key(event.key, event.value)
            except DecodeError as error:
                logger.error("discovery key %s: %s", event.key, error)
        else:
            values.pop(event.key.removeprefix(prefix), None)
        self._changed.set()

    async def _settle_for_ever(self) -> None:
        await self._synced.wait()
        while True:
            await self._changed.wait()
            await asyncio.sleep(BATCH_S)
            self._changed.clear()
            try:
                await self._settle()
            except Exception:
                # What is known goes on being served; the next change is settled with this one.
                logger.exception("workers of %s", self._path)
            self._settled.set()
