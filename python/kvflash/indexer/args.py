"""Flags of the indexer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from kvflash.config import Flags, add_common, bounded_int, byte_count, memory_limit
from kvflash.errors import ConfigError

__all__ = ["IndexerArgs", "WorkerEntry", "parse_args", "parse_workers"]


@dataclass(frozen=True, kw_only=True)
class WorkerEntry:
    """One entry of ``--workers``."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, kw_only=True)
class IndexerArgs:
    """The indexer's settings."""

    host: str
    port: int
    threads: int
    log_level: str
    log_format: str
    block_size: int | None
    model_name: str
    tenant_id: str
    workers: tuple[WorkerEntry, ...]
    peers: tuple[str, ...]
    max_body_bytes: int
    max_blocks: int
    index_memory: int


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
        "python -m kvflash.indexer",
        "Index of the KV cache blocks that engines hold, fed by their ZMQ events, asked over HTTP.",
    )
    add_common(flags, port=8090, threads=4)
    flags.add(
        "--block-size",
        parse=bounded_int(1, 2**32 - 1),
        default=None,
        summary="tokens in a block of the engines of --workers",
    )
    flags.add(
        "--workers",
        parse=str,
        default="",
        metavar="ID[:DP_RANK]=ENDPOINT,...",
        summary="engines to subscribe to from the start",
    )
    flags.add(
        "--peers",
        parse=_peers,
        default=_peers(""),
        metavar="URL,...",
        summary="indexers to recover from at the start: the first healthy one serves",
    )
    flags.add("--model-name", parse=str, default="default", summary="model of --workers")
    flags.add("--tenant-id", parse=str, default="default", summary="tenant of --workers")
    flags.add(
        "--max-body-bytes",
        parse=byte_count,
        default=8 * 1024 * 1024,
        summary="largest request body; larger ones are refused with 413",
    )
    flags.add(
        "--max-blocks",
        parse=bounded_int(0, 2**48),
        default=33_554_432,
        summary="blocks that one model's index may hold, 0 = no limit; beyond it stores are "
        "refused and counted",
    )
    flags.add(
        "--index-memory",
        parse=memory_limit,
        default=0,
        metavar="SIZE",
        summary="memory that the index of one model and tenant may occupy, such as 8GiB, 512MiB or "
        "plain bytes, 0 = no limit; near it the least recently stored blocks go",
    )
    args = flags.parse(argv)
    workers = parse_workers(args.workers)
    if workers and args.block_size is None:
        raise ConfigError("--block-size is required with --workers")
    return IndexerArgs(**{**vars(args), "workers": workers})
