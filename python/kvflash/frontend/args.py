"""Flags of the frontend."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
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
from kvflash.config_file import joined
from kvflash.errors import ConfigError
from kvflash.flags import Flags
from kvflash.roster.flags import FleetFlags, add_fleet_flags
from kvflash.router_flags import RouterFlags, add_router_flags, settle

__all__ = ["FrontendArgs", "parse_args"]


@dataclass(frozen=True, kw_only=True)
class FrontendArgs(RouterFlags, ClusterFlags, FleetFlags):
    """The frontend's settings; see ``--help``."""

    host: str
    port: int
    threads: int
    log_level: str
    log_format: str
    prefill_workers: list[str]
    decode_workers: list[str]
    enforce_disagg: str
    fairness: str
    fairness_weight: list[tuple[str, float]]
    fairness_queue_limit: int
    fairness_queue_timeout: float
    fairness_max_running: int
    fairness_cached_share: float
    tokenizer: str | None
    tokenizer_cache: int
    worker_api_key: str | None
    max_body_bytes: int
    max_concurrent_requests: int
    max_workers: int
    max_attempts: int
    body_timeout: float
    connect_timeout: float
    first_byte_timeout: float
    tokenize_timeout: float
    stream_idle_timeout: float
    health_interval: float
    drain_timeout: float
    metrics_prefix: str
    request_plane: str | None
    tls_cert_path: str | None
    tls_key_path: str | None

    def __post_init__(self) -> None:
        """Check what flags say together.

        Raises:
            ConfigError: One of them would do nothing.
        """
        if self.fairness_weight and self.fairness == "none":
            raise ConfigError("--fairness-weight needs --fairness: without it no request waits")
        self.check_dns()

    def named_workers(self) -> Iterator[tuple[str, str, str]]:
        """See :class:`FleetFlags`; workers have roles here."""
        yield from super().named_workers()
        yield from self._of_flag("--decode-worker", self.decode_workers)
        yield from self._of_flag("--prefill-worker", self.prefill_workers, ",role=prefill")

    @property
    def discovery_kind(self) -> str | None:
        """The discovery that is watched, if any."""
        has_flags = self.workers or self.prefill_workers or self.decode_workers
        kind = self.discovery or ("none" if has_flags else "file")
        return None if kind == "none" else kind


def _weights(text: str) -> list[tuple[str, float]]:
    """Parse ``client=2,other=0.5``."""
    weights = []
    for item in filter(None, text.split(",")):
        client, equals, weight = item.rpartition("=")
        try:
            share = float(weight)
        except ValueError:
            share = 0.0
        if not equals or not 0 < share < float("inf"):
            raise argparse.ArgumentTypeError(
                f"must be client=weight with a weight above 0, separated by commas, got {item!r}"
            )
        weights.append((client.strip(), share))
    return weights


def _add_fairness(flags: Flags) -> None:
    flags.section("Fairness between clients")
    no_weights: list[tuple[str, float]] = []
    flags.add(
        "--fairness",
        parse=str,
        default="none",
        choices=("none", "vtc-fair", "vtc-max-fair", "vtc-pred"),
        summary="Queue requests and let clients take turns by the tokens they were served",
    )
    flags.add(
        "--fairness-weight",
        parse=_weights,
        default=no_weights,
        metavar="CLIENT=WEIGHT,...",
        in_file=joined(_weights),
        summary="Clients with a larger (above 1) or smaller share",
    )
    flags.add(
        "--fairness-queue-limit",
        parse=bounded_int(1, 10**7),
        default=1_024,
        summary="Maximum queued requests per client; more are refused with 429",
    )
    flags.add(
        "--fairness-queue-timeout",
        parse=bounded_float(0.001, 86_400),
        default=60.0,
        metavar="SECONDS",
        summary="Longest wait for a turn before a request is refused with 503",
    )
    flags.add(
        "--fairness-max-running",
        parse=bounded_int(1, 10**7),
        default=256,
        summary="Running requests per healthy worker; the others wait",
    )
    flags.add(
        "--fairness-cached-share",
        parse=bounded_float(0, 1),
        default=0.0,
        summary="Share of the price that cached prompt tokens cost",
    )


