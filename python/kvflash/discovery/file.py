"""Discovery in a folder, for one machine: the kernel frees a process's locks when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from kvflash.discovery.base import (
    LEASE_TTL_S,
    Discovery,
    Lease,
    Watch,
    check_lease,
    check_open,
    new_lease_id,
)
from kvflash.discovery.folder import Folder, LeaseFile
from kvflash.errors import KvflashError, TransportError
from kvflash.outage import Outage

logger = logging.getLogger(__name__)

# The poll interval while there is a watch or a lease, and the share of a core that polling may
# take. With very many leases it polls less often, but a death is still noticed soon.
POLL_S, POLL_S_MAX = 0.1, 1.0
POLL_SHARE_MAX = 0.05
# Only a process that is stopped at that moment holds the lock for this long.
LOCK_TIMEOUT_S = 5.0
LOCK_PAUSE_S = 0.005


def default_folder() -> Path:
    """``$KVFLASH_DISCOVERY_DIR``, or a folder of this user that is emptied at reboot."""
    named = os.environ.get("KVFLASH_DISCOVERY_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"kvflash-{os.getuid()}" / "discovery"


class _FileLease:
    def __init__(self, discovery: FileDiscovery, file: LeaseFile, lease_id: int) -> None:
        self.id = lease_id
        self.lost = asyncio.Event()
        self.file = file
        self._discovery = discovery
        weakref.finalize(self, file.release)

    async def revoke(self) -> None:
        if self in self._discovery.leases:
            self._discovery.leases.discard(self)
            self.file.release()
            try:
                await self._discovery.sweep()
            except TransportError as error:
                # It is dead to all others, which delete its files.
                logger.warning("%s", error)


class FileDiscovery(Discovery):
    """Keys in a folder that the processes of one machine and user share.

    The folder is created with mode 0700; one to which others have access is a ConfigError.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Folder(Path(folder) if folder else default_folder())
        self.leases: set[_FileLease] = set()
        self._watches: dict[Watch, str] = {}
        self._poller: asyncio.Task[None] | None = None
        self._is_closed = False

    def twin(self) -> FileDiscovery:
        return FileDiscovery(self._folder.path)

    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        """Its end is noticed at once, whatever ``ttl_s`` says."""
        check_open(self._is_closed)
        number = lease_id or new_lease_id()
        with self._told():
            self._folder.make()
            lease = _FileLease(self, LeaseFile(self._folder.path, number), number)
        self.leases.add(lease)
        self._poll()
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        check_lease(lease, self.leases)
        async with self._locked():
            self._folder.write(key, value, 0 if lease is None else lease.id)

    async def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        check_lease(lease, self.leases)
        async with self._locked():
            if self._folder.read(key) is not None:
                return False
            self._folder.write(key, value, 0 if lease is None else lease.id)
            return True

    async def delete(self, key: str) -> bool:
        async with self._locked():
            is_there = self._folder.read(key) is not None
            return self._folder.delete(key) and is_there

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        check_open(self._is_closed)
        with self._told():
            self._folder.make()
            living, _ = self._folder.look()
        return {key: value for key, value in living.items() if key.startswith(prefix)}

    def watch(self, prefix: str) -> Watch:
        check_open(self._is_closed)
        watch = Watch(self._forget)
        self._watches[watch] = prefix
        self._poll()
        return watch

    async def sweep(self) -> None:
        """Delete files of dead processes."""
        async with self._locked(is_closing=True):
            self._folder.sweep()

    async def close(self) -> None:
        self._is_closed = True
        for watch in list(self._watches):
            await watch.aclose()
        for lease in list(self.leases):
            await lease.revoke()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)

    def _forget(self, watch: Watch) -> None:
        del self._watches[watch]

    @asynccontextmanager
    async def _locked(self, *, is_closing: bool = False) -> AsyncIterator[None]:
        """Hold the folder's lock; TransportError if another process does so for too long."""
        check_open(self._is_closed and not is_closing)
        end = time.monotonic() + LOCK_TIMEOUT_S
        with self._told():
            self._folder.make()
            while (lock := self._folder.try_lock()) is None:
                if time.monotonic() > end:
                    raise TransportError(
                        f"discovery folder {self._folder.path}: its lock has been held for more "
                        f"than {LOCK_TIMEOUT_S:g} s; is the process that holds it suspended?"
                    )
                await asyncio.sleep(LOCK_PAUSE_S)
            with lock:
                yield

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Convert file errors, such as of a full disk, to those of every discovery."""
        try:
            yield
        except KvflashError:
            raise
        except OSError as error:
            raise TransportError(f"discovery folder {self._folder.path}: {error}") from error

    def _poll(self) -> None:
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll_forever())

    async def _poll_forever(self) -> None:
        """Report changes to the watches until there are no watches and leases left."""
        back = f"discovery folder {self._folder.path} can be used again"
        outage = Outage(logger, back, show=self.show_outage)
        while self._watches or self.leases:
            # CPU time of this thread only, so that other work of the process does not count.
            began_s, look_s = time.thread_time(), 0.0
            try:
                with self._told():
                    has_dead = self._look()
                    look_s = time.thread_time() - began_s
                    if has_dead:
                        self._sweep_if_free()
                outage.ends()
            except KvflashError as error:
                outage.lasts(f"{error}; trying again")
            await asyncio.sleep(min(max(POLL_S, look_s / POLL_SHARE_MAX), POLL_S_MAX))

    def _look(self) -> bool:
        """Report changes to the watches; returns whether dead processes left files."""
        for lease in list(self.leases):
            if not lease.file.is_there():
                # The folder was emptied by someone else.
                self.leases.discard(lease)
                lease.file.release()
                lease.lost.set()
        if not self._watches:
            return False
        self._folder.make()
        living, has_dead = self._folder.look()
        for watch, prefix in list(self._watches.items()):
            watch.replace({k: v for k, v in living.items() if k.startswith(prefix)})
        return has_dead

    def _sweep_if_free(self) -> None:
        """Sweep unless the lock is taken: waiting for it would delay polling."""
        lock = self._folder.try_lock()
        if lock is not None:
            with lock:
                self._folder.sweep()
