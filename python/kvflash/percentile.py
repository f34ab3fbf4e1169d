"""The percentile that all reports use."""

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile, always one of the samples; None without samples."""
    if not samples:
        return None
    rank = max(1, math.ceil(len(samples) * percent / 100))
    return sorted(samples)[rank - 1]
