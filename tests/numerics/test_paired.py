"""Paired comparisons, against scipy and against simulation."""

import math

import pytest
import torch

from qspec.numerics.paired import (
    detectable_difference,
    geometric_mean,
    pair_deviation,
    proportion_difference,
    quartiles,
    shown_sign,
)


def test_difference_interval_covers_the_truth():
    """Would catch a wrong variance or sign: the interval must hold the true difference in about 95 % of samples."""
    generator = torch.Generator().manual_seed(0)
    p_lost, p_won, n, hits = 0.12, 0.05, 150, 0
    for _ in range(600):
        u_N = torch.rand(n, generator=generator)
        lost, won = int((u_N < p_lost).sum()), int((u_N > 1 - p_won).sum())
        lo, hi = proportion_difference(lost, won, n)
        hits += lo <= p_won - p_lost <= hi
    assert 0.93 <= hits / 600 <= 0.98  # three standard errors of a 0.95 share over 600 are 0.027


def test_no_discordant_pair_is_not_certainty():
    """Would catch an interval of width zero (as a bootstrap gives), which claims equality from a handful of items."""
    lo, hi = proportion_difference(0, 0, 20)
    assert lo < 0 < hi
    assert hi == pytest.approx(-lo)
    assert hi > proportion_difference(0, 0, 200)[1]
    assert pair_deviation(0, 0, 20) > 0


def test_swapping_arms_mirrors_the_interval():
    """Would catch `a - b` reported as `b - a`: losing items must give a negative difference."""
    lo, hi = proportion_difference(9, 2, 100)
    assert (lo + hi) / 2 < 0
    assert proportion_difference(2, 9, 100) == pytest.approx((-hi, -lo))


def test_detectable_difference_has_its_power():
    """Would catch a missing power term: a shift of that size must be significant in about 80 % of samples."""
    generator, n, deviation = torch.Generator().manual_seed(1), 80, 0.5
    shift = detectable_difference(deviation, n)
    samples = shift + deviation * torch.randn(2000, n, generator=generator, dtype=torch.float64)
    z = samples.mean(1) / (deviation / math.sqrt(n))
    power = float((z.abs() > 1.959964).double().mean())
    assert power == pytest.approx(0.8, abs=0.03)  # three standard errors of a 0.8 share over 2000


def test_a_sign_needs_interval_and_test():
    """Would catch a loss called one by its interval alone, a test asked for where there is none, a wrong sign."""
    assert shown_sign((-0.3, -0.1), 0.01) == shown_sign((-0.3, -0.1), None) == -1
    assert shown_sign((0.1, 0.3), 0.01) == 1
    assert shown_sign((-0.3, -0.1), 0.05) == shown_sign((-0.3, 0.0), 0.01) == shown_sign((-0.1, 0.2), None) == 0


def test_geometric_mean_treats_twice_and_half_alike():
    """Would catch an arithmetic mean of ratios, which calls 2x and 0.5x together a gain."""
    value, (lo, hi) = geometric_mean([2.0, 0.5])
    assert value == pytest.approx(1.0)
    assert lo <= 1 <= hi
    assert geometric_mean([1.7]) == (pytest.approx(1.7), (pytest.approx(1.7), pytest.approx(1.7)))


def test_quartiles_of_known_values():
    """Would catch swapped quartiles."""
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
