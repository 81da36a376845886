"""Two arms measured on the same items: how sure a difference or ratio is, and how small a one would be seen.

Items are right or wrong (counts of those that one arm alone got right decide), scored (a bootstrap of pairs), or timed
(ratios, averaged as logarithms).
"""

from collections.abc import Sequence
from itertools import permutations
import math
from statistics import NormalDist

import torch
from torch import Tensor

from qspec.numerics.statistics import student


def proportion_difference(only_a: int, only_b: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of (share right in b) - (share right in a) over `n` pairs (Agresti and Min 2005, half a pair per cell).

    `only_a` / `only_b`: items that one alone got right. Unlike a bootstrap it keeps a width when no pair differs.
    """
    z, size = NormalDist().inv_cdf((1 + level) / 2), n + 2
    centre = (only_b - only_a) / size
    half = z * math.sqrt(max(0.0, only_a + only_b + 1 - (only_b - only_a) ** 2 / size)) / size
    return max(-1.0, centre - half), min(1.0, centre + half)


def proportion_ratio(both: int, only_a: int, only_b: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of (share right in b) / (share right in a): normal in the logarithm, half a pair added to each cell.

    `both`: items that both got right. It keeps a width when no pair differs, and an end when one arm got none right.
    """
    right_a, right_b = both + only_a + 1, both + only_b + 1
    error = math.sqrt((only_a + only_b + 1) / (right_a * right_b))
    half = NormalDist().inv_cdf((1 + level) / 2) * error
    return right_b / right_a * math.exp(-half), right_b / right_a * math.exp(half)


def bootstrap_ratio(a_N: Tensor, b_N: Tensor, n: int = 1000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of `mean(b) / mean(a)` over scored items, from `n` resamples of pairs."""
    generator, size = torch.Generator().manual_seed(seed), a_N.numel()
    picks = (torch.randint(size, (size,), generator=generator) for _ in range(n))
    ratios_n = torch.stack([b_N[pick].sum() / a_N[pick].sum() for pick in picks]).nan_to_num(1.0)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=ratios_n.dtype)
    lo, hi = ratios_n.quantile(tails).tolist()
    return lo, hi


def shown_sign(ci: tuple[float, float] | None, p_value: float | None, significance: float = 0.05) -> int:
    """Sign of a difference whose interval and (if there is one) test both exclude none; 0 when one of them does not."""
    low, high = ci or (-math.inf, math.inf)
    if low <= 0 <= high or (p_value is not None and p_value >= significance):
        return 0
    return 1 if low > 0 else -1


def detectable_share(discordant: int, n: int, level: float = 0.95, power: float = 0.8) -> float:
    """Smallest true drop of the share right that `n` pairs show with `power`; `discordant`: right in one arm only.

    The drop itself makes pairs discordant: `d` solves `d = (z_level + z_power) sqrt((share + d) / n)`, so it stays
    above 7.8 items where no pair differs (the exact test needs 6 to one side). One pair is added to the share.
    """
    law, share = NormalDist(), (discordant + 1) / (n + 1)
    k = (law.inv_cdf((1 + level) / 2) + law.inv_cdf(power)) ** 2 / n
    return min(1.0, k / 2 + math.sqrt(k * k / 4 + k * share))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests so that any at all below 0.05 happens by chance in 5 % of cases (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def geometric_mean(ratios: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Geometric mean of positive ratios and its interval (Student's t over logarithms; None from a single ratio)."""
    logs = [math.log(ratio) for ratio in ratios]
    ci = student.mean_interval(logs)
    return math.exp(sum(logs) / len(logs)), ci and (math.exp(ci[0]), math.exp(ci[1]))


def detectable_ratio(ratios: Sequence[float]) -> float:
    """Smallest true gain or loss over 1 that as many ratios show with 80 % power: 0.04 for 4 %."""
    if len(ratios) < 2:
        return math.inf
    logs = [math.log(ratio) for ratio in ratios]
    return math.expm1(min(700.0, student.detectable_difference(student.deviation(logs), len(logs))))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Spearman's rho (ranks of equals are their mean) and its two-sided p-value; nan where one side does not vary.

    p: over all orders of up to 7 values, else normal.
    """
    a, b = _ranks(x), _ranks(y)
    rho = _correlation(a, b)
    if math.isnan(rho):
        return rho, math.nan
    if len(a) > 7:
        return rho, 2 * NormalDist().cdf(-abs(rho) * math.sqrt(len(a) - 1))
    orders = [abs(_correlation(a, order)) for order in permutations(b)]
    return rho, sum(other >= abs(rho) - 1e-12 for other in orders) / len(orders)


def rank_interval(rho: float, n: int) -> tuple[float, float] | None:
    """95 % interval of Spearman's rho over n values (Bonett and Wright 2000); None for fewer than 4, and of nan.

    A perfect order is taken as half a swap of neighbours away from itself: that much n values cannot tell apart.
    """
    if n < 4 or math.isnan(rho):
        return None
    most = 1 - 6 / (n * (n * n - 1))
    z, half = math.atanh(max(-most, min(most, rho))), 1.96 * math.sqrt((1 + rho * rho / 2) / (n - 3))
    return math.tanh(z - half), math.tanh(z + half)


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    middle = (len(a) - 1) / 2
    products = sum((p - middle) * (q - middle) for p, q in zip(a, b, strict=True))
    squares = math.prod(math.sqrt(sum((p - middle) ** 2 for p in ranks)) for ranks in (a, b))
    return products / squares if squares else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile (linear interpolation)."""
    points = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    q1, median, q3 = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return q1, median, q3
