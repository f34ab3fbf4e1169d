"""Values of workers' keys in discovery, validated on arrival.

::

    v1/instances/namespace/component/endpoint/number
    v1/models/namespace/component/endpoint/number
    v1/events/namespace/component/number/rank
"""

import json
from typing import Any

from kvflash.errors import DecodeError

PARTS = 6
NUMBER_MAX, RANK_MAX = 2**64 - 1, 2**32 - 1
# Fields used by this package, by kind: a wrong type would otherwise fail far from its key.
_TYPES: dict[str, dict[str, type]] = {
    "instances": {"transport": dict, "state": str},
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
    """Decode a key's value; DecodeError says why it names no worker or is malformed."""
    kind = key_kind(key)
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DecodeError(f"must be an object, got {value[:80]!r}")
    _check(fields, _TYPES[kind], "")
    if (needed := _NEEDED.get(kind)) is not None and fields.get(needed) is None:
        raise DecodeError(f"has no {needed}")
    if kind == "instances":
        _check(fields["transport"], _TRANSPORT, "transport.")
    return fields


def key_kind(key: str) -> str:
    """The kind of a worker's key; DecodeError if it names no worker."""
    parts = key.split("/")
    kind = parts[1] if len(parts) == PARTS else ""
    if kind not in _TYPES:
        raise DecodeError("is not the key of a worker")
    worker, rank = parts[-2:] if kind == "events" else (parts[-1], "0")
    if not (_is_number(worker, NUMBER_MAX) and _is_number(rank, RANK_MAX)):
        raise DecodeError("does not end with numbers of a worker or rank")
    return kind


def _is_number(text: str, number_max: int) -> bool:
    # Python refuses to read thousands of digits.
    digits = len(str(NUMBER_MAX))
    return text.isascii() and text.isdecimal() and len(text) <= digits and int(text) <= number_max


def _check(fields: dict[str, Any], types: dict[str, type], path: str) -> None:
    """Refuse fields of a wrong type; each field may be missing or null."""
    for name, kind in types.items():
        field = fields.get(name)
        if field is not None and (not isinstance(field, kind) or isinstance(field, bool)):
            raise DecodeError(f"{path}{name} must be of type {kind.__name__}, got {field!r}")
