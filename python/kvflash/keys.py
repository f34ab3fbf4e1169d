"""Adds, lists and removes the API keys of a service.

One process writes the file at a time, and readers never see a partial file.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvflash._core import check_key, check_keys
from kvflash.config import bounded_int
from kvflash.console import reason_of, refuse
from kvflash.errors import ConfigError, ConflictError, KvflashError, NotFoundError
from kvflash.flags import Flags
from kvflash.output import ended
from kvflash.table import table

_ACTIONS = ("add", "list", "remove")
_OPTIONS = ("tenant", "rpm", "tpm", "concurrency", "isolate", "allow")


def main(argv: Sequence[str] | None = None) -> int:
    """Change or list a key file. Returns the exit status."""
    flags = _flags()
    args = flags.parse(argv)
    if not args.keys_file:
        flags.error("name the file: --keys-file FILE, or KVFLASH_KEYS_FILE")
    if args.action not in _ACTIONS:
        flags.error(f"the action must be one of {', '.join(_ACTIONS)}, got {args.action!r}")
    if (args.id is None) != (args.action == "list"):
        flags.error("add and remove need the id of a key; list takes none")
    given = [
        one for one in ("role", "certificate", *_OPTIONS) if getattr(args, one) not in (None, False)
    ]
    if args.action != "add" and given:
        flags.error(f"--{given[0]} works only with add")
    if args.action == "add" and args.role is None:
        flags.error("add needs --role admin, client or metrics")
    path = Path(args.keys_file)
    try:
        if args.action == "add":
            _add(path, args)
        elif args.action == "remove":
            remove_line(path, args.id)
            print(f"removed {args.id}; services that read {path} refuse the key within a second")
        else:
            _list(path)
    except KvflashError as error:
        return refuse("keys", error)
    return 0


def _add(path: Path, args: argparse.Namespace) -> None:
    options = {
        name: f"{name}={'true' if value is True else value}"
        for name in _OPTIONS
        if (value := getattr(args, name)) not in (None, False)
    }
    # One by one, as a refusal of the whole file would not say which argument is at fault.
    parts = {"ID": f"{args.id}:certificate:client"}
    parts |= {f"--{name}": f"id:certificate:{args.role}:{one}" for name, one in options.items()}
    if ":" in args.id:
        why = f"an id must be without a colon, got {args.id!r}"
        raise ConfigError(f"ID is not valid, and {path} is unchanged: {why}")
    for argument, part in parts.items():
        check_key(part, f"{argument} is not valid, and {path} is unchanged")

    def line(secret: str) -> str:
        return ":".join((args.id, secret, args.role, *filter(None, [",".join(options.values())])))

    if args.certificate:
        append_line(path, lambda _: line("certificate"))
        print(f"added {args.id} to {path}: a client certificate with this DNS name replaces a key")
        return
    key = f"kvf_{secrets.token_urlsafe(32)}"

    def hashed(text: str) -> str:
        # 256 random bits need no slow hash; with one salt for all keys a lookup takes one hash.
        hashes = (one.partition(":")[2] for _, one in entries(text))
        salts = (one.split("$")[1] for one in hashes if one.startswith("sha256$"))
        salt = next(salts, None) or secrets.token_hex(16)
        digest = hashlib.sha256(bytes.fromhex(salt) + key.encode()).hexdigest()
        return line(f"sha256${salt}${digest}")

    append_line(path, hashed)
    try:
        if sys.stdout is None:
            raise OSError(errno.EIO, "it is closed")
        print(f"added {args.id} to {path}; its key, shown only once:", file=sys.stderr)
        print(key, flush=True)
    except OSError:
        # It is useless without its key.
        remove_line(path, args.id)
        with contextlib.suppress(OSError):
            print(f"removed {args.id} again: its key could not be shown", file=sys.stderr)
        raise


def _list(path: Path) -> None:
    try:
        with path.open(encoding="utf-8") as file:
            _check_mode(file.fileno(), path)
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        step = "; kvflash keys add makes it" if isinstance(error, FileNotFoundError) else ""
        why = f"can't be read: {reason_of(error)}{step}"
        raise KvflashError(f"--keys-file {path}: {why}") from None
    check_keys(text, f"--keys-file {path}")
    rows: list[tuple[object, ...]] = [("ID", "ROLE", "OPTIONS")]
    for key_id, line in entries(text):
        _, _, role, options = (*line.split(":", 3), "", "", "")[:4]
        rows.append((key_id, role, options))
    for row in table(rows):
        print(row)


def _flags() -> Flags:
    flags = Flags(
        "keys",
        "Add, list or remove the keys of a frontend, a router or an indexer. A service "
        "rereads its --keys-file within a second of a change.",
        has_variables=False,
    )
    flags.add_positionals("action", metavar="add|list|remove", summary="The action", nargs=None)
    flags.add_positionals("id", metavar="ID", summary="The key's name in logs", nargs="?")
    flags.add(
        "--keys-file",
        metavar="FILE",
        variables=("KVFLASH_KEYS_FILE",),
        summary="The file, else that of KVFLASH_KEYS_FILE; created with mode 600 if it does "
        "not exist",
    )
    flags.add("--role", choices=("admin", "client", "metrics"), summary="Role of the key")
    flags.add_toggle(
        "certificate",
        on=["--certificate"],
        summary="Create no key: the client presents a certificate with ID among its DNS names",
    )
    flags.add("--tenant", metavar="NAME", summary="Tenant of the client")
    positive = bounded_int(1, 2**63 - 1)
    flags.add("--rpm", parse=positive, metavar="COUNT", summary="Requests per minute")
    flags.add(
        "--tpm",
        parse=positive,
        metavar="TOKENS",
        summary="Uncached prompt tokens per minute",
    )
    flags.add(
        "--concurrency", parse=positive, metavar="COUNT", summary="Requests in flight at once"
    )
    flags.add_toggle(
        "isolate", on=["--isolate"], summary="Share no cached block with other tenants"
    )
    flags.add(
        "--allow",
        metavar="FIELD|...",
        summary="Fields that pass through to engines, such as kv_transfer_params|priority",
    )
    return flags


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Id and line of each key."""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield stripped.partition(":")[0], stripped


