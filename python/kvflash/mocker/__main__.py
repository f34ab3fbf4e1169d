"""``python -m kvflash.mocker``."""

import asyncio
import sys
from collections.abc import Sequence

from kvflash.console import LogLine, log_to_stderr, program
from kvflash.errors import KvflashError
from kvflash.mocker.args import parse_args
from kvflash.open_files import allow_open_files
from kvflash.output import ended
from kvflash.settings import warn_of_misspelt


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal comes; returns 2 if the workers could not start, else 0."""
    config, log_level = parse_args(argv)
    # Standard output is reserved for the ready lines.
    log_to_stderr(log_level.upper(), LogLine("%(levelname)5s %(name)s: %(message)s"))
    warn_of_misspelt()
    # Here, so that a refused flag does not wait for the server's packages.
    from kvflash.mocker.app import run  # noqa: PLC0415

    # libzmq aborts the process where a socket gets no file.
    allow_open_files()
    try:
        asyncio.run(run(config))
    except (OSError, KvflashError) as error:
        print(f"{program('mocker')}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
