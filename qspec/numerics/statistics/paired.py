"""Two arms measured on the same items: how sure a difference or ratio is, and how small a one would be seen.

Items are right or wrong (counts of those that one arm alone got right decide), scored (a bootstrap of pairs), or timed
(ratios, averaged as logarithms).
"""

from collections.abc import Sequence
import math
from statistics import NormalDist, stdev
from typing import Any

import torch
from torch import Tensor

from qspec.numerics.statistics import student

REACH = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
"""Standard errors that a true effect must be away from none, to be shown at 95 % in 4 of 5 cases."""
BATCH = 100
"""Resamples or orders that are worked on at once, which bounds memory over many items."""


def proportion_difference(only_a: int, only_b: int, n: int) -> tuple[float, float]:
    """Interval of (share right in b) - (share right in a) over `n` pairs (Agresti and Min 2005, half a pair per cell).

    `only_a` / `only_b`: items that one alone got right. Unlike a bootstrap it keeps a width when no pair differs.
    """
    z, size = NormalDist().inv_cdf(0.975), n + 2
    centre = (only_b - only_a) / size
    half = z * math.sqrt(max(0.0, only_a + only_b + 1 - (only_b - only_a) ** 2 / size)) / size
    return max(-1.0, centre - half), min(1.0, centre + half)


def proportion_ratio(both: int, only_a: int, only_b: int) -> tuple[float, float]:
    """Interval of (share right in b) / (share right in a): normal in the logarithm, half a pair added to each cell.

    `both`: items that both got right. It keeps a width when no pair differs, and an end when one arm got none right.
    """
    right_a, right_b = both + only_a + 1, both + only_b + 1
    error = math.sqrt((only_a + only_b + 1) / (right_a * right_b))
    half = NormalDist().inv_cdf(0.975) * error
    return right_b / right_a * math.exp(-half), right_b / right_a * math.exp(half)


def bootstrap_ratio(a_N: Tensor, b_N: Tensor, n: int = 1000) -> tuple[float, float]:
    """Percentile interval of `mean(b) / mean(a)` over scored items, from `n` resamples of pairs; a's is above 0."""
    from scipy import stats

    if a_N.numel() == 1:
        return float(b_N / a_N), float(b_N / a_N)

    def ratio(a: Any, b: Any, axis: int) -> Any:
        none = a.sum(axis) == 0  # a resample without any score says 1
        return (b.sum(axis) + none) / (a.sum(axis) + none)

    data, options = (a_N.numpy(), b_N.numpy()), {"paired": True, "method": "percentile", "batch": BATCH}
    ci = stats.bootstrap(data, ratio, n_resamples=n, rng=0, **options).confidence_interval
    return float(ci.low), float(ci.high)


def shown_sign(ci: tuple[float, float] | None, p_value: float | None) -> int:
    """Sign of a difference whose interval and (if there is one) test both exclude none; 0 when one of them does not."""
    low, high = ci or (-math.inf, math.inf)
    if low <= 0 <= high or (p_value is not None and p_value >= 0.05):
        return 0
    return 1 if low > 0 else -1


def detectable_share(discordant: int, n: int) -> float:
    """Smallest true drop of the share right that `n` pairs show in 4 of 5 cases; `discordant`: right in one arm only.

    The drop itself makes pairs discordant: `d` solves `d = REACH sqrt((share + d) / n)`, so it stays
    above 7.8 items where no pair differs (the exact test needs 6 to one side). One pair is added to the share.
    """
    k, share = REACH**2 / n, (discordant + 1) / (n + 1)
    return min(1.0, k / 2 + math.sqrt(k * k / 4 + k * share))


def pairs_needed(discordant: int, n: int, drop: float) -> int:
    """Fewest pairs that show a true drop of the share right, from `discordant` of `n` seen: `detectable_share` solved
    for its number of pairs.
    """
    return math.ceil(REACH**2 * (drop + (discordant + 1) / (n + 1)) / drop**2)


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
    return math.expm1(min(700.0, student.detectable_difference(stdev(logs), len(logs))))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Spearman's rho (ranks of equals are their mean) and its two-sided p-value; nan where one side does not vary.

    p: over all orders of up to 7 values, else by Student's t.
    """
    from scipy import stats

    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan, math.nan
    correlation = stats.spearmanr(x, y)
    if len(x) > 7:
        return float(correlation.statistic), float(correlation.pvalue)
    a = stats.rankdata(x)
    exact = stats.permutation_test(
        (stats.rankdata(y),),
        lambda order, axis: (a * order).sum(axis),
        permutation_type="pairings",
        n_resamples=math.inf,
        batch=BATCH,
    )
    return float(correlation.statistic), float(exact.pvalue)


def rank_interval(rho: float, n: int) -> tuple[float, float] | None:
    """95 % interval of Spearman's rho over n values (Bonett and Wright 2000); None for fewer than 4, and of nan.

    A perfect order is taken as half a swap of neighbours away from itself: that much n values cannot tell apart.
    """
    if n < 4 or math.isnan(rho):
        return None
    most = 1 - 6 / (n * (n * n - 1))
    z, half = math.atanh(max(-most, min(most, rho))), 1.96 * math.sqrt((1 + rho * rho / 2) / (n - 3))
    return math.tanh(z - half), math.tanh(z + half)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile (linear interpolation)."""
    points = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    q1, median, q3 = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return q1, median, q3
