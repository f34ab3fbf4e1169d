"""Benchmarks share the tests' helpers; they run with ``make bench``, never with ``make test``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
