"""Rules for schemathesis on the indexer: how to write msgpack, and addresses not to dial."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgpack
import schemathesis

_LARGEST = int(sys.float_info.max)
_U32 = (1 << 32) - 1


@schemathesis.serializer("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
def write_msgpack(ctx: schemathesis.SerializationContext, value: Any) -> bytes:
    return msgpack.packb(_plain(value), use_bin_type=True)


def _plain(value: Any) -> Any:
    """Binaries come wrapped, of any length; msgpack has no integers beyond 64 bits."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(max(-_LARGEST, min(value, _LARGEST)))
    data = getattr(value, "data", value)
    return data[: len(data) // 8 * 8] if isinstance(data, bytes) else data


@schemathesis.hook
def map_body(ctx: schemathesis.HookContext, body: Any) -> Any:
    """Send integers as such: 1.0 is an integer for a schema, but not for the API."""
    return _whole(body)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # JSON parsers do not accept numbers outside of doubles.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return max(-_LARGEST, min(value, _LARGEST)) if is_number else value


@schemathesis.hook
def before_call(ctx: schemathesis.HookContext, case: schemathesis.Case, kwargs: Any) -> None:
    """Rules beyond the schema: salts that agree, sums and multiples, lengths in bytes.

    Legal addresses of engines are searched on this machine, which has none.
    """
    if isinstance(case.body, dict):
        fit_media(case.body)
        if _is_positive_u32(case.body.get("block_size")) and _is_positive_u32(
            case.body.get("offload_chunk")
        ):
            case.body["offload_chunk"] = case.body["block_size"]
        salts = [case.body.get(name) for name in ("cache_salt", "additional_salt")]
        if all(isinstance(salt, str) for salt in salts):
            case.body["additional_salt"] = salts[0]
        for field in ("endpoint", "replay_endpoint"):
            address = case.body.get(field)
            if isinstance(address, str) and re.fullmatch(r"tcp://[^/]+:\d+", address):
                case.body[field] = "tcp://127.0.0.1:1"


def fit_media(body: dict[str, Any]) -> None:
    """Items end within u32, and the limit of their identifiers is of bytes."""
    items = body.get("mm")
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, dict):
            continue
        if _is_positive_u32(item.get("offset")) and _is_positive_u32(item.get("length")):
            item["length"] = min(item["length"], _U32 - item["offset"])
        if isinstance(item.get("identifier"), str):
            item["identifier"] = re.sub(r"[^ -~]", "x", item["identifier"])


def _is_positive_u32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _U32
