"""The router process: ``python -m kvflash.router``."""

import sys
from collections.abc import Sequence

from kvflash.console import refuse
from kvflash.errors import KvflashError
from kvflash.process import run_until_stopped, start_logging
from kvflash.router.args import parse_args
from kvflash.router.service import RouterService


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until a signal. Returns the exit status."""
    try:
        args = parse_args(argv)
        start_logging(args.log_level, args.log_format)
        service = RouterService(args)
        lame_duck = (args.lame_duck_timeout, service.announce_stop)
        run_until_stopped(service, name="router", drain_s=args.drain_timeout, lame_duck=lame_duck)
    except KvflashError as error:
        return refuse("router", error, failure=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
