"""Entry point of ``python -m kvflash.explain``."""

import sys

from kvflash.explain.app import main

if __name__ == "__main__":
    sys.exit(main())
