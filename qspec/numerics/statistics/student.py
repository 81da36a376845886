"""Intervals of means from few values, where a bootstrap is too narrow: Student's t, over values or over clusters.

A percentile bootstrap resamples what it has: from 3 values its "95 %" interval misses the mean of normal values in more
than a quarter of all cases, from 6 in a seventh. Windows and prompts are few; items of a task are many (`paired`).
"""

from bisect import bisect_left
from collections.abc import Sequence
import math
from statistics import mean, stdev

from scipy import special

MOST = 10**6
"""Values beyond which no number is stated (`values_needed`)."""


def quantile(p: float, freedom: int) -> float:
    """Quantile of Student's distribution with `freedom` >= 1 degrees of freedom."""
    return float(special.stdtrit(freedom, p))


def mean_interval(
    values: Sequence[float], level: float = 0.95, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float] | None:
    """Interval of the mean, cut at what the quantity cannot pass (`low`, `high`); None from a single value."""
    n = len(values)
    if n < 2:
        return None
    middle, half = mean(values), quantile((1 + level) / 2, n - 1) * stdev(values) / math.sqrt(n)
    return max(low, middle - half), min(high, middle + half)


def ratio_interval(parts: Sequence[float], wholes: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Interval of `sum(parts) / sum(wholes)` over clusters that differ among each other; None from a single one.

    Linearised (Cochran, Sampling Techniques, 6.4): tokens of a prompt resemble each other, so prompts are what counts.
    """
    n, total = len(wholes), sum(wholes)
    if n < 2 or total == 0:
        return None
    ratio = sum(parts) / total
    residuals = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    half = quantile((1 + level) / 2, n - 1) * math.sqrt(n / (n - 1) * residuals) / total
    return ratio - half, ratio + half


def detectable_difference(spread: float, n: int) -> float:
    """Smallest true mean that `n` values of standard deviation `spread` show in 4 of 5 cases; inf from a single one."""
    if n < 2:
        return math.inf
    return (quantile(0.975, n - 1) + quantile(0.8, n - 1)) * spread / math.sqrt(n)


def values_needed(spread: float, effect: float) -> int | None:
    """Fewest values of standard deviation `spread` that show a true mean of `effect`; None beyond `MOST`."""
    needed = 2 + bisect_left(range(2, MOST), True, key=lambda n: detectable_difference(spread, n) <= effect)
    return needed if needed < MOST else None
