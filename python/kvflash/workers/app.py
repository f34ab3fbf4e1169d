"""Requests the list of workers, and prints it as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvflash.ask import add_key_file, add_timeout, ask, demand, parse_url, read_key
from kvflash.console import refuse
from kvflash.errors import KvflashError, TransportError
from kvflash.flags import Flags
from kvflash.table import printable, table
from kvflash.workers.state import STATES, change

_FRONTEND = ("WORKER", "URL", "MODEL", "ROLE", "STATE", "REQUESTS", "BLOCKS", "EVENTS", "NOTE")
_ROUTER = ("WORKER", "URL", "MODEL", "TENANT", "STATE", "REQUESTS", "BLOCKS", "EVENTS")
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
        "'workers drain URL WORKER...' takes some out of service, 'workers resume' back into it.",
        has_variables=False,
    )
    flags.add_positionals(
        "url", metavar="URL", summary="A frontend, a router or an indexer", nargs=None
    )
    flags.add_switch(
        "--json", dest="is_json", value=True, summary="Print the answer of GET /workers unchanged"
    )
    add_timeout(flags)
    add_key_file(flags)
    args = flags.parse(argv)
    try:
        url, key = parse_url(args.url), read_key(args.service_key_file)
        answer = demand(url, "/workers", timeout_s=args.timeout, api_key=key)
        if args.is_json:
            print(answer.text)
            return 0
        lines = table(rows_of(answer.json))
        if len(lines) == 1:
            lines = ["no workers; POST /workers adds one"]
        health = ask(url, "/health", timeout_s=args.timeout, api_key=key).json
    except KvflashError as error:
        return refuse("workers", error)
    for line in (*lines, *(printable(f"warning: {one}") for one in warnings_of(health))):
        print(line)
    return 0


def rows_of(workers: Any) -> list[tuple[object, ...]]:
    """Column titles, and one row per worker in an answer of ``GET /workers``.

    Raises:
        TransportError: Not such an answer.
    """
    if not isinstance(workers, list) or not all(isinstance(one, dict) for one in workers):
        raise TransportError("GET /workers: the answer is not a list of workers; --json prints it")
    kinds = (
        (_INDEXER, "instance_id", _of_indexer),
        (_FRONTEND, "serves", _of_frontend),
        (_ROUTER, "worker_id", _of_router),
    )
    for titles, key, row in kinds:
        if all(key in one for one in workers):
            try:
                return [titles, *map(row, workers)]
            except (AttributeError, KeyError, TypeError):
                break
    raise TransportError("GET /workers: the answer is not a list of workers; --json prints it")


def _of_frontend(worker: Mapping[str, Any]) -> tuple[object, ...]:
    capacity = worker.get("capacity_blocks")
    blocks = f"{worker.get('blocks')}/{capacity}" if capacity else worker.get("blocks")
    return (
        worker.get("id"),
        worker.get("url"),
        worker.get("model"),
        worker.get("role"),
        _state(worker, "healthy" if worker.get("healthy") else "unhealthy"),
        worker.get("requests"),
        blocks,
        _events(worker.get("listeners")),
        worker.get("last_error"),
    )


def _of_router(worker: Mapping[str, Any]) -> tuple[object, ...]:
    ranks = worker.get("ranks") or []
    return (
        worker.get("worker_id"),
        worker.get("url"),
        worker.get("model_name"),
        worker.get("tenant_id"),
        _state(worker, "busy" if worker.get("is_busy") else "free"),
        sum(rank.get("active_requests") or 0 for rank in ranks),
        worker.get("blocks"),
        _events([rank["listener"] for rank in ranks if rank.get("listener")]),
    )


def _of_indexer(worker: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        worker.get("instance_id"),
        worker.get("model_name"),
        worker.get("tenant_id"),
        worker.get("status"),
        worker.get("blocks"),
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


def warnings_of(health: Any) -> Iterator[str]:
    """The warnings in an answer of ``GET /health``."""
    found = health if isinstance(health, dict) else {}
    yield from map(str, found.get("warnings") or [])
    for reason in filter(lambda one: isinstance(one, dict), found.get("reasons") or []):
        yield f"worker {reason.get('worker')}: {reason.get('message')}; {reason.get('fix')}"
