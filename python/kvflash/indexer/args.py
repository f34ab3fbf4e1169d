"""Flags of the indexer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvflash.config import (
    add_common,
    add_config,
    add_metrics_prefix,
    bounded_int,
    byte_count,
    memory_limit,
)
from kvflash.config_file import joined
from kvflash.errors import ConfigError
from kvflash.flags import Flags
from kvflash.roster.flags import FleetFlags, add_fleet_flags

__all__ = ["IndexerArgs", "WorkerEntry", "parse_args", "parse_workers"]


@dataclass(frozen=True, kw_only=True)
class WorkerEntry:
    """One entry of ``--workers``."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, kw_only=True)
class IndexerArgs:
    """The indexer's settings, one a flag.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        threads: Threads that serve.
        log_level: How much the process logs.
        log_format: Form of a log line, text or json.
        block_size: Tokens in a block of the engines of ``workers`` and ``engines``; None only
            without any of the former.
        model_name: Model of both.
        tenant_id: Tenant of both.
        workers: Engines to subscribe to from the start.
        engines: Others, as ``--worker`` takes them, names in DNS among them.
        worker_dns_interval_secs: Seconds between two lookups of a name among these.
        worker_dns_server: Who is asked for names; None: as ``/etc/resolv.conf`` says.
        discovery: Where further ones are found, ``mem``, ``file`` or ``etcd``; None: nowhere.
        namespace: Only those of this one; None: of all.
        max_workers: Most of ``engines`` and of those that are found.
        peers: Indexers to recover from at the start, ``http://host:port``.
        max_body_bytes: Largest request body.
        max_blocks: Blocks that one index may hold; 0 = no limit.
        index_memory: Bytes that one index may occupy; 0 = no limit.
        min_initial_workers: Workers to wait for before the service is ready; 0 = none.
        metrics_prefix: What names of metrics begin with.
        test_endpoints: Serve /test/pause_listener and /test/resume_listener.
    """

    host: str = "0.0.0.0"
    port: int = 8090
    threads: int = 4
    log_level: str = "info"
    log_format: str = "text"
    block_size: int | None = None
    model_name: str = "default"
    tenant_id: str = "default"
    workers: tuple[WorkerEntry, ...] = ()
    engines: tuple[str, ...] = ()
    worker_dns_interval_secs: float = 5.0
    worker_dns_server: tuple[str, int] | None = None
    discovery: str | None = None
    namespace: str | None = None
    max_workers: int = 4_096
    peers: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    max_blocks: int = 33_554_432
    index_memory: int = 0
    min_initial_workers: int = 0
    metrics_prefix: str = "kvflash"
    test_endpoints: bool = False

    def __post_init__(self) -> None:
        """Check what holds for every caller.

        Raises:
            ConfigError: Names the flag, what is legal and what came.
        """
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be a whole number in {low}..={high}, got {value}")
        if not self.model_name:
            raise ConfigError("--model-name must not be empty")
        if self.workers and self.block_size is None:
            raise ConfigError("--block-size is required with --workers")
        seen = set()
        for worker in self.workers:
            identity = (worker.instance_id, worker.dp_rank)
            if identity in seen:
                raise ConfigError(
                    f"--workers: instance_id {worker.instance_id} dp_rank {worker.dp_rank} is "
                    "there twice"
                )
            seen.add(identity)
        self.fleet.check_dns()

    @property
    def fleet(self) -> FleetFlags:
        """Where engines are found that nobody registers."""
        return FleetFlags(
            workers=self.engines,
            worker_dns_interval_secs=self.worker_dns_interval_secs,
            worker_dns_server=self.worker_dns_server,
            discovery=self.discovery,
            namespace=self.namespace,
        )


#: Numbers in their bounds, for flags and for callers alike.
_BOUNDS = {
    "port": (0, 65_535),
    "threads": (1, 1_024),
    "block_size": (1, 2**32 - 1),
    "max_body_bytes": (1, 2**48),
    "max_blocks": (0, 2**48),
    "index_memory": (0, 2**63 - 1),
    "min_initial_workers": (0, 65_535),
    "max_workers": (1, 65_535),
}


