"""Entry point of ``python -m kvflash.workers``."""

import sys

from kvflash.workers.app import main

if __name__ == "__main__":
    sys.exit(main())
