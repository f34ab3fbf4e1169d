"""Drains workers, and puts them back into service."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from kvflash.ask import add_key_file, add_timeout, demand, parse_url, read_key
from kvflash.config import bounded_float
from kvflash.console import refuse
from kvflash.errors import KvflashError
from kvflash.flags import Flags
from kvflash.table import printable

#: The state that each command sets.
STATES = {"drain": "draining", "resume": "active"}
_ABOUT = {
    "drain": "Take workers out of service: no new requests, their blocks stay.",
    "resume": "Bring workers back into service.",
}
_PAUSE_S = 0.5


def change(word: str, argv: Sequence[str]) -> int:
    """Change the state of workers. Returns the exit status.

    1 if the service can't be queried, or a worker still has requests after ``--wait``.
    """
    flags = Flags(f"workers {word}", _ABOUT[word], has_variables=False)
    flags.add_positionals("url", metavar="URL", summary="A frontend or a router", nargs=None)
    flags.add_positionals("ids", metavar="WORKER", summary="Numbers as GET /workers has them")
    if word == "drain":
        flags.add(
            "--wait",
            parse=bounded_float(0, 86_400),
            default=0.0,
            metavar="SECONDS",
            summary="Wait so long until no request is in flight there",
        )
    add_timeout(flags)
    add_key_file(flags)
    args = flags.parse(argv)
    wait_s = args.wait if word == "drain" else 0.0
    try:
        url, key = parse_url(args.url), read_key(args.service_key_file)
        left = {}
        for one in args.ids:
            path = f"/workers/{quote(one, safe='')}"
            body = {"state": STATES[word]}
            answer = demand(
                url, path, timeout_s=args.timeout, api_key=key, body=body, method="PATCH"
            )
            left[path] = _said(one, answer.json)
        if wait_s:
            return _wait(url, left, wait_s=wait_s, timeout_s=args.timeout, key=key)
    except KvflashError as error:
        return refuse("workers", error)
    return 0


def _said(worker: str, entry: Any) -> int:
    """Print a worker's new state; returns its requests in flight."""
    fields = entry if isinstance(entry, dict) else {}
    count = fields.get("in_flight")
    count = count if isinstance(count, int) else 0
    requests = "1 request" if count == 1 else f"{count} requests"
    print(printable(f"worker {worker}: {fields.get('state')}, {requests} in flight"))
    return count


def _wait(
    url: str, left: dict[str, int], *, wait_s: float, timeout_s: float, key: str | None
) -> int:
    """Wait until none of them has a request in flight, or the time is over."""
    end = time.monotonic() + wait_s
    while busy := [path for path, count in left.items() if count]:
        if time.monotonic() >= end:
            return 1
        time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))
        for path in busy:
            entry = demand(url, path, timeout_s=timeout_s, api_key=key).json
            count = entry.get("in_flight") if isinstance(entry, dict) else None
            if count != left[path]:
                left[path] = _said(path.rpartition("/")[2], entry)
    return 0
