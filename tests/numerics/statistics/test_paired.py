"""Paired comparisons, against scipy and against simulation."""

from functools import cache
from itertools import pairwise
import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats
import torch

from qspec.numerics.statistics.fidelity import mcnemar_exact
from qspec.numerics.statistics.paired import (
    bootstrap_ratio,
    detectable_ratio,
    detectable_share,
    geometric_mean,
    holm,
    pairs_needed,
    proportion_difference,
    proportion_ratio,
    quartiles,
    rank_correlation,
    rank_interval,
    shown_sign,
)

p_value = cache(mcnemar_exact)


def discordant(p_lost: float, p_won: float, n: int, samples: int, seed: int = 0) -> list[tuple[int, int]]:
    """Items that one arm alone got right, of many comparisons over `n` items."""
    u_SN = torch.rand(samples, n, generator=torch.Generator().manual_seed(seed))
    lost_S, won_S = (u_SN < p_lost).sum(1), (u_SN > 1 - p_won).sum(1)
    return [(int(lost), int(won)) for lost, won in zip(lost_S, won_S, strict=True)]


def sign(lost: int, won: int, n: int) -> int:
    return shown_sign(proportion_difference(lost, won, n), p_value(lost, won))


def test_difference_interval_covers_the_truth():
    """Would catch a wrong variance or sign: the interval must hold the true difference in about 95 % of samples."""
    p_lost, p_won, n, hits = 0.12, 0.05, 150, 0
    for lost, won in discordant(p_lost, p_won, n, samples=600):
        lo, hi = proportion_difference(lost, won, n)
        hits += lo <= p_won - p_lost <= hi
    assert 0.93 <= hits / 600 <= 0.98  # three standard errors of a 0.95 share over 600 are 0.027


@pytest.mark.parametrize(("n", "share"), [(50, 0.1), (140, 0.05), (140, 0.15), (1000, 0.03)])
def test_a_difference_between_equals_is_shown_as_rarely_as_promised(n: int, share: float):
    """Would catch verdicts from noise: of equal arms that answer a share of items differently, at most 5 % part."""
    shown = [sign(lost, won, n) for lost, won in discordant(share, share, n, samples=1500)]
    wrong = sum(map(abs, shown)) / len(shown)
    assert 0.01 < wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1500)  # an exact test may stay below its level


@pytest.mark.parametrize(("n", "share"), [(50, 0.05), (140, 0.0), (140, 0.05), (1000, 0.005), (1000, 0.03)])
def test_the_detectable_drop_is_detected(n: int, share: float):
    """Would catch "a drop of so much would have been shown" said of a drop that mostly is not, or far too modestly."""
    drop = detectable_share(round(2 * share * n), n)
    power = [sign(lost, won, n) for lost, won in discordant(share + drop, share, n, samples=1500)].count(-1) / 1500
    assert 0.76 < power < 0.9  # counts come in steps, and one pair is added to what was seen


def test_no_item_can_show_what_one_item_is():
    """Would catch a detectable difference above 100 points."""
    assert detectable_share(0, 1) == detectable_share(2, 2) == 1.0


def test_no_discordant_pair_is_not_certainty():
    """Would catch an interval of width zero (as a bootstrap gives), which claims equality from a handful of items."""
    lo, hi = proportion_difference(0, 0, 20)
    assert lo < 0 < hi
    assert hi == pytest.approx(-lo)
    assert hi > proportion_difference(0, 0, 200)[1]
    low, high = proportion_ratio(12, 0, 0)
    assert low < 1 < high
    assert high == pytest.approx(1 / low)


def test_small_counts_by_hand():
    """Would catch half a pair too many in a cell, a share above 1, and a single item that is a ratio's inverse."""
    z, reach = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    assert proportion_difference(0, 3, 3)[1] == 1.0
    assert proportion_difference(3, 0, 3)[0] == -1.0
    assert proportion_difference(1, 4, 18)[0] == pytest.approx(0.15 - z * math.sqrt(6 - 9 / 20) / 20)
    half = z * math.sqrt(5 / (13 * 11))
    assert proportion_ratio(9, 3, 1) == pytest.approx((11 / 13 * math.exp(-half), 11 / 13 * math.exp(half)))
    k, share = reach**2 / 99, 5 / 100
    assert detectable_share(4, 99) == pytest.approx(k / 2 + math.sqrt(k * k / 4 + k * share))
    assert bootstrap_ratio(torch.tensor([0.5]), torch.tensor([0.25])) == (0.5, 0.5)
    rare = torch.tensor([0.0, 0.0, 0.9], dtype=torch.float64)  # 8 of 27 resamples have no score: they say 1
    assert bootstrap_ratio(rare, rare / 3) == pytest.approx((1 / 3, 1.0))
    half = 1.96 * math.sqrt(1.5 / 2)  # a perfect order of 5 is half a swap from itself: 1 - 6 / 120
    assert rank_interval(1.0, 5) == pytest.approx(
        (math.tanh(math.atanh(0.95) - half), math.tanh(math.atanh(0.95) + half))
    )
    assert rank_interval(0.5, 4) is not None


