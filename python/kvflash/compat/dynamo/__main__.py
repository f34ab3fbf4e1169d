"""Entry point of ``python -m kvflash.compat.dynamo``."""

import sys

from kvflash.compat.dynamo.run import main

if __name__ == "__main__":
    sys.exit(main())
