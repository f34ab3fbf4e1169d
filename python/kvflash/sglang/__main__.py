"""``python -m kvflash.sglang``."""

from __future__ import annotations

import sys

from kvflash.launcher import main
from kvflash.sglang.command import PROGRAM, build

if __name__ == "__main__":
    sys.exit(main("sglang", PROGRAM, build))
