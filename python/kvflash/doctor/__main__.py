"""Entry point of ``python -m kvflash.doctor``."""

import sys

from kvflash.doctor.app import main

if __name__ == "__main__":
    sys.exit(main())
