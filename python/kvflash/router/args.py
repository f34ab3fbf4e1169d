"""Flags of the standalone router."""

import argparse
from collections.abc import Sequence
from typing import Any

from kvflash.config import is_whole
from kvflash.errors import ConfigError
from kvflash.flags import Flags, source_of
from kvflash.router_flags import RoutingArgs, parse
from kvflash.settings import of_table

# The most important flags, in the order of the help.
_FIRST = """
    --config --worker --model-name --endpoint --kv-cache-block-size --host --port --router-mode
    --router-replica-sync --log-level
"""


@of_table("router")
class RouterArgs(RoutingArgs):
    """The router's settings, one per flag; see ``--help``."""

    workers: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            parse_endpoint(self.endpoint)
        if not self.model_name:
            raise ConfigError("--model-name must not be empty")
        # Replicas find each other through discovery even if there is no endpoint in it.
        has_discovery = self.endpoint is not None or self.router_replica_sync
        self.check_cluster(has_discovery=has_discovery, needs="--endpoint")


def parse_endpoint(text: str) -> tuple[str, str, str]:
    """Parse ``namespace.component.endpoint``."""
    parts = text.split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(
            f"--endpoint must be namespace.component.endpoint, exactly three parts, got {text!r}"
        )
    return parts[0], parts[1], parts[2]


def _endpoint(text: str) -> str:
    try:
        parse_endpoint(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--endpoint ")) from None
    return text


def parse_worker(text: str) -> dict[str, Any]:
    """Parse ``URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]``; errors name the part.

    The result is a body of POST /workers without model and tenant, and with a worker_id of None if
    none is given. The addresses are those of rank 0's sockets; rank r is at their port + r.
    """
    source = f"{source_of('--worker', text)} {text!r}"
    url, *parts = (part.strip() for part in text.split(","))
    if not url or "=" in url.partition("://")[0]:
        raise ConfigError(f"{source}: the address of the worker comes first")
    given: dict[str, str] = {}
    for part in parts:
        key, separator, value = part.partition("=")
        if key not in ("events", "replay", "id", "dp") or not separator or not value:
            raise ConfigError(
                f"{source}: {part!r} is not key=value with one of events, replay, id, dp"
            )
        if key in given:
            raise ConfigError(f"{source}: {key} appears twice")
        given[key] = value

    def number(key: str, low: int, high: int) -> int | None:
        value = given.get(key)
        if value is None:
            return None
        if not is_whole(value, low, high):
            raise ConfigError(f"{source}: {key} must be a number in {low}..={high}, got {value!r}")
        return int(value)

    return {
        "url": url,
        "worker_id": number("id", 0, 2**64 - 1),
        "dp_size": number("dp", 1, 1_024) or 1,
        "endpoint": given.get("events"),
        "replay_endpoint": given.get("replay"),
    }


def parse_args(argv: Sequence[str] | None = None) -> RouterArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: A worker is malformed.
    """
    flags = Flags(
        "router",
        "Routing decisions as a service, for gateways that forward requests themselves: "
        "select, reserve, prefill_complete, free.",
        first=_FIRST.split(),
    )
    given = parse(flags, "router", argv, {"endpoint": _endpoint})
    given["workers"] = tuple(map(parse_worker, given["workers"]))
    return RouterArgs(**given)
