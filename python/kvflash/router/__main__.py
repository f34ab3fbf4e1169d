"""The router process: ``python -m kvflash.router``."""

import sys
from collections.abc import Sequence

from kvflash.output import ended
from kvflash.process import run_service
from kvflash.router.args import parse_args
from kvflash.router.service import RouterService


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until a signal. Returns the exit status."""
    return run_service("router", parse_args, RouterService, argv)


if __name__ == "__main__":
    sys.exit(ended(main))
