"""Entry point of ``python -m kvflash.keys``."""

import sys

from kvflash.keys.app import main

if __name__ == "__main__":
    sys.exit(main())