def test_swapping_arms_mirrors_the_interval():
    """Would catch `a - b` reported as `b - a`: losing items must give a negative difference and a ratio below 1."""
    lo, hi = proportion_difference(9, 2, 100)
    assert (lo + hi) / 2 < 0
    assert proportion_difference(2, 9, 100) == pytest.approx((-hi, -lo))
    low, high = proportion_ratio(40, 9, 2)
    assert low * high < 1
    assert proportion_ratio(40, 2, 9) == pytest.approx((1 / high, 1 / low))


@pytest.mark.parametrize(("n", "p_right", "p_lost"), [(50, 0.4, 0.1), (140, 0.3, 0.05), (1000, 0.3, 0.03)])
def test_the_interval_of_the_kept_share_covers_the_truth(n: int, p_right: float, p_lost: float):
    """Would catch a ratio whose denominator is taken as known, and items that both arms got right counted wrongly."""
    u_SN = torch.rand(1000, n, generator=torch.Generator().manual_seed(4))
    edges = (0.0, p_right - p_lost, p_right, p_right + p_lost / 2)
    cells = [((u_SN >= a) & (u_SN < b)).sum(1).tolist() for a, b in pairwise(edges)]
    truth = (p_right - p_lost / 2) / p_right
    intervals = [proportion_ratio(*counts) for counts in zip(*cells, strict=True)]
    held = sum(lo <= truth <= hi for lo, hi in intervals) / len(intervals)
    assert 0.93 < held < 0.985  # the pairs that are added make it a little wide


def test_bootstrap_of_a_ratio_agrees_with_scipy():
    """Would catch arms resampled apart: pairs that move together give a narrow interval."""
    generator = torch.Generator().manual_seed(5)
    a_N = torch.rand(150, dtype=torch.float64, generator=generator)
    b_N = (a_N - 0.1 * torch.rand(150, dtype=torch.float64, generator=generator)).clamp_min(0)

    def ratio(a: np.ndarray, b: np.ndarray) -> float:
        return float(b.mean() / a.mean())

    data = (a_N.numpy(), b_N.numpy())
    options = {"paired": True, "vectorized": False, "method": "percentile"}
    theirs = stats.bootstrap(data, ratio, n_resamples=2000, rng=0, **options).confidence_interval
    width = theirs.high - theirs.low
    # Two Monte-Carlo estimates of a 2.5 % quantile from 2000 draws: each is good to about 2 % of the width.
    assert bootstrap_ratio(a_N, b_N, n=2000) == pytest.approx((theirs.low, theirs.high), abs=0.1 * width)
    assert width < 0.1


def test_a_sign_needs_interval_and_test():
    """Would catch a loss called one by its interval alone, a test asked for where there is none, a wrong sign."""
    assert shown_sign((-0.3, -0.1), 0.01) == shown_sign((-0.3, -0.1), None) == -1
    assert shown_sign((0.1, 0.3), 0.01) == 1
    assert shown_sign((-0.3, -0.1), 0.05) == shown_sign((-0.3, 0.0), 0.01) == shown_sign((-0.1, 0.2), None) == 0
    assert shown_sign(None, None) == 0
    assert shown_sign((0.0, 0.3), None) == 0


