"""The instances of an endpoint, from discovery."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

from kvflash.discovery import Delete, Discovery, Put, Synced, Watch
from kvflash.errors import ClosedError, DecodeError, TransportError
from kvflash.runtime.worker_key import key_kind, read_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """One process that serves the endpoint."""

    id: int
    transport: dict[str, Any]
    #: It takes no new requests.
    is_draining: bool = False


class Instances:
    """Follows the keys of one endpoint, ``prefix`` and a number, for all of its clients."""

    def __init__(self, discovery: Discovery, prefix: str) -> None:
        self._discovery = discovery
        self._prefix = prefix
        self._task: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._suspects: dict[int, float] = {}
        self.by_id: dict[int, Instance] = {}

    def start(self) -> None:
        """Start following; further calls do nothing. ClosedError if the discovery is closed."""
        self._check_open()
        if self._task is None:
            watch = self._discovery.watch(self._prefix)
            self._task = asyncio.get_running_loop().create_task(self._follow(watch))

    async def synced(self, timeout_s: float) -> None:
        """Wait until the current instances are known.

        Raises TransportError after ``timeout_s``, ClosedError if the runtime is closed meanwhile.
        """
        self.start()
        if self._synced.is_set():
            return
        try:
            await asyncio.wait_for(self._synced.wait(), timeout_s)
        except asyncio.TimeoutError as error:
            raise TransportError(f"discovery has not answered within {timeout_s:g} s") from error
        self._check_open()

    async def changed(self) -> None:
        """Wait for a change; ClosedError if the runtime is closed meanwhile."""
        self._changed.clear()
        await self._changed.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the runtime is closed")

    def suspect(self, instance_id: int, for_s: float) -> None:
        """Skip an instance for a while."""
        if instance_id in self.by_id:
            self._suspects[instance_id] = time.monotonic() + for_s

    def suspects(self) -> set[int]:
        """Instances to skip now."""
        now = time.monotonic()
        self._suspects = {i: until for i, until in self._suspects.items() if until > now}
        return set(self._suspects)

    def candidates(self, *, without: set[int]) -> list[Instance]:
        """Instances that take requests, by number; suspects only if there are no others."""
        suspects = self.suspects()
        all_ = (i for _, i in sorted(self.by_id.items()) if not i.is_draining)
        rest = [i for i in all_ if i.id not in without]
        return [i for i in rest if i.id not in suspects] or rest

    async def close(self) -> None:
        self._is_closed = True
        # Tasks that wait for these would wait forever.
        for event in (self._synced, self._changed):
            event.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self, watch: Watch) -> None:
        async with watch:
            async for event in watch:
                self._apply(event)

    def _apply(self, event: Put | Delete | Synced) -> None:
        if isinstance(event, Put):
            instance = _parse(event)
            if instance is not None:
                self.by_id[instance.id] = instance
                self._suspects.pop(instance.id, None)
        elif isinstance(event, Delete):
            with contextlib.suppress(DecodeError):
                key_kind(event.key)
                number = _number(event.key)
                self.by_id.pop(number, None)
                self._suspects.pop(number, None)
        else:
            self._synced.set()
        self._changed.set()


def _parse(event: Put) -> Instance | None:
    """The instance of a key; None for a malformed one, which must not hide the others."""
    try:
        fields = read_key(event.key, event.value)
    except DecodeError as error:
        logger.error("discovery key %r: %s", event.key, error)
        return None
    draining = fields.get("state") == "draining"
    return Instance(_number(event.key), fields["transport"], draining)


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])
