"""Entry point of ``python -m kvflash.doctor``."""

import sys

from kvflash.doctor.app import main
from kvflash.output import ended

if __name__ == "__main__":
    sys.exit(ended(main))