def test_many_subjects_are_not_many_chances():
    """Would catch one of fourteen subjects called worse because fourteen were looked at; Holm's own example."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
    generator, alarms = torch.Generator().manual_seed(6), 0
    for _ in range(1000):
        alarms += min(holm(torch.rand(14, generator=generator).tolist())) < 0.05
    assert alarms / 1000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_geometric_mean_treats_twice_and_half_alike():
    """Would catch an arithmetic mean of ratios, which calls 2x and 0.5x together a gain; one ratio has no interval."""
    value, ci = geometric_mean([2.0, 0.5])
    assert value == pytest.approx(1.0)
    assert ci is not None
    assert ci[0] < 0.5 < 2 < ci[1]
    assert geometric_mean([1.7]) == (pytest.approx(1.7), None)
    assert geometric_mean([2.0, 8.0])[0] == pytest.approx(4.0)


@pytest.mark.parametrize("n", [2, 3, 6, 12])
def test_a_speedup_between_equals_is_shown_as_rarely_as_promised(n: int):
    """Would catch a percentile bootstrap over few prompts: it calls half of all pairs of prompts a gain or a loss."""
    ratios_Sn = (0.1 * torch.randn(1500, n, generator=torch.Generator().manual_seed(n))).exp()
    intervals = [geometric_mean(ratios)[1] for ratios in ratios_Sn.tolist()]
    wrong = sum(ci is not None and not ci[0] <= 1 <= ci[1] for ci in intervals) / len(intervals)
    assert wrong == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 1500))


def test_the_detectable_change_of_speed():
    """Would catch a change given as a logarithm, or from a single prompt."""
    assert detectable_ratio([1.3]) == math.inf
    steady, shaky = detectable_ratio([1.3, 1.31, 1.29, 1.3]), detectable_ratio([1.0, 1.7, 1.1, 1.6])
    assert 0 < steady < 0.03 < shaky
    assert 0 < detectable_ratio([1.3, 1.31]) < 0.3  # two have a spread


@pytest.mark.parametrize(("discordant", "n", "drop"), [(4, 120, 0.05), (0, 40, 0.02), (300, 2000, 0.01)])
def test_pairs_needed_are_those_that_show_the_drop(discordant: int, n: int, drop: float) -> None:
    """Would catch another level or power than the detectable drop has, and a share that is not that of the pairs."""
    needed = pairs_needed(discordant, n, drop)
    share = (discordant + 1) / (n + 1)

    def shown(pairs: int) -> float:
        k = (NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)) ** 2 / pairs
        return k / 2 + math.sqrt(k * k / 4 + k * share)

    assert shown(needed) <= drop < shown(needed - 1)


def test_a_rank_correlation_of_few_values_is_hardly_known():
    """Would catch an interval without width at a perfect order, and one that does not narrow as values are added."""
    assert rank_interval(0.5, 3) is rank_interval(math.nan, 9) is None
    low, high = rank_interval(1.0, 7) or (0, 0)
    assert 0.6 < low < 0.95 < high < 1
    low, high = rank_interval(0.5, 20) or (0, 0)
    assert (low, high) == pytest.approx((0.045, 0.783), abs=2e-3)  # atanh 0.5 -+ 1.96 sqrt(1.125 / 17)
    assert rank_interval(-0.5, 20) == pytest.approx((-high, -low))


def test_rank_correlation_agrees_with_scipy():
    """Would catch ties in the order of their appearance, a one-sided p, and a division by zero where nothing varies."""
    x, y = [3.0, 1.0, 2.0, 2.0, 9.0, 0.5], [1.0, 4.0, 4.0, 3.0, 0.0, 2.0]

    def statistic(order: np.ndarray) -> float:
        return float(stats.spearmanr(x, order).statistic)

    exact = stats.permutation_test((y,), statistic, permutation_type="pairings", vectorized=False)
    assert rank_correlation(x, y) == pytest.approx((exact.statistic, exact.pvalue))
    eight = [3.0, 1.0, 2.0, 2.0, 9.0, 0.5, 4.0, 7.0]
    assert rank_correlation(eight, [*eight[1:], 0.0]) == pytest.approx(tuple(stats.spearmanr(eight, [*eight[1:], 0.0])))
    many = [float(i) for i in range(12)], [0.0, 3.0, 1.0, 2.0, 5.0, 4.0, 8.0, 6.0, 7.0, 9.0, 11.0, 10.0]
    assert rank_correlation(*many)[1] < 0.01
    assert all(map(math.isnan, (*rank_correlation(x, [1.0] * 6), *rank_correlation([1.0] * 6, x))))
    two_kinds = [1.0, 2.0, 1.0, 2.0, 2.0, 1.0]
    assert rank_correlation(two_kinds, two_kinds)[0] == pytest.approx(1.0)


def test_quartiles_of_known_values():
    """Would catch swapped quartiles."""
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
