"""Workers' keys in discovery, and what changes there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kvflash.background import cancel
from kvflash.discovery import Delete, Discovery, Put, Synced
from kvflash.errors import DecodeError, TransportError
from kvflash.runtime.worker_key import key_kind, read_key

logger = logging.getLogger(__name__)

# A worker's keys arrive through three watches: after this pause related keys have all arrived, even
# over etcd's separate connections. It also limits how often a large fleet is scanned.
BATCH_S = 0.02


def _set(table: dict[Any, dict[str, Any]], key: Any, value: dict[str, Any] | None) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _set_in(
    tables: dict[Any, dict[Any, dict[str, Any]]], name: Any, key: Any, value: dict[str, Any] | None
) -> None:
    table = tables.setdefault(name, {})
    _set(table, key, value)
    if not table:
        del tables[name]


#: namespace/component/endpoint (events have no endpoint), and the instance's number.
Name = tuple[str, int]


class WorkerKeys:
    """Collects workers' keys from discovery, and processes changes in batches.

    A key stays known until it is seen to be deleted, even if discovery fails in between. The scope
    is ``namespace/component/endpoint``, a namespace, or empty for all. ``settle`` processes all
    keys that changed since its last call. The first call comes when all existing keys are known;
    calls never overlap.
    """

    def __init__(
        self, discovery: Discovery, scope: str, settle: Callable[[], Awaitable[None]]
    ) -> None:
        self._discovery, self._settle, self._scope = discovery, settle, scope
        #: Values of instances; with an endpoint those of its whole component, because the
        #: component's stream covers them all.
        self.instances: dict[Name, dict[str, Any]] = {}
        self.cards: dict[Name, dict[str, Any]] = {}
        #: Event endpoints by rank, of the whole component.
        self.events: dict[Name, dict[int, dict[str, Any]]] = {}
        # Instances by their component and number, as for events.
        self._instances_of: dict[Name, dict[Name, dict[str, Any]]] = {}
        self._changed_names: dict[Name, None] = {}
        names = [f"{name}/" for name in scope.split("/") if name]
        wide, narrow = "".join(names[:2]), "".join(names)
        self._prefixes = [f"v1/events/{wide}", f"v1/models/{narrow}", f"v1/instances/{wide}"]
        self._unsynced = set(self._prefixes)
        self._synced, self._settled = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def events_of(self, name: Name) -> dict[int, dict[str, Any]]:
        """An instance's event endpoints by rank, ascending."""
        return dict(sorted(self.events.get((name[0].rpartition("/")[0], name[1]), {}).items()))

    def take_changed(self) -> list[Name]:
        """Names whose keys changed since the last call, in the order of their first change."""
        changed, self._changed_names = self._changed_names, {}
        return list(changed)

    def start(self) -> None:
        """Start following discovery; needs a running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(prefix)) for prefix in self._prefixes]
        self._tasks.append(loop.create_task(self._settle_for_ever()))

    def resettle(self, names: Iterable[Name]) -> None:
        """Process these names again, as if their keys had changed."""
        self._changed_names |= dict.fromkeys(names)
        self._changed.set()

    async def synced(self, timeout_s: float) -> None:
        """Wait until existing keys are known and processed; TransportError if not in time."""
        if self._settled.is_set():
            return
        try:
            await asyncio.wait_for(self._synced.wait(), timeout_s)
        except asyncio.TimeoutError as error:
            raise TransportError(f"discovery has not answered within {timeout_s:g} s") from error
        await self._settled.wait()

    async def close(self) -> None:
        """Stop following."""
        await cancel(self._tasks)
        # Waiting callers continue with what is known.
        self._settled.set()

    async def _follow(self, prefix: str) -> None:
        async with self._discovery.watch(prefix) as watch:
            # Buffered events come without a pause.
            async for event in watch:
                try:
                    self._hear(prefix, event)
                except Exception:
                    # No other task would hear of the keys to come.
                    logger.exception("discovery: %s", event)

    def _hear(self, prefix: str, event: Put | Delete | Synced) -> None:
        if isinstance(event, Synced):
            self._unsynced.discard(prefix)
            if not self._unsynced:
                self._synced.set()
        else:
            self._take(event.key, event.value if isinstance(event, Put) else None)
        self._changed.set()

    def _take(self, key: str, value: bytes | None) -> None:
        """Store a key, or remove it for None; a malformed key must not hide the others."""
        try:
            kind = key_kind(key)
            fields = None if value is None else read_key(key, value)
        except DecodeError as error:
            logger.error("discovery key %s: %s", key, error)
            return
        path, _, last = key.split("/", 2)[2].rpartition("/")
        component, _, number = path.rpartition("/")
        if kind == "events":
            of_component = component, int(number)
            _set_in(self.events, of_component, int(last), fields)
            self._changed_names |= dict.fromkeys(self._instances_of.get(of_component, ()))
            return
        name = path, int(last)
        _set(self.cards if kind == "models" else self.instances, name, fields)
        if kind == "instances":
            _set_in(self._instances_of, (component, name[1]), name, fields)
        self._changed_names[name] = None

    async def _settle_for_ever(self) -> None:
        await self._synced.wait()
        while True:
            await self._changed.wait()
            await asyncio.sleep(BATCH_S)
            self._changed.clear()
            try:
                await self._settle()
            except Exception:
                # Known workers stay in service; this batch is processed with the next change.
                logger.exception("workers of %s", self._scope or "all namespaces")
            self._settled.set()
