"""Entry point of ``python -m kvflash.indexer``."""

import sys

from kvflash.indexer.app import main

if __name__ == "__main__":
    sys.exit(main())
