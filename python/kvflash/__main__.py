"""``python -m kvflash`` is ``kvflash``."""

import sys

from kvflash.command import main

if __name__ == "__main__":
    sys.exit(main())
