"""Flags of the standalone router."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kvflash.cluster_flags import ClusterFlags, add_cluster_flags, settle_cluster
from kvflash.config import (
    add_common,
    add_config,
    add_metrics_prefix,
    add_tls,
    bounded_float,
    bounded_int,
    byte_count,
)
from kvflash.errors import ConfigError
from kvflash.flags import Flags, source_of
from kvflash.router_flags import RouterFlags, add_router_flags, settle

__all__ = ["RouterArgs", "WorkerSpec", "parse_args", "parse_worker"]


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One ``--worker``.

    Attributes:
        worker_id: Its number; None = one above those given before it.
        url: What gateways reach it by, handed back as it is.
        dp_size: Its ranks.
        events: Address of rank 0's event socket; rank r is at its port + r.
        replay: Address of rank 0's replay socket.
    """

    url: str
    worker_id: int | None = None
    dp_size: int = 1
    events: str | None = None
    replay: str | None = None


@dataclass(frozen=True, kw_only=True)
class RouterArgs(RouterFlags, ClusterFlags):
    """The router's settings, one a flag; see ``--help``."""

    host: str = "0.0.0.0"
    port: int = 8091
    threads: int = 2
    log_level: str = "info"
    log_format: str = "text"
    endpoint: str | None = None
    workers: tuple[WorkerSpec, ...] = ()
    model_name: str = "default"
    tenant_id: str = "default"
    max_body_bytes: int = 8 * 1024 * 1024
    max_concurrent_requests: int = 65_536
    max_workers: int = 4_096
    body_timeout: float = 60.0
    drain_timeout: float = 5.0
    metrics_prefix: str = "kvflash"
    tls_cert_path: str | None = None
    tls_key_path: str | None = None

    def __post_init__(self) -> None:
        """Check what holds for every caller.

        Raises:
            ConfigError: Names the flag, what is legal and what came.
        """
        if self.endpoint is not None:
            parse_endpoint(self.endpoint)
        if not self.model_name:
            raise ConfigError("--model-name must not be empty")
        # Replicas find each other in the environment's discovery, also without an endpoint there.
        has_discovery = self.endpoint is not None or self.router_replica_sync
        self.check_cluster(has_discovery=has_discovery, needs="--endpoint")


def parse_endpoint(text: str) -> tuple[str, str, str]:
    """Parse ``namespace.component.endpoint``.

    Raises:
        ConfigError: There are not exactly three parts.
    """
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


def parse_worker(text: str) -> WorkerSpec:
    """Parse ``URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]``.

    Raises:
        ConfigError: Names the part at fault.
    """
    url, *parts = (part.strip() for part in text.split(","))
    if not url or "=" in url.partition("://")[0]:
        raise ConfigError(f"--worker {text!r}: the address of the worker comes first")
    given: dict[str, str] = {}
    for part in parts:
        key, separator, value = part.partition("=")
        if key not in ("events", "replay", "id", "dp") or not separator or not value:
            raise ConfigError(
                f"--worker {text!r}: {part!r} is not key=value with one of events, replay, id, dp"
            )
        if key in given:
            raise ConfigError(f"--worker {text!r}: {key} is there twice")
        given[key] = value

    def number(key: str, low: int, high: int) -> int | None:
        value = given.get(key)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit() and low <= int(value) <= high):
            raise ConfigError(
                f"--worker {text!r}: {key} must be a number in {low}..={high}, got {value!r}"
            )
        return int(value)

    return WorkerSpec(
        url=url,
        worker_id=number("id", 0, 2**64 - 1),
        dp_size=number("dp", 1, 1_024) or 1,
        events=given.get("events"),
        replay=given.get("replay"),
    )


def parse_args(argv: Sequence[str] | None = None) -> RouterArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: A worker is not well formed.
    """
    flags = Flags(
        "router",
        "The routing decision as a service, for gateways that forward requests themselves: "
        "select, reserve, prefill_complete, free.",
        first=(
            "--config",
            "--worker",
            "--model-name",
            "--endpoint",
            "--kv-cache-block-size",
            "--host",
            "--port",
            "--router-mode",
            "--router-replica-sync",
            "--log-level",
        ),
    )
    add_config(flags)
    add_common(flags, port=8091, threads=2, extra_names=True)
    add_metrics_prefix(flags)
    _add_workers(flags)
    add_router_flags(flags, block_size=("--router-block-size", "--block-size"))
    add_cluster_flags(flags)
    flags.end_of_file()
    _add_limits(flags)
    add_tls(flags)
    given = settle_cluster(settle(vars(flags.parse(argv))))
    given["workers"] = tuple(_worker(text) for text in given["workers"])
    return RouterArgs(**given)


def _worker(text: str) -> WorkerSpec:
    try:
        return parse_worker(text)
    except ConfigError as error:
        said = str(error).removeprefix("--worker ")
        raise ConfigError(f"{source_of('--worker', text)} {said}") from None


def _add_workers(flags: Flags) -> None:
    flags.section("Workers")
    flags.add(
        "--endpoint",
        parse=_endpoint,
        default=None,
        variables=("KVFLASH_ROUTER_ENDPOINT", "DYN_ROUTER_ENDPOINT"),
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        summary="Route to the workers of this endpoint, found through discovery",
    )
    flags.add_list(
        "--worker",
        dest="workers",
        metavar="URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]",
        summary="Workers of --model-name; POST /workers adds more",
    )
    for name, summary in (
        ("--model-name", "Model of --worker"),
        ("--tenant-id", "Tenant of --worker"),
    ):
        flags.add(name, parse=str, default="default", metavar="NAME", summary=summary)


def _add_limits(flags: Flags) -> None:
    flags.section("Limits and timeouts")
    flags.add(
        "--max-body-bytes",
        parse=byte_count,
        default=8 * 1024 * 1024,
        metavar="SIZE",
        summary="Largest request body; larger ones are refused with 413",
    )
    flags.add(
        "--max-concurrent-requests",
        parse=bounded_int(1, 10**7),
        default=65_536,
        summary="Maximum reservations per model; more are refused with 429",
    )
    flags.add(
        "--max-workers",
        parse=bounded_int(1, 65_535),
        default=4_096,
        summary="Maximum number of workers",
    )
    flags.add(
        "--body-timeout",
        parse=bounded_float(0.001, 86_400),
        default=60.0,
        metavar="SECONDS",
        summary="Longest time for a request's body to arrive",
    )
    flags.add(
        "--drain-timeout",
        parse=bounded_float(0, 86_400),
        default=5.0,
        metavar="SECONDS",
        summary="Time for running calls after SIGTERM",
    )
