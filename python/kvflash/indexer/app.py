"""The indexer process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvflash._core import Indexer
from kvflash.errors import KvflashError
from kvflash.indexer.args import parse_args
from kvflash.process import run_until_stopped, start_logging

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until a signal. Returns the exit status."""
    try:
        args = parse_args(argv)
        start_logging(args.log_level, args.log_format)
        indexer = Indexer(
            threads=args.threads,
            max_body_bytes=args.max_body_bytes,
            max_blocks=args.max_blocks,
            index_memory_bytes=args.index_memory,
            peers=args.peers,
            test_endpoints=os.environ.get("KVFLASH_INDEXER_TEST_ENDPOINTS", "") not in ("", "0"),
        )
        for worker in args.workers:
            indexer.register(
                worker.instance_id,
                worker.endpoint,
                model_name=args.model_name,
                block_size=args.block_size or 0,
                tenant_id=args.tenant_id,
                dp_rank=worker.dp_rank,
            )
        run_until_stopped(indexer, host=args.host, port=args.port, name="indexer")
    except KvflashError as error:
        print(f"kvflash.indexer: {error}", file=sys.stderr)
        return 2
    return 0
