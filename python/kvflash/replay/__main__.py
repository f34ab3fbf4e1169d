"""Entry point of ``python -m kvflash.replay``."""

import sys

from kvflash.output import ended
from kvflash.replay.app import main

if __name__ == "__main__":
    sys.exit(ended(main))
