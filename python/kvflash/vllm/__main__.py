"""``python -m kvflash.vllm``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvflash.launcher import run
from kvflash.vllm.command import PROGRAM, build


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it ends. Returns the exit status."""
    return run.main("vllm", PROGRAM, build, argv)


if __name__ == "__main__":
    sys.exit(main())
