"""Two arms measured on the same items: how sure a difference or ratio is, and how small a one would be seen."""

import math
from statistics import NormalDist

import torch

from qspec.numerics.fidelity import bootstrap_ci


def proportion_difference(only_a: int, only_b: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of (share right in b) - (share right in a) over `n` pairs (Agresti and Min 2005, half a pair per cell).

    `only_a` / `only_b`: items that one alone got right. Unlike a bootstrap it keeps a width when no pair differs.
    """
    z, size = NormalDist().inv_cdf((1 + level) / 2), n + 2
    centre = (only_b - only_a) / size
    half = z * math.sqrt(max(0.0, only_a + only_b + 1 - (only_b - only_a) ** 2 / size)) / size
    return max(-1.0, centre - half), min(1.0, centre + half)


def shown_sign(ci: tuple[float, float], p_value: float | None, significance: float = 0.05) -> int:
    """Sign of a difference whose interval and (if there is one) test both exclude none; 0 when one of them does not."""
    low, high = ci
    if low <= 0 <= high or (p_value is not None and p_value >= significance):
        return 0
    return 1 if low > 0 else -1


def detectable_difference(deviation: float, n: int, level: float = 0.95, power: float = 0.8) -> float:
    """Smallest true mean difference that `n` pairs show with `power`; `deviation` is that of one pair's difference."""
    law = NormalDist()
    return (law.inv_cdf((1 + level) / 2) + law.inv_cdf(power)) * deviation / math.sqrt(n)


def pair_deviation(only_a: int, only_b: int, n: int) -> float:
    """Standard deviation of right-or-wrong differences, one discordant pair added so that it is never 0."""
    share = (only_a + only_b + 1) / (n + 1)
    return math.sqrt(min(1.0, share))


def geometric_mean(ratios: list[float], seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Geometric mean of positive ratios with its bootstrap interval over items (the interval of 1 item is the item)."""
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    lo, hi = bootstrap_ci(logs, seed=seed)
    return math.exp(float(logs.mean())), (math.exp(lo), math.exp(hi))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile (linear interpolation)."""
    points = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    q1, median, q3 = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return q1, median, q3
