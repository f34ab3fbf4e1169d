r"""The folder of :mod:`kvflash.discovery.file`: its files, locks and their meaning.

::

    leases/<id>      locked by its process with flock; if it can be locked, that process is dead
    keys/<key>       "<lease id in hex, 0 for none>\n" and the value; replaced by renaming
    new/             files that are being written
    lock             held while keys are changed
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar
from urllib.parse import quote, unquote

from kvflash.discovery.base import KEYS_MAX, new_lease_id
from kvflash.errors import ConfigError, InvalidArgumentError, OverloadedError

NAME_BYTES_MAX = 255
_LEASES = "leases"
# What to do where another folder would be no better.
_STEPS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOSPC: "free space there, or set KVFLASH_DISCOVERY_DIR to a folder on another disk",
}
# Folder timestamps are coarse: another change this soon may not change them.
SETTLED_S = 0.05
# Raised if another process holds the lock.
_IS_LOCKED = (BlockingIOError, PermissionError)


class LeaseFile:
    """A locked file, made under the folder's lock.

    A forked child closes it, so that the parent's death is noticed.
    """

    _held: ClassVar[weakref.WeakSet[LeaseFile]] = weakref.WeakSet()

    def __init__(self, folder: Path, lease_id: int) -> None:
        self.path = folder / _LEASES / f"{lease_id:016x}"
        draft = folder / "new" / f"lease-{lease_id:016x}-{new_lease_id():x}"
        self._file = draft.open("wb")
        # Locked before others can see it, so that they do not take it for dead.
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._inode = os.fstat(self._file.fileno()).st_ino
        draft.rename(self.path)
        self._held.add(self)

    def is_there(self) -> bool:
        """Whether the file at the path is still the locked one."""
        try:
            return not self._file.closed and self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock: from now on the lease is dead to all others."""
        self._held.discard(self)
        self._file.close()

    @classmethod
    def leave_to_parent(cls) -> None:
        """In a forked child, close the files that keep its parent's leases alive."""
        for lease in list(cls._held):
            lease.release()


os.register_at_fork(after_in_child=LeaseFile.leave_to_parent)


