"""Creates, lists and removes keys."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from kvflash.config import bounded_int
from kvflash.console import refuse
from kvflash.errors import KvflashError
from kvflash.flags import Flags, variable_of
from kvflash.keys.file import append_line, entries, first_salt, remove_line
from kvflash.table import table

_ACTIONS = ("add", "list", "remove")
_OPTIONS = ("tenant", "rpm", "tpm", "concurrency", "isolate", "allow")


def main(argv: Sequence[str] | None = None) -> int:
    """Change or list a key file. Returns the exit status."""
    flags = _flags()
    args = flags.parse(argv)
    name: str = args.keys_file or os.environ.get(variable_of("--keys-file"), "")
    if not name:
        flags.error(f"name the file: --keys-file FILE, or {variable_of('--keys-file')}")
    if args.action not in _ACTIONS:
        flags.error(f"the action must be one of {', '.join(_ACTIONS)}, got {args.action!r}")
    if (args.id is None) != (args.action == "list"):
        flags.error("add and remove need the id of a key, list takes none")
    given = [
        one for one in ("role", "certificate", *_OPTIONS) if getattr(args, one) not in (None, False)
    ]
    if args.action != "add" and given:
        flags.error(f"--{given[0]} goes with add only")
    if args.action == "add" and args.role is None:
        flags.error("add needs --role admin, client or metrics")
    path = Path(name)
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
    values = {one: getattr(args, one) for one in _OPTIONS}
    options = ",".join(
        f"{name}={'true' if value is True else value}"
        for name, value in values.items()
        if value not in (None, False)
    )

    def line(secret: str) -> str:
        return ":".join((args.id, secret, args.role, *filter(None, [options])))

    if args.certificate:
        append_line(path, lambda _: line("certificate"))
        print(f"added {args.id} to {path}: a client certificate with this DNS name replaces a key")
        return
    key = f"kvf_{secrets.token_urlsafe(32)}"

    def hashed(text: str) -> str:
        # 256 random bits need no slow hash; with one salt for all keys a lookup takes one hash.
        salt = first_salt(text) or secrets.token_hex(16)
        digest = hashlib.sha256(bytes.fromhex(salt) + key.encode()).hexdigest()
        return line(f"sha256${salt}${digest}")

    append_line(path, hashed)
    print(f"added {args.id} to {path}; its key, which is kept nowhere:", file=sys.stderr)
    print(key)


def _list(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvflashError(f"--keys-file {path}: {error}") from None
    rows: list[tuple[object, ...]] = [("ID", "ROLE", "OPTIONS")]
    for key_id, line in entries(text):
        _, _, role, options = (*line.split(":", 3), "", "", "")[:4]
        rows.append((key_id, role, options))
    for row in table(rows):
        print(row)


def _flags() -> Flags:
    flags = Flags(
        "keys",
        "Make the keys of a frontend, a router or an indexer, list or remove them. A service reads "
        "its --keys-file again within a second of a change.",
        has_variables=False,
    )
    flags.add_positionals("action", metavar="add|list|remove", summary="The action", nargs=None)
    flags.add_positionals("id", metavar="ID", summary="The key's name in logs", nargs="?")
    flags.add(
        "--keys-file",
        parse=str,
        default=None,
        metavar="FILE",
        summary="The file; else that of KVFLASH_KEYS_FILE. Made with mode 600 if it is not there",
    )
    flags.add(
        "--role",
        parse=str,
        choices=("admin", "client", "metrics"),
        default=None,
        summary="Role of the key",
    )
    flags.add_switch(
        "--certificate",
        dest="certificate",
        value=True,
        summary="Make no key: the client shows a certificate with ID among its DNS names",
    )
    flags.add("--tenant", parse=str, default=None, metavar="NAME", summary="Tenant of the client")
    positive = bounded_int(1, 2**63 - 1)
    flags.add("--rpm", parse=positive, default=None, metavar="COUNT", summary="Requests a minute")
    flags.add(
        "--tpm",
        parse=positive,
        default=None,
        metavar="TOKENS",
        summary="Prompt tokens a minute that no cache held",
    )
    flags.add(
        "--concurrency",
        parse=positive,
        default=None,
        metavar="COUNT",
        summary="Requests in flight at once",
    )
    flags.add_switch(
        "--isolate", dest="isolate", value=True, summary="Share no cached block with other tenants"
    )
    flags.add(
        "--allow",
        parse=str,
        default=None,
        metavar="FIELD|...",
        summary="Fields that pass through to engines, such as kv_transfer_params|priority",
    )
    return flags
