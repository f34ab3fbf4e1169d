"""The indexer process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvflash.errors import KvflashError
from kvflash.indexer.args import parse_args
from kvflash.indexer.service import IndexerService
from kvflash.process import run_until_stopped, start_logging

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until a signal. Returns the exit status."""
    try:
        args = parse_args(argv)
        start_logging(args.log_level, args.log_format)
        run_until_stopped(IndexerService(args), name="indexer")
    except KvflashError as error:
        print(f"kvflash.indexer: {error}", file=sys.stderr)
        return 2
    return 0
