"""Entry point of ``python -m kvflash.router``."""

import sys

from kvflash.router.app import main

if __name__ == "__main__":
    sys.exit(main())
