"""Intervals from few values, against scipy and against simulation."""

import math

import pytest
from scipy import stats
import torch

from qspec.numerics.statistics.student import (
    detectable_difference,
    mean_interval,
    quantile,
    ratio_interval,
    values_needed,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 31, 199, 1000, 1001, 20_000])
@pytest.mark.parametrize("p", [0.025, 0.5, 0.8, 0.975, 0.9995])
def test_quantiles_agree_with_scipy(p: float, freedom: int):
    """Would catch the arguments of scipy's own function mixed up."""
    assert quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-5, abs=1e-9)


def test_mean_interval_agrees_with_scipy():
    """Would catch n for n - 1, a one-sided quantile, and a level that is ignored."""
    values = [1.0, 2.5, 0.3, 4.0, 2.2]
    for level in (0.9, 0.95):
        theirs = stats.ttest_1samp(values, 0.0).confidence_interval(level)
        assert mean_interval(values, level) == pytest.approx((theirs.low, theirs.high))


def test_intervals_stay_where_values_can_be():
    """Would catch a divergence below zero or an agreement above one, and certainty from a single value."""
    assert mean_interval([0.01, 0.3], low=0.0, high=1.0) == (0.0, 1.0)
    assert mean_interval([0.5]) is None
    assert ratio_interval([3], [4]) is None
    assert ratio_interval([0, 0], [0, 0]) is None


def test_clusters_are_what_counts():
    """Would catch tokens of a prompt taken as independent: prompts that differ must widen the interval."""
    alike, apart = ratio_interval([50] * 6, [100] * 6), ratio_interval([90, 10] * 3, [100] * 6)
    assert alike == pytest.approx((0.5, 0.5))
    assert apart is not None
    assert apart[1] - apart[0] > 0.8


def test_ratio_interval_covers_the_truth():
    """Would catch a mean of ratios in place of the ratio of sums, and clusters weighted alike whatever their size."""
    generator, held = torch.Generator().manual_seed(0), 0
    for _ in range(1000):
        rates_C = (0.7 + 0.1 * torch.randn(12, generator=generator)).clamp(0, 1)
        sizes_C = torch.randint(20, 200, (12,), generator=generator)
        stood_C = torch.binomial(sizes_C.float(), rates_C, generator=generator)
        ci = ratio_interval(stood_C.tolist(), sizes_C.tolist())
        assert ci is not None
        held += ci[0] <= 0.7 <= ci[1]
    assert 0.91 < held / 1000 < 0.97  # linearised over 12 clusters of unequal size it is a little narrow


def test_detectable_difference_has_its_power():
    """Would catch a missing power term: a shift of that size must be significant in about 80 % of samples."""
    generator, n, spread = torch.Generator().manual_seed(1), 8, 0.5
    shift = detectable_difference(spread, n)
    samples = shift + spread * torch.randn(2000, n, generator=generator, dtype=torch.float64)
    shown = [ci is not None and ci[0] > 0 for ci in map(mean_interval, samples.tolist())]
    assert sum(shown) / 2000 == pytest.approx(0.8, abs=0.04)  # three standard errors are 0.027; t for noncentral t
    assert detectable_difference(spread, 1) == math.inf
    for few in (2, 3):  # by n - 1 degrees of freedom
        reach = stats.t.ppf(0.975, few - 1) + stats.t.ppf(0.8, few - 1)
        assert detectable_difference(spread, few) == pytest.approx(reach * spread / math.sqrt(few))


def test_clusters_of_one_size_have_the_interval_of_their_mean():
    """Would catch the variance of a sample for that of its population (n for n - 1): too narrow for few prompts."""
    parts = [3, 5, 4, 8]
    assert ratio_interval(parts, [10] * 4) == pytest.approx(mean_interval([part / 10 for part in parts]))
    assert ratio_interval(parts, [10] * 4, 0.8) == pytest.approx(mean_interval([part / 10 for part in parts], 0.8))
    assert ratio_interval(parts[:2], [10] * 2) == pytest.approx(mean_interval([0.3, 0.5]))


def test_values_needed_is_where_the_effect_becomes_detectable():
    """Would catch a count that is off by one, one for half the power, and a search that never ends."""
    for spread, effect in ((0.5, 0.1), (0.02, 0.1), (1.0, 0.9)):
        needed = values_needed(spread, effect)
        assert needed is not None
        assert detectable_difference(spread, needed) <= effect
        assert needed == 2 or detectable_difference(spread, needed - 1) > effect
    assert values_needed(1e9, 0.1) is None