class Folder:
    """The files, without waiting; changes require the lock from :meth:`try_lock`.

    A folder that can't be created, belongs to another user or has other content is a ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _make_private(path)
            _check_content(path)
            self.make()
        except OSError as error:
            step = _STEPS.get(error.errno or 0) or (
                "set KVFLASH_DISCOVERY_DIR to a folder that this user owns or may create"
            )
            raise ConfigError(f"discovery folder {path}: {error.strerror}: {step}") from error
        # Cached keys: inode and time, lease, value.
        self._seen: dict[str, tuple[tuple[int, int, int], int, bytes]] = {}
        # The folder's last modification time, and when it was first seen, on this process's clock.
        self._mtime_ns, self._since_s = -1, 0.0
        self._is_settled = False

    def make(self) -> None:
        """Create missing folders, and check the owner. Cost: about 20 us."""
        path = self.path
        # The first one inside identifies the folder as ours.
        for folder in (path, path / _LEASES, path / "keys", path / "new"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(
                f"discovery folder {path} is a symbolic link: name the folder that it points to"
            )
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise ConfigError(
                f"discovery folder {path} must be owned by user {os.getuid()} and not be "
                f"writable by others; its owner is {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}: change that, or set KVFLASH_DISCOVERY_DIR to "
                "another folder"
            )

    def try_lock(self) -> IO[bytes] | None:
        """Take the folder's lock, released by closing it; None if it is taken."""
        file = (self.path / "lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, _IS_LOCKED):
                raise
            return None
        return file

    def look(self) -> tuple[dict[str, bytes], bool]:
        """All keys of live leases with their values, and whether there are keys of dead ones."""
        self._read_changes()
        leases = {lease for _, lease, _ in self._seen.values() if lease}
        dead = {lease for lease in leases if not self.is_alive(lease)}
        living = {key: value for key, (_, lease, value) in self._seen.items() if lease not in dead}
        return living, bool(dead)

    def is_alive(self, lease_id: int) -> bool:
        """Whether a process holds the lease. Cost: about 10 us."""
        try:
            with (self.path / _LEASES / f"{lease_id:016x}").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except _IS_LOCKED:
            return True
        return False

    def write(self, key: str, value: bytes, lease_id: int) -> None:
        """Set a key; readers see either all of it or nothing."""
        path = self._path(key)
        if not path.exists() and sum(1 for _ in path.parent.iterdir()) >= KEYS_MAX:
            raise OverloadedError(f"discovery folder {self.path} is full: {KEYS_MAX} keys")
        draft = self.path / "new" / f"key-{new_lease_id():x}"
        try:
            draft.write_bytes(b"%x\n" % lease_id + value)
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def read(self, key: str) -> tuple[int, bytes] | None:
        """Lease and value of a key with a live lease."""
        found = _read(self._path(key))
        if found is None or (found[0] and not self.is_alive(found[0])):
            return None
        return found

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete the keys and files of dead leases."""
        # Read first: the lease of each of these keys was created before it, and is among the files.
        self._read_changes()
        living = set()
        for path in (self.path / _LEASES).iterdir():
            with suppress(ValueError):
                lease = int(path.name, 16)
                if self.is_alive(lease):
                    living.add(lease)
                else:
                    path.unlink(missing_ok=True)
        for key, (_, lease, _) in self._seen.items():
            if lease and lease not in living:
                self.delete(key)

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        if len(name) > NAME_BYTES_MAX or name in (".", ".."):
            raise InvalidArgumentError(
                f"key must fit in a file name of {NAME_BYTES_MAX} bytes, got {len(name)}: {key!r}"
            )
        return self.path / "keys" / name

    def _read_changes(self) -> None:
        keys = self.path / "keys"
        now_s, mtime_ns = time.monotonic(), keys.stat().st_mtime_ns
        if mtime_ns != self._mtime_ns:
            # Never compared with the wall clock, which may jump.
            self._mtime_ns, self._since_s = mtime_ns, now_s
        elif self._is_settled:
            return
        seen = {}
        with os.scandir(keys) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                key = unquote(entry.name)
                mark = (status.st_ino, status.st_mtime_ns, status.st_size)
                known = self._seen.get(key)
                if known is not None and known[0] == mark:
                    seen[key] = known
                    continue
                found = _read(keys / entry.name)
                if found is not None:
                    seen[key] = (mark, *found)
        self._seen = seen
        self._is_settled = now_s - self._since_s > SETTLED_S


def _make_private(path: Path) -> None:
    """Create the folder, and missing ones above it, for this user only.

    Below a folder that everyone may write to, such as /tmp, the owner of a folder on the path could
    replace it, and every lease would be lost; such a folder is a ConfigError, and a link too.
    """
    path = path.absolute()
    is_open = False
    for folder in reversed(path.parents):
        folder.mkdir(mode=0o700, exist_ok=True)
        own = folder.lstat()
        mode = stat.S_IMODE(own.st_mode)
        is_writable = bool(mode & 0o022) and not mode & stat.S_ISVTX
        is_link, is_theirs = stat.S_ISLNK(own.st_mode), own.st_uid not in (0, os.getuid())
        if is_open and (is_link or is_theirs or is_writable):
            what = "is a link" if is_link else f"belongs to {own.st_uid} with mode {mode:04o}"
            raise ConfigError(
                f"discovery folder {path}: {folder} {what}, so other users could replace it; it "
                f"must be owned by user {os.getuid()} and not be writable by others: "
                "remove it, or set KVFLASH_DISCOVERY_DIR to another folder"
            )
        is_open = is_open or bool(folder.stat().st_mode & 0o002)
    path.mkdir(mode=0o700, exist_ok=True)


def _check_content(path: Path) -> None:
    """Refuse a folder with other content, which is used for something else."""
    found = sorted(entry.name for entry in path.iterdir())
    if found and _LEASES not in found:
        raise ConfigError(
            f"discovery folder {path} must be empty or created by kvflash; it contains "
            f"{found[0]!r}: set KVFLASH_DISCOVERY_DIR to a dedicated folder"
        )


def _read(path: Path) -> tuple[int, bytes] | None:
    """Lease and value in a key's file; None if it is deleted or not a key's file."""
    try:
        head, _, value = path.read_bytes().partition(b"\n")
        return int(head, 16), value
    except (FileNotFoundError, ValueError):
        return None