def append_line(path: Path, make: Callable[[str], str]) -> None:
    """Add the line that ``make`` creates from the current text; a new file has mode 600."""

    def added(text: str) -> str:
        begun = text if not text or text.endswith("\n") else text + "\n"
        line = make(text)
        key_id = line.partition(":")[0]
        if key_id in (known for known, _ in entries(text)):
            raise ConflictError(
                f"{path} already has a key {key_id!r}; remove it, or choose another id"
            )
        return f"{begun}{line}\n"

    _change(path, added, is_made=True)


def remove_line(path: Path, key_id: str) -> None:
    """Remove a key; comments stay."""

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
            _check_mode(descriptor, path)
            with open(descriptor, encoding="utf-8", closefd=False) as file:
                text = change(file.read())
            check_keys(text, f"--keys-file {path}")
            status = os.fstat(descriptor)
            # A symbolic link stays.
            target = path.resolve()
            # A new file, renamed into place: it has its own random name, as a waiting writer may
            # start at once.
            made, anew = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(made, "w", encoding="utf-8") as file:
                    _give(made, status)
                    file.write(text)
                    file.flush()
                    os.fsync(made)
                Path(anew).replace(target)
            except BaseException:
                Path(anew).unlink(missing_ok=True)
                raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys-file {path}: can't be changed: {reason_of(error)}") from None


def _check_mode(descriptor: int, path: Path) -> None:
    """Refuse a file that services refuse: they would not notice what is changed in it."""
    mode = os.fstat(descriptor).st_mode & 0o777
    if mode & 0o002:
        why = f"every user may write to it (mode {mode:o}), so services refuse it: run chmod 600"
        raise ConfigError(f"--keys-file {path}: {why}")


def _give(made: int, status: os.stat_result) -> None:
    """Give a new file the owner and mode of the one that it replaces, so that services read it."""
    try:
        os.fchown(made, status.st_uid, status.st_gid)
    except PermissionError as error:
        what = f"owner {status.st_uid}:{status.st_gid}; run this as that user or as root"
        if status.st_uid == os.geteuid():
            what = f"group {status.st_gid}; run this as a member of it or as root"
        # A group that can't read the file loses nothing.
        if status.st_uid != os.geteuid() or status.st_mode & 0o070:
            raise PermissionError(error.errno, f"can't keep its {what}") from None
    os.fchmod(made, status.st_mode & 0o777)


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


if __name__ == "__main__":
    sys.exit(ended(main))
