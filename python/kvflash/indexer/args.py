"""Flags of the indexer."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvflash.config import add_config, is_whole
from kvflash.errors import ConfigError
from kvflash.flags import Flags
from kvflash.roster.flags import PARSERS, FleetFlags
from kvflash.settings import Args, add_settings, of_table, table

# The most important flags, in the order of the help.
_FIRST = """
    --config --worker --discovery --workers --block-size --model-name --peers --host --port
    --log-level
"""

# Each serves /test/pause_listener and /test/resume_listener, for tests of lost events.
_TEST_ENDPOINTS = ("KVFLASH_INDEXER_TEST_ENDPOINTS", "DYN_KV_INDEXER_TEST_ENDPOINTS")


@dataclass(frozen=True, kw_only=True)
class WorkerEntry:
    """One entry of ``--workers``."""

    instance_id: int
    dp_rank: int
    endpoint: str


@of_table("indexer")
class IndexerArgs(Args, FleetFlags):
    """The indexer's settings, one per flag; see ``--help``.

    Attributes:
        block_size: Tokens in a block of the engines in ``workers`` and ``engines``; may be None
            only without ``workers``.
        workers: Engines to subscribe to at the start.
        engines: Other engines, in the format of ``--worker``; may be names in DNS.
        peers: Indexers to recover from at the start, as ``http://host:port``.
        test_endpoints: Serve /test/pause_listener and /test/resume_listener.
    """

    worker_flags: ClassVar = (("--worker", "engines", ""),)
    added_by: ClassVar[str] = "POST /register"
    workers: tuple[WorkerEntry, ...] = ()
    engines: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    test_endpoints: bool = False

    def __post_init__(self) -> None:
        for one in table("indexer"):
            if one.kind == "int":
                one.check(one.flags[0], getattr(self, one.dest))
        if not self.model_name:
            raise ConfigError("--model-name must not be empty")
        if not self.tenant_id:
            raise ConfigError("--tenant-id must not be empty: leave it out for 'default'")
        if self.workers and self.block_size is None:
            raise ConfigError("--block-size is required with --workers")
        self.check_dns()


def parse_workers(text: str) -> tuple[WorkerEntry, ...]:
    """Parse ``instance_id[:dp_rank]=zmq_address,...``; ConfigError names a faulty entry."""
    entries = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        identity, separator, endpoint = part.partition("=")
        instance, _, rank = identity.partition(":")
        is_numbered = is_whole(instance, 0, 2**64 - 1) and is_whole(rank or "0", 0, 2**32 - 1)
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
        scheme, _, host = peer.partition("://")
        if scheme not in ("http", "https") or not host:
            raise argparse.ArgumentTypeError(
                f"must be http(s)://host:port of peer indexers, separated by commas, got {peer!r}"
            )
    return peers


def parse_args(argv: Sequence[str] | None = None) -> IndexerArgs:
    """Parse the command line and the environment; ConfigError if flags contradict each other."""
    flags = Flags(
        "indexer",
        "Index of the KV cache blocks that engines hold: built from KV events, queried over HTTP.",
        first=_FIRST.split(),
    )
    add_config(flags)
    add_settings(flags, table("indexer"), {**PARSERS, "peers": _peers})
    args = flags.parse(argv)
    # Not a flag for operators.
    test_endpoints = any(os.environ.get(name, "0") not in ("", "0") for name in _TEST_ENDPOINTS)
    given = {**vars(args), "workers": parse_workers(args.workers), "engines": tuple(args.engines)}
    return IndexerArgs(**given, test_endpoints=test_endpoints)
