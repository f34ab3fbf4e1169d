"""Rules for schemathesis on the router: how to write msgpack, and rules beyond the schema."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

import schemathesis

import openapi_hooks  # registers how msgpack is written and whole numbers are kept

_CHOOSE = ("/select", "/reserve", "/explain", "/potential_loads")
# They read the same body: each gets a quarter of its boundary values.
_SHARED = 1 if "KVFLASH_SCHEMA_EXAMPLES" in os.environ else len(_CHOOSE)
_seen: Counter[str] = Counter()
_OF_A_ROUTER = {
    *("worker_id", "dp_rank", "router_id"),
    *("active_decode_blocks", "active_prefill_tokens"),
}


@schemathesis.hook
def filter_case(ctx: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    if case.path not in _CHOOSE or case.meta.phase.name.value != "coverage":
        return True
    _seen[case.path] += 1
    return _seen[case.path] % _SHARED == _CHOOSE.index(case.path) % _SHARED


@schemathesis.hook
def before_call(ctx: schemathesis.HookContext, case: schemathesis.Case, kwargs: Any) -> None:
    """Addresses are searched on this machine, which has none; fields depend on each other."""
    body = case.body
    if not isinstance(body, dict):
        return
    openapi_hooks.fit_media(body)
    if "block_hashes" in body:
        # Its range depends on them, and they on the block size.
        body.pop("isl_tokens", None)
        body["model_name"], body["tenant_id"] = "m", "default"
    if case.path in ("/", *_CHOOSE) and body.get("model_name") is None:
        # Several models have workers.
        body["model_name"] = "m"
    if case.path == "/" and body.get("request_id") is None:
        case.headers["x-request-id"] = "r"
    if body.get("worker_id") is None:
        # A rank is somebody's.
        body.pop("dp_rank", None)
    if case.path == "/report_load" and body.get("router_id") is not None:
        for field in set(body) - _OF_A_ROUTER:
            del body[field]
    if case.path == "/workers":
        _make_whole(body)
        if body.get("model_name") == "m" and body.get("block_size") is None:
            # Somebody has to tell it before hashes are asked for.
            body["block_size"] = 4
    for field in ("request_id", "user", "session_key"):
        name = body.get(field)
        if isinstance(name, str) and name:
            # Its limit is of bytes.
            body[field] = re.sub(r"[^ -~]", "x", name)


def _make_whole(body: dict[str, Any]) -> None:
    """One way of naming sockets, for ranks that are there."""
    size = body.get("dp_size", 1)
    if isinstance(size, int) and not isinstance(size, bool) and size > 1 and body.get("endpoint"):
        body["dp_size"] = size = 1
    if body.get("endpoint") is None:
        body.pop("replay_endpoint", None)
    elif isinstance(body.get("events"), dict):
        body["events"] = {}
    events = body.get("events")
    if isinstance(events, dict) and isinstance(size, int):
        for rank in [rank for rank in events if rank.isdecimal() and int(rank) >= size]:
            del events[rank]
    for place in [body, *(events.values() if isinstance(events, dict) else [])]:
        for field in ("endpoint", "replay_endpoint"):
            address = place.get(field) if isinstance(place, dict) else None
            if isinstance(address, str) and re.fullmatch(r"tcp://[^/]+:\d+", address):
                place[field] = "tcp://127.0.0.1:1"
