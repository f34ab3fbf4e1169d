"""The frontend process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from kvflash._core import Frontend
from kvflash.errors import KvflashError
from kvflash.frontend.args import FrontendArgs, parse_args
from kvflash.frontend.cluster import Cluster
from kvflash.frontend.watch import DiscoveryWatch
from kvflash.process import FedService, run_until_stopped, start_logging

__all__ = ["main", "make_frontend"]

logger = logging.getLogger(__name__)


def make_frontend(args: FrontendArgs) -> Frontend:
    """Make the service that the settings describe.

    Raises:
        ConfigError: Names the flag or file at fault.
        ConflictError: A worker is given twice.
    """
    frontend = Frontend(
        **args.core_settings(),
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
        waits_for=_waits_for(args),
    )
    for worker in (*args.workers, *args.decode_workers):
        frontend.add_worker(worker)
    for worker in args.prefill_workers:
        frontend.add_worker(f"{worker},role=prefill")
    return frontend


def _waits_for(args: FrontendArgs) -> str:
    """Where workers may come from, in words."""
    ways = ["POST /workers"]
    if args.discovery_kind is not None:
        scope = f"namespace {args.namespace}" if args.namespace else "any namespace"
        ways.insert(0, f"workers of {scope} in discovery {args.discovery_kind!r}")
    return " or ".join(ways)


class _Watched:
    """The service with the watch of discovery beside it."""

    def __init__(self, frontend: Frontend, args: FrontendArgs) -> None:
        self._cluster = Cluster(frontend, args, args.discovery_kind)
        self._service = FedService(
            frontend,
            host=args.host,
            port=args.port,
            make_receiver=self._cluster.make_receiver,
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

    @property
    def url(self) -> str:
        return self._service.url

    def start(self) -> None:
        self._cluster.check()
        self._service.start()
        self._cluster.start()
        if self._watch is not None:
            self._watch.start()
            logger.info("waiting for %s", self._waits_for)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        # Streams may go on for a while: until they have ended, their load is told.
        self._service.stop()
        self._cluster.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until a signal. Returns the exit status."""
    try:
        args = parse_args(argv)
        start_logging(args.log_level, args.log_format)
        frontend = make_frontend(args)
        service = _Watched(frontend, args)
        run_until_stopped(service, name="frontend")
    except KvflashError as error:
        print(f"kvflash.frontend: {error}", file=sys.stderr)
        return 2
    return 0
