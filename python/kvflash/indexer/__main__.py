"""The indexer process: ``python -m kvflash.indexer``."""

import logging
import sys
from collections.abc import Sequence

from kvflash.indexer.args import IndexerArgs, parse_args
from kvflash.indexer.service import IndexerService
from kvflash.output import ended
from kvflash.process import run_service

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until a signal. Returns the exit status."""
    return run_service("indexer", parse_args, _make, argv)


def _make(args: IndexerArgs) -> IndexerService:
    if args.block_size is not None and not (args.workers or args.engines):
        logger.warning(
            "--block-size applies to the engines of --workers and --worker, and none are given"
        )
    return IndexerService(args)


if __name__ == "__main__":
    sys.exit(ended(main))
