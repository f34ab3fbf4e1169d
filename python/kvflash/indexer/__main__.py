"""The indexer process: ``python -m kvflash.indexer``."""

import logging
import sys
from collections.abc import Sequence

from kvflash.console import refuse
from kvflash.errors import KvflashError
from kvflash.indexer.args import parse_args
from kvflash.indexer.service import IndexerService
from kvflash.process import run_until_stopped, start_logging

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until a signal. Returns the exit status."""
    try:
        args = parse_args(argv)
        start_logging(args.log_level, args.log_format)
        if args.block_size is not None and not (args.workers or args.engines):
            logger.warning(
                "--block-size applies to the engines of --workers and --worker, and none are given"
            )
        service = IndexerService(args)
        lame_duck = (args.lame_duck_timeout, service.announce_stop)
        run_until_stopped(service, name="indexer", lame_duck=lame_duck, is_ready=service.is_ready)
    except KvflashError as error:
        return refuse("indexer", error, failure=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
