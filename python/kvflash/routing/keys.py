"""What discovery's keys say of workers, checked where it comes in.

::

    v1/instances/namespace/component/endpoint/number
    v1/models/namespace/component/endpoint/number
    v1/events/namespace/component/number/rank
"""

from __future__ import annotations

import json
from typing import Any

from kvflash.errors import DecodeError

__all__ = ["read_key"]

PARTS = 6
NUMBER_MAX, RANK_MAX = 2**64 - 1, 2**32 - 1
# Fields that are used here, by kind: another type of theirs would be met far from its key.
_TYPES: dict[str, dict[str, type]] = {
    "instances": {"transport": dict},
    "models": {
        "model_name": str,
        "model_type": list,
        "dp_size": int,
        "kv_cache_block_size": int,
        "total_kv_blocks": int,
        "max_num_batched_tokens": int,
    },
    "events": {"endpoint": str, "replay_endpoint": str, "block_size": int},
}
_NEEDED = {"instances": "transport", "events": "endpoint"}
_TRANSPORT: dict[str, type] = {"kind": str, "address": str, "url": str, "subject": str}


def read_key(key: str, value: bytes) -> dict[str, Any]:
    """A key's value.

    Raises:
        DecodeError: The key names no worker, or the value is not what it should be; says what.
    """
    parts = key.split("/")
    kind = parts[1] if len(parts) == PARTS else ""
    if kind not in _TYPES:
        raise DecodeError("is no key of a worker")
    worker, rank = parts[-2:] if kind == "events" else (parts[-1], "0")
    if not (_is_number(worker, NUMBER_MAX) and _is_number(rank, RANK_MAX)):
        raise DecodeError("does not end with numbers of a worker or rank")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DecodeError(f"must be an object, got {value[:80]!r}")
    _check(fields, _TYPES[kind], "")
    if (needed := _NEEDED.get(kind)) is not None and fields.get(needed) is None:
        raise DecodeError(f"has no {needed}")
    if kind == "instances":
        _check(fields["transport"], _TRANSPORT, "transport.")
    return fields


def _is_number(text: str, number_max: int) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= number_max


def _check(fields: dict[str, Any], types: dict[str, type], path: str) -> None:
    """Refuse fields of another type; each may be missing or null."""
    for name, kind in types.items():
        field = fields.get(name)
        if field is not None and (not isinstance(field, kind) or isinstance(field, bool)):
            raise DecodeError(f"{path}{name} must be of type {kind.__name__}, got {field!r}")
