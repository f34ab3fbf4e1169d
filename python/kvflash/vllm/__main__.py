"""``python -m kvflash.vllm``."""

from __future__ import annotations

import sys

from kvflash.launcher import main
from kvflash.vllm.command import PROGRAM, build

if __name__ == "__main__":
    sys.exit(main("vllm", PROGRAM, build))
