"""Event endpoints that workers announce."""

from __future__ import annotations

from typing import Any

__all__ = ["announced", "is_brokered"]


def announced(events: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A worker's announced event endpoints, by rank, in the core's format."""
    return {
        str(rank): {key: where.get(key) for key in ("endpoint", "replay_endpoint")}
        for rank, where in events.items()
    }


def is_brokered(where: dict[str, Any]) -> bool:
    """Whether a broker carries these events."""
    return str(where.get("endpoint")).partition("://")[0] in ("jetstream", "nats")