def parse_args(argv: Sequence[str] | None = None) -> FrontendArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: Flags that contradict each other.
    """
    flags = Flags(
        "frontend",
        "OpenAI-compatible HTTP frontend. It sends each request to the worker where it is "
        "cheapest: most of the prompt cached, least other work.",
        first=(
            "--config",
            "--worker",
            "--discovery",
            "--namespace",
            "--tokenizer",
            "--host",
            "--port",
            "--router-mode",
            "--router-replica-sync",
            "--log-level",
        ),
    )
    add_config(flags)
    common = ("DYN_HTTP_HOST", "DYN_HTTP_PORT")
    add_common(flags, port=8000, threads=2, extra_names=True, variables=common)
    add_metrics_prefix(flags)
    flags.section("Workers")
    add_fleet_flags(flags, without="file unless --worker is given")
    for role, summary in (
        ("prefill", "Engines that only prefill; a decode engine of the model continues"),
        ("decode", "Engines that continue from prefill engines, or do all without one"),
    ):
        flags.add_list(
            f"--{role}-worker",
            dest=f"{role}_workers",
            metavar="URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]",
            summary=summary,
        )
    flags.add_mode(
        "--enforce-disagg",
        choices=("off", "until-first-prefill", "always"),
        default="off",
        bare="always",
        variables=("DYN_ENFORCE_DISAGG",),
        summary="Refuse requests that no prefill worker can take",
    )
    add_router_flags(flags)
    _add_fairness(flags)
    add_cluster_flags(flags)
    flags.end_of_file()
    flags.section("Tokens")
    flags.add(
        "--tokenizer",
        parse=str,
        default=None,
        metavar="FOLDER",
        summary="Folder with tokenizer.json; without it engines are asked to tokenize",
    )
    flags.add(
        "--tokenizer-cache",
        parse=byte_count,
        default=256 * 1024 * 1024,
        metavar="SIZE",
        summary="Memory for the tokens of text seen before",
    )
    flags.add(
        "--worker-api-key",
        parse=str,
        default=None,
        metavar="KEY",
        summary="Key for the frontend's own calls to workers; better set in the environment",
    )
    flags.section("Limits and timeouts")
    flags.add(
        "--max-body-bytes",
        parse=byte_count,
        default=32 * 1024 * 1024,
        metavar="SIZE",
        summary="Largest request body; larger ones are refused with 413",
    )
    flags.add(
        "--max-concurrent-requests",
        parse=bounded_int(1, 10**7),
        default=4_096,
        summary="Maximum requests in flight; more are refused with 429",
    )
    flags.add(
        "--max-workers",
        parse=bounded_int(1, 65_535),
        default=4_096,
        summary="Maximum number of workers",
    )
    flags.add(
        "--max-attempts",
        parse=bounded_int(1, 1_000),
        default=5,
        summary="Workers that a request may try before its first byte",
    )
    for name, default, summary in (
        ("--body-timeout", 60.0, "Longest time for a request's body to arrive"),
        ("--connect-timeout", 2.0, "Longest time to connect to a worker"),
        (
            "--first-byte-timeout",
            600.0,
            "Longest time from a request to the first byte of the worker's answer",
        ),
        (
            "--stream-idle-timeout",
            300.0,
            "Longest pause within a worker's answer",
        ),
        ("--tokenize-timeout", 2.0, "Longest time for an engine's /tokenize"),
        ("--health-interval", 2.0, "Pause between two health checks of a worker"),
    ):
        flags.add(
            name,
            parse=bounded_float(0.001, 86_400),
            default=default,
            metavar="SECONDS",
            summary=summary,
        )
    flags.add(
        "--drain-timeout",
        parse=bounded_float(0, 86_400),
        default=30.0,
        metavar="SECONDS",
        summary="Time for running requests after SIGTERM",
    )
    add_tls(flags)
    flags.section("Compatibility")
    flags.add(
        "--request-plane",
        parse=str,
        default=None,
        choices=("tcp", "http", "nats"),
        variables=("DYN_REQUEST_PLANE",),
        summary="Accepted for compatibility; has no effect",
    )
    return FrontendArgs(**settle_cluster(settle(vars(flags.parse(argv)))))
