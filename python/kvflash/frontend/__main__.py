"""Entry point of ``python -m kvflash.frontend``."""

import sys

from kvflash.frontend.app import main
from kvflash.output import ended

if __name__ == "__main__":
    sys.exit(ended(main))
