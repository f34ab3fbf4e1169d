"""The key file: one writer at a time; readers never see a partial file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvflash._core import check_keys
from kvflash.errors import ConfigError, NotFoundError


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Id and line of each key."""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield stripped.partition(":")[0], stripped


def first_salt(text: str) -> str | None:
    """The salt of the first key that has one: keys with the same salt share one lookup."""
    for _, line in entries(text):
        kind, _, rest = line.partition(":")[2].partition("$")
        if kind == "sha256":
            return rest.partition("$")[0]
    return None


def append_line(path: Path, make: Callable[[str], str]) -> None:
    """Add the line that ``make`` creates from the current text; a new file has mode 600.

    Raises:
        ConfigError: The file can't be written, or no service could read the result.
    """

    def added(text: str) -> str:
        begun = text if not text or text.endswith("\n") else text + "\n"
        return f"{begun}{make(text)}\n"

    _change(path, added, is_made=True)


def remove_line(path: Path, key_id: str) -> None:
    """Remove a key; comments stay.

    Raises:
        NotFoundError: The key does not exist.
        ConfigError: The file can't be read or written.
    """

    def removed(text: str) -> str:
        known = [one for one, _ in entries(text)]
        if key_id not in known:
            listed = ", ".join(known[:20]) or "none"
            raise NotFoundError(f"{path} has no key {key_id!r}; its keys are: {listed}")
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if [one for one, _ in entries(line)] != [key_id])

    _change(path, removed, is_made=False)


def _change(path: Path, change: Callable[[str], str], *, is_made: bool) -> None:
    try:
        with _locked(path, is_made=is_made) as descriptor:
            with open(descriptor, encoding="utf-8", closefd=False) as file:
                text = change(file.read())
            check_keys(text)
            mode = os.fstat(descriptor).st_mode & 0o777
            # A new file, renamed into place: it has its own random name, as a waiting writer may
            # start at once.
            # renamed.
            made, anew = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                os.fchmod(made, mode)
                with os.fdopen(made, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(made)
                Path(anew).replace(path)
            except BaseException:
                Path(anew).unlink(missing_ok=True)
                raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys-file {path}: {error}") from None


@contextlib.contextmanager
def _locked(path: Path, *, is_made: bool) -> Iterator[int]:
    """The file, locked against other writers."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_made else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                # Another writer may have replaced the file while this one waited.
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    yield descriptor
                    return
        finally:
            os.close(descriptor)