def parse_workers(text: str) -> tuple[WorkerEntry, ...]:
    """Parse ``instance_id[:dp_rank]=zmq_address,...``.

    Raises:
        ConfigError: Names the entry at fault.
    """
    entries = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        identity, separator, endpoint = part.partition("=")
        instance, _, rank = identity.partition(":")
        is_numbered = _is_number(instance, 64) and _is_number(rank or "0", 32)
        if not (separator and endpoint and is_numbered):
            raise ConfigError(
                f"--workers: invalid worker entry {part!r}; "
                "expected instance_id[:dp_rank]=zmq_address"
            )
        entries.append(
            WorkerEntry(instance_id=int(instance), dp_rank=int(rank or "0"), endpoint=endpoint)
        )
    return tuple(entries)


def _peers(text: str) -> tuple[str, ...]:
    peers = tuple(part.strip() for part in text.split(",") if part.strip())
    for peer in peers:
        if not peer.startswith("http://") or len(peer) == len("http://"):
            raise argparse.ArgumentTypeError(
                f"must be http://host:port of peer indexers, separated by commas, got {peer!r}"
            )
    return peers


def _is_number(text: str, bits: int) -> bool:
    return text.isascii() and text.isdigit() and int(text) < 2**bits


def parse_args(argv: Sequence[str] | None = None) -> IndexerArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: Flags that contradict each other.
    """
    flags = Flags(
        "indexer",
        "Index of the KV cache blocks that engines hold, fed by their ZMQ events, asked over HTTP.",
        first=(
            "--config",
            "--worker",
            "--discovery",
            "--workers",
            "--block-size",
            "--model-name",
            "--peers",
            "--host",
            "--port",
            "--log-level",
        ),
    )
    add_config(flags)
    add_common(flags, port=8090, threads=4)
    add_metrics_prefix(flags)
    flags.section("Workers")
    flags.add(
        "--block-size",
        parse=bounded_int(*_BOUNDS["block_size"]),
        default=None,
        metavar="TOKENS",
        summary="Tokens per KV block of --workers and --worker",
    )
    flags.add(
        "--workers",
        parse=str,
        default="",
        metavar="ID[:DP_RANK]=ENDPOINT,...",
        in_file=joined(str),
        summary="Engines to subscribe to at the start",
    )
    flags.add(
        "--peers",
        parse=_peers,
        default=_peers(""),
        metavar="URL,...",
        in_file=joined(_peers),
        summary="Indexers to recover from at the start; the first healthy one is used",
    )
    for name, summary in (
        ("--model-name", "Model of --workers and --worker"),
        ("--tenant-id", "Tenant of --workers and --worker"),
    ):
        flags.add(name, parse=str, default="default", metavar="NAME", summary=summary)
    add_fleet_flags(flags, dest="engines", without="nowhere unless it is given")
    flags.section("Limits")
    flags.add(
        "--max-workers",
        parse=bounded_int(*_BOUNDS["max_workers"]),
        default=4_096,
        summary="Maximum number of workers of --worker and --discovery",
    )
    flags.add(
        "--max-body-bytes",
        parse=byte_count,
        default=8 * 1024 * 1024,
        metavar="SIZE",
        summary="Largest request body; larger ones are refused with 413",
    )
    flags.add(
        "--max-blocks",
        parse=bounded_int(*_BOUNDS["max_blocks"]),
        default=33_554_432,
        metavar="BLOCKS",
        summary="Maximum blocks in the index of one model; 0: no limit",
    )
    flags.add(
        "--index-memory",
        parse=memory_limit,
        default=0,
        metavar="SIZE",
        summary="Maximum memory of one model's index, such as 8GiB; 0: no limit",
    )
    flags.add(
        "--min-initial-workers",
        parse=bounded_int(*_BOUNDS["min_initial_workers"]),
        default=0,
        variables=("KVFLASH_ROUTER_MIN_INITIAL_WORKERS", "DYN_ROUTER_MIN_INITIAL_WORKERS"),
        metavar="COUNT",
        summary="Workers to wait for before /ready says so",
    )
    args = flags.parse(argv)
    # For tests of what is lost while a listener does not read; no flag for operators.
    test_endpoints = os.environ.get("KVFLASH_INDEXER_TEST_ENDPOINTS", "0") not in ("", "0")
    given = {
        **vars(args),
        "workers": parse_workers(args.workers),
        "engines": tuple(args.engines),
    }
    return IndexerArgs(**given, test_endpoints=test_endpoints)
