"""Workers of a core as discovery tells of them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvflash._core import RouterCore


def found(number: int, events: Mapping[int, str] | None = None, **card: Any) -> str:
    """A worker with one rank, and its event endpoints by rank."""
    return json.dumps(
        {
            "id": number,
            "plane": {"kind": "tcp", "address": "nowhere:1"},
            "endpoint": "ns/backend/generate",
            "card": {"model_name": "m", **card},
            "events": {rank: {"endpoint": where} for rank, where in (events or {}).items()},
        }
    )


def join(core: RouterCore, numbers: Iterable[int], **card: Any) -> None:
    """Give a core workers."""
    for number in numbers:
        core.put_worker(found(number, **card))
