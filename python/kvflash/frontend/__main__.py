"""Entry point of ``python -m kvflash.frontend``."""

import sys

from kvflash.frontend.app import main

if __name__ == "__main__":
    sys.exit(main())
