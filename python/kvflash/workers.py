"""Lists the workers of a running service, and takes them out of service."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from kvflash.ask import Service, add_key_file, add_timeout
from kvflash.config import bounded_float
from kvflash.console import counted, refuse
from kvflash.errors import KvflashError, TransportError
from kvflash.flags import Flags
from kvflash.output import ended
from kvflash.spelling import did_you_mean
from kvflash.table import printable, table

_FRONTEND = ("WORKER", "URL", "MODEL", "ROLE", "STATE", "SENT", "BLOCKS", "EVENTS", "NOTE")
_ROUTER = ("WORKER", "URL", "MODEL", "TENANT", "STATE", "RUNNING", "BLOCKS", "EVENTS")
_INDEXER = ("WORKER", "MODEL", "TENANT", "STATE", "BLOCKS", "EVENTS", "TRUST")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the workers, or run the command before the URL: ``list``, ``drain``, ``resume``.

    Returns the exit status: 1 if the service can't be queried.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    word = argv[0] if argv else ""
    if word in STATES:
        return change(word, argv[1:])
    if word == "list":
        del argv[0]
    flags = Flags(
        "workers",
        "List the workers of a running service, and its warnings. "
        "'workers drain URL WORKER...' takes workers out of service, 'workers resume URL "
        "WORKER...' brings them back.",
        has_variables=False,
    )
    flags.add_positionals(
        "url", metavar="URL", summary="A frontend, a router or an indexer", nargs=None
    )
    flags.add_toggle("is_json", on=["--json"], summary="Print the answer of GET /workers unchanged")
    add_timeout(flags)
    add_key_file(flags)
    commands = ("list", *STATES)
    if word.isalpha() and word not in commands:
        # A host of such a name can be given as http://HOST, or alone if it is like no command.
        hint = did_you_mean(word, commands)
        has_next = len(argv) > 1 and not argv[1].startswith("-")
        if not hint and has_next:
            hint = f"; the commands are {', '.join(commands)}"
        if hint:
            flags.error(f"unknown command {word!r}{hint}")
    args = flags.parse(argv)
    try:
        service = Service(args)
        answer = service.demand("/workers")
        if args.is_json:
            print(answer.text)
            return 0
        lines = table(rows_of(answer.json))
        if len(lines) == 1:
            lines = ["no workers; POST /workers adds one"]
        health = service.ask("/health").fields
    except KvflashError as error:
        return refuse("workers", error)
    for line in (*lines, *(printable(f"warning: {one}") for one in warnings_of(health))):
        print(line)
    return 0


def rows_of(workers: Any) -> list[tuple[object, ...]]:
    """Column titles, and one row per worker in an answer of ``GET /workers``."""
    kinds = (
        (_INDEXER, "instance_id", _of_indexer),
        (_FRONTEND, "serves", _of_frontend),
        (_ROUTER, "worker_id", _of_router),
    )
    if isinstance(workers, list) and all(isinstance(one, dict) for one in workers):
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            for titles, key, row in kinds:
                if all(key in one for one in workers):
                    return [titles, *map(row, workers)]
    raise TransportError("GET /workers: the answer is not a list of workers; --json prints it")


def _of_frontend(worker: Mapping[str, Any]) -> tuple[object, ...]:
    capacity = worker.get("capacity_blocks")
    blocks = f"{worker.get('blocks')}/{capacity}" if capacity else worker.get("blocks")
    return (
        *map(worker.get, ("id", "url", "model", "role")),
        _state(worker, "healthy" if worker.get("healthy") else "unhealthy"),
        worker.get("requests"),
        blocks,
        _events(worker.get("listeners")),
        worker.get("last_error"),
    )


def _of_router(worker: Mapping[str, Any]) -> tuple[object, ...]:
    ranks = worker.get("ranks") or []
    return (
        *map(worker.get, ("worker_id", "url", "model_name", "tenant_id")),
        _state(worker, "busy" if worker.get("is_busy") else "free"),
        sum(rank.get("active_requests") or 0 for rank in ranks),
        worker.get("blocks"),
        _events([rank["listener"] for rank in ranks if rank.get("listener")]),
    )


def _of_indexer(worker: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        *map(worker.get, ("instance_id", "model_name", "tenant_id", "status", "blocks")),
        _events((worker.get("listeners") or {}).values()),
        (worker.get("trust") or {}).get("state"),
    )


def _state(worker: Mapping[str, Any], word: str) -> str:
    """The state of a worker; for a draining one, with its requests in flight."""
    if worker.get("state") != "draining":
        return word
    draining = f"draining ({worker.get('in_flight')} in flight)"
    return draining if word in ("healthy", "free") else f"{word}, {draining}"


def _events(listeners: Any) -> str:
    """The state of its event sockets: one word if all are the same."""
    states = [str(one.get("status")) for one in listeners or []]
    return ", ".join(sorted(set(states))) if states else "none"


def warnings_of(health: Mapping[str, Any]) -> Iterator[str]:
    """The warnings in an answer of ``GET /health``; a frontend's reasons are among them."""
    warnings = health.get("warnings")
    yield from map(str, warnings if isinstance(warnings, list) else [])


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
    flags.add_positionals("ids", metavar="WORKER", summary="Worker ids as in GET /workers")
    if word == "drain":
        flags.add(
            "--wait",
            parse=bounded_float(0, 86_400),
            default=0.0,
            metavar="SECONDS",
            summary="Wait up to this long until no request is in flight there",
        )
    add_timeout(flags)
    add_key_file(flags)
    args = flags.parse(argv)
    wait_s = args.wait if word == "drain" else 0.0
    try:
        service = Service(args)
        left = {}
        for one in args.ids:
            path = f"/workers/{quote(one, safe='')}"
            left[path] = _said(one, service.demand(path, {"state": STATES[word]}, "PATCH").fields)
        if wait_s:
            return _wait(service, left, wait_s)
    except KvflashError as error:
        return refuse("workers", error)
    return 0


def _said(worker: str, entry: Mapping[str, Any]) -> int:
    """Print a worker's new state; returns its requests in flight."""
    count = entry.get("in_flight")
    count = count if isinstance(count, int) else 0
    requests = counted(count, "request", "requests")
    print(printable(f"worker {worker}: {entry.get('state')}, {requests} in flight"))
    return count


def _wait(service: Service, left: dict[str, int], wait_s: float) -> int:
    """Wait until none of them has a request in flight, or the time is over."""
    end = time.monotonic() + wait_s
    while busy := [path for path, count in left.items() if count]:
        if time.monotonic() >= end:
            return 1
        time.sleep(min(_PAUSE_S, max(0.0, end - time.monotonic())))
        for path in busy:
            entry = service.demand(path).fields
            if entry.get("in_flight") != left[path]:
                left[path] = _said(path.rpartition("/")[2], entry)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
