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

from kvflash.discovery.base import LEASE_TTL_S, Discovery, Lease, Watch, check_key, new_lease_id
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


class FileDiscovery(Discovery):
    """Keys in a folder that the processes of one machine and user share.

    The folder is created with mode 0700; one to which others have access is a ConfigError.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = Folder(Path(folder) if folder else default_folder())
        self._leases: dict[Lease, LeaseFile] = {}
        self._watches: set[Watch] = set()
        self._poller: asyncio.Task[None] | None = None

    def twin(self) -> FileDiscovery:
        return FileDiscovery(self._folder.path)

    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        """Its end is noticed at once, whatever ``ttl_s`` says."""
        lease = Lease(lease_id or new_lease_id(), self._revoke)
        # A sweep may be about to delete the file of an earlier lease with this number.
        async with self._locked():
            self._check_open()
            file = self._leases[lease] = LeaseFile(self._folder.path, lease.id)
        weakref.finalize(lease, file.release)
        self._poll()
        return lease

    async def delete(self, key: str) -> bool:
        self._check_open()
        check_key(key)
        async with self._locked():
            is_there = self._folder.read(key) is not None
            self._folder.delete(key)
            return is_there

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        self._check_open()
        with self._told():
            self._folder.make()
            living, _ = self._folder.look()
        return {key: value for key, value in living.items() if key.startswith(prefix)}

    def watch(self, prefix: str) -> Watch:
        self._check_open()
        watch = Watch(prefix, self._watches.discard)
        self._watches.add(watch)
        self._poll()
        return watch

    async def close(self) -> None:
        await super().close()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)

    async def _set(self, key: str, value: bytes, lease_id: int, *, is_new: bool) -> bool:
        async with self._locked():
            if is_new and self._folder.read(key) is not None:
                return False
            self._folder.write(key, value, lease_id)
            return True

    async def _revoke(self, lease: Lease) -> None:
        file = self._leases.pop(lease, None)
        if file is None:
            return
        file.release()
        try:
            async with self._locked():
                self._folder.sweep()
        except KvflashError as error:
            # It is dead to all others, which delete its files; the next one has to be, too.
            logger.warning("%s", error)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the folder's lock; TransportError if another process does so for too long."""
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
        while self._watches or self._leases:
            # CPU time of this thread only, so that other work of the process does not count.
            began_s = time.thread_time()
            try:
                with self._told():
                    self._look()
                outage.ends()
            except KvflashError as error:
                outage.lasts(f"{error}; trying again")
            look_s = time.thread_time() - began_s
            await asyncio.sleep(min(max(POLL_S, look_s / POLL_SHARE_MAX), POLL_S_MAX))

    def _look(self) -> None:
        """Notice lost leases, report changes to the watches, and sweep if that is due."""
        for lease, file in list(self._leases.items()):
            if not file.is_there():
                # The folder was emptied by someone else.
                del self._leases[lease]
                file.release()
                lease.lost.set()
        if not self._watches:
            return
        self._folder.make()
        living, has_dead = self._folder.look()
        for watch in self._watches:
            watch.replace({k: v for k, v in living.items() if k.startswith(watch.prefix)})
        # Waiting for the lock would delay polling.
        if has_dead and (lock := self._folder.try_lock()) is not None:
            with lock:
                self._folder.sweep()
