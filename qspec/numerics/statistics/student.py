"""Intervals of means from few values, where a bootstrap is too narrow: Student's t, over values or over clusters.

A percentile bootstrap resamples what it has: from 3 values its "95 %" interval misses the mean of a normal law in more
than a quarter of all cases, from 6 in a seventh. Windows and prompts are few; items of a task are many (`paired`).
"""

from collections.abc import Sequence
import math
from statistics import NormalDist

MANY = 1000
"""Degrees of freedom from which the expansion around the normal law is good to 1e-5."""


def quantile(p: float, freedom: int) -> float:
    """Quantile of Student's law with `freedom` >= 1 degrees of freedom."""
    if freedom > MANY:
        z = NormalDist().inv_cdf(p)
        return z + (z**3 + z) / (4 * freedom)
    if p < 0.5:
        return -quantile(1 - p, freedom)
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2 * p - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(angle)): the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def mean_interval(
    values: Sequence[float], level: float = 0.95, low: float = -math.inf, high: float = math.inf
) -> tuple[float, float] | None:
    """Interval of the mean, cut at what the quantity cannot pass (`low`, `high`); None from a single value."""
    n = len(values)
    if n < 2:
        return None
    mean, error = sum(values) / n, deviation(values) / math.sqrt(n)
    half = quantile((1 + level) / 2, n - 1) * error
    return max(low, mean - half), min(high, mean + half)


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


def detectable_difference(spread: float, n: int, level: float = 0.95, power: float = 0.8) -> float:
    """Smallest true mean that `n` values of standard deviation `spread` show with `power`; inf from a single one."""
    if n < 2:
        return math.inf
    return (quantile((1 + level) / 2, n - 1) + quantile(power, n - 1)) * spread / math.sqrt(n)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the population that at least two values are drawn from."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
