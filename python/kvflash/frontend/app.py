"""The frontend process."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvflash._core import Frontend, PolicyDesk
from kvflash.console import refuse
from kvflash.discovery import open_discovery
from kvflash.errors import ConfigError, InvalidArgumentError, KvflashError
from kvflash.flags import source_of
from kvflash.frontend.args import DNS_PREFIX, FrontendArgs, parse_args
from kvflash.frontend.reports import Reports
from kvflash.frontend.watch import DiscoveryWatch
from kvflash.policy import PREFIX, AskedPolicy, load
from kvflash.process import FedService, run_until_stopped, start_logging
from kvflash.routing.cluster import Cluster

if TYPE_CHECKING:
    from kvflash.frontend.dns_spec import DnsWorkers
    from kvflash.frontend.dns_watch import DnsWatch

__all__ = ["main", "make_frontend"]

logger = logging.getLogger(__name__)


def make_frontend(args: FrontendArgs, fleet: dict[int, str] | None = None) -> Frontend:
    """Make the service that the settings describe.

    Args:
        args: The settings.
        fleet: Gets the numbers and specs of the workers that flags name.

    Raises:
        ConfigError: Names the flag or file at fault.
        ConflictError: A worker is given twice.
    """
    _check_tokenizer(args.tokenizer)
    frontend = Frontend(
        **args.core_settings(),
        policy_desk=_desk(args.router_mode),
        kv_cache_block_size=args.kv_cache_block_size,
        tokenizer=args.tokenizer,
        tokenizer_cache_bytes=args.tokenizer_cache,
        worker_api_key=args.worker_api_key,
        threads=args.threads,
        max_body_bytes=args.max_body_bytes,
        max_concurrent_requests=args.max_concurrent_requests,
        max_workers=args.max_workers,
        max_attempts=args.max_attempts,
        body_timeout_s=args.body_timeout,
        connect_timeout_s=args.connect_timeout,
        first_byte_timeout_s=args.first_byte_timeout,
        tokenize_timeout_s=args.tokenize_timeout,
        stream_idle_timeout_s=args.stream_idle_timeout,
        health_interval_s=args.health_interval,
        drain_timeout_s=args.drain_timeout,
        enforce_disagg=args.enforce_disagg,
        metrics_prefix=args.metrics_prefix,
        has_broker_events=args.event_plane == "nats",
        waits_for=_waits_for(args),
        fairness=None if args.fairness == "none" else args.fairness,
        fairness_weights=args.fairness_weight,
        fairness_queue_limit=args.fairness_queue_limit,
        fairness_queue_timeout_s=args.fairness_queue_timeout,
        fairness_max_running=args.fairness_max_running,
        fairness_cached_share=args.fairness_cached_share,
        tls_cert_path=args.tls_cert_path,
        tls_key_path=args.tls_key_path,
    )
    for source, spec, role in _workers(args):
        if spec.startswith(DNS_PREFIX):
            continue
        try:
            number = frontend.add_worker(spec + role)
        except (ConfigError, InvalidArgumentError) as error:
            said = str(error).removeprefix(f'--worker "{spec}{role}": ')
            raise ConfigError(f"{source} {spec!r}: {said}") from error
        if fleet is not None:
            fleet[number] = spec + role
    return frontend


def _workers(args: FrontendArgs) -> Iterator[tuple[str, str, str]]:
    """The workers that flags name: what said so, the worker, and its role to be added to it."""
    for flag, specs, role in (
        ("--worker", args.workers, ""),
        ("--decode-worker", args.decode_workers, ""),
        ("--prefill-worker", args.prefill_workers, ",role=prefill"),
    ):
        yield from ((source_of(flag, spec), spec, role) for spec in specs)


def _names(args: FrontendArgs) -> list[DnsWorkers]:
    """Those of them that are names in DNS.

    Raises:
        ConfigError: Names the flag and the field at fault.
    """
    found: list[DnsWorkers] = []
    for source, spec, role in _workers(args):
        if not spec.startswith(DNS_PREFIX):
            continue
        # Who names none need not load the client of DNS.
        from kvflash.frontend.dns_spec import DnsWorkers  # noqa: PLC0415

        try:
            name = DnsWorkers.parse(spec + role)
        except ConfigError as error:
            raise ConfigError(f"{source} {spec!r}: {error}") from error
        if any(name.label == other.label for other in found):
            raise ConfigError(f"{source} {spec!r}: {name.label} is given twice")
        found.append(name)
    return found


def _check_tokenizer(folder: str | None) -> None:
    if folder is not None and not Path(folder, "tokenizer.json").is_file():
        source = source_of("--tokenizer", folder)
        raise ConfigError(f"{source} must be a folder with tokenizer.json, got {folder!r}")


def _component(fleet: dict[int, str]) -> tuple[str, str]:
    """What routers share that were given the same workers under the same numbers, and no others."""
    workers = [[number, spec.partition(",")[0]] for number, spec in sorted(fleet.items())]
    return "workers", hashlib.sha256(json.dumps(workers).encode()).hexdigest()[:16]


def _desk(router_mode: str | None) -> PolicyDesk | None:
    """Where a policy in Python is asked, if one is wanted."""
    if router_mode is None or not router_mode.startswith(PREFIX):
        return None
    return AskedPolicy(load(router_mode), router_mode).desk


def _waits_for(args: FrontendArgs) -> str:
    """Where workers may come from, in words."""
    names = [spec.partition(",")[0] for _, spec, _ in _workers(args) if spec.startswith(DNS_PREFIX)]
    ways = [*(f"addresses of {name}" for name in names), "POST /workers"]
    if args.discovery_kind is not None:
        scope = f"namespace {args.namespace}" if args.namespace else "any namespace"
        ways.insert(0, f"workers of {scope} in discovery {args.discovery_kind!r}")
    return " or ".join(ways)


def _dns_watch(
    frontend: Frontend,
    args: FrontendArgs,
    names: Sequence[DnsWorkers],
    cluster: Cluster,
    reports: Reports,
) -> DnsWatch | None:
    """What keeps the workers of names, if there are any."""
    if not names:
        return None
    from kvflash.frontend.dns_watch import DnsWatch  # noqa: PLC0415

    return DnsWatch(
        frontend,
        names,
        interval_s=args.worker_dns_interval_secs,
        server=args.worker_dns_server,
        replicas=cluster,
        show_metrics=reports.metrics_of("dns"),
        show_warnings=reports.warnings_of("dns"),
    )


class _Watched:
    """The service with the watches of discovery and of DNS beside it."""

    def __init__(
        self,
        frontend: Frontend,
        args: FrontendArgs,
        fleet: dict[int, str],
        names: Sequence[DnsWorkers],
    ) -> None:
        self._fleet = fleet
        reports = Reports(frontend)
        kind = args.discovery_kind
        args.check_cluster(has_discovery=kind is not None, needs="--discovery")
        if kind is not None:
            # What can't be is refused now; the watch would try again for ever.
            open_discovery(kind)
        self._cluster = Cluster(
            frontend.catalog,
            frontend.bookings,
            args,
            open_discovery=lambda: open_discovery(kind),
            show_metrics=reports.metrics_of("cluster"),
            show_warnings=reports.warnings_of("cluster"),
        )
        self._service = FedService(
            frontend,
            host=args.host,
            port=args.port,
            make_receiver=self._cluster.make_receiver,
            is_encrypted=args.tls_cert_path is not None,
        )
        self._watch: DiscoveryWatch | None = None
        self._waits_for = _waits_for(args)
        if args.discovery_kind is not None:
            self._watch = DiscoveryWatch(
                frontend,
                kind=args.discovery_kind,
                namespace=args.namespace,
                cluster=self._cluster,
            )
        self._dns = _dns_watch(frontend, args, names, self._cluster, reports)

    @property
    def url(self) -> str:
        return self._service.url

    def start(self) -> None:
        self._cluster.check()
        self._service.start()
        self._cluster.start()
        # Its servers may be away: serving does not wait for them.
        threading.Thread(target=self._share_fleet, name="kvflash-fleet", daemon=True).start()
        if self._watch is not None:
            self._watch.start()
        if self._dns is not None:
            self._dns.start()
        if self._watch is not None or self._dns is not None:
            logger.info("waiting for %s", self._waits_for)

    def _share_fleet(self) -> None:
        for number in self._fleet:
            self._cluster.worker_joined(_component(self._fleet), number)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._dns is not None:
            self._dns.stop()
        # Streams may go on for a while: until they have ended, their load is told.
        self._service.stop()
        self._cluster.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until a signal. Returns the exit status."""
    try:
        args = parse_args(argv)
        start_logging(args.log_level, args.log_format)
        fleet: dict[int, str] = {}
        names = _names(args)
        service = _Watched(make_frontend(args, fleet), args, fleet, names)
        run_until_stopped(service, name="frontend", drain_s=args.drain_timeout)
    except KvflashError as error:
        return refuse("frontend", error, failure=2)
    return 0
