"""Divergences and intervals agree with scipy."""

from itertools import product
import math

from hypothesis import given, strategies as st
import numpy as np
import pytest
from scipy import special, stats
import torch
from torch import Tensor

from qspec.numerics.statistics import fidelity
from qspec.numerics.statistics.fidelity import (
    bootstrap_ci,
    kl_divergence,
    mcnemar_exact,
    nll,
    sum_of_minima,
    top1_agreement,
    wilson_interval,
)


def logits(tokens: int = 6, vocab: int = 11, seed: int = 0) -> Tensor:
    return 3 * torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed))


def test_kl_divergence() -> None:
    """Catches KL(q || p), bits instead of nats, and a mean over the vocabulary."""
    p_TV, q_TV = logits(seed=1), logits(seed=2)
    expected = special.rel_entr(special.softmax(p_TV.double().numpy(), -1), special.softmax(q_TV.double().numpy(), -1))
    # float64 on both sides, eleven terms of at most about ten.
    np.testing.assert_allclose(kl_divergence(p_TV, q_TV).numpy(), expected.sum(-1), rtol=1e-12)


def test_kl_of_nearly_equal_laws() -> None:
    """Catches float32 sums, whose rounding swamps (and signs) the divergence of a good quantization."""
    p_TV = logits()
    assert (kl_divergence(p_TV, p_TV) == 0).all()
    nudge_TV = 1e-5 * logits(seed=1).double()
    p = p_TV.double().softmax(-1)
    # Second order: half the variance of the nudge under p; third-order terms are 1e-5 of it.
    expected = 0.5 * ((p * nudge_TV.square()).sum(-1) - (p * nudge_TV).sum(-1).square())
    assert kl_divergence(p_TV.double(), p_TV.double() + nudge_TV).numpy() == pytest.approx(expected.numpy(), rel=1e-3)


def test_kl_with_masked_tokens() -> None:
    """Catches 0 * inf: a token that p rules out costs nothing, one that only q rules out costs everything."""
    p_TV = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]])
    q_TV = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -math.inf]])
    assert kl_divergence(p_TV, q_TV).tolist() == [pytest.approx(math.log(1.5)), math.inf]
    assert kl_divergence(p_TV[:1], p_TV[:1]).tolist() == [0]


def test_top1_agreement() -> None:
    """Catches agreement over the batch instead of per token."""
    a_TV, b_TV = torch.tensor([[1.0, 2, 0], [5, 2, 0]]), torch.tensor([[0.0, 9, 0], [5, 6, 0]])
    assert top1_agreement(a_TV, b_TV).tolist() == [True, False]


def test_nll() -> None:
    """Catches a mean, a shift of targets, and the wrong sign."""
    x_TV, targets_T = logits(), torch.tensor([0, 3, 10, 1, 1, 7])
    expected = -np.log(special.softmax(x_TV.double().numpy(), -1))[np.arange(6), targets_T.numpy()]
    np.testing.assert_allclose(nll(x_TV, targets_T).numpy(), expected, rtol=1e-12)  # float64 on both sides


def test_sum_of_minima_is_one_minus_total_variation() -> None:
    """Catches min over tokens, or half of the distance."""
    p_TV, q_TV = logits(seed=1).double().softmax(-1), logits(seed=2).double().softmax(-1)
    expected = 1 - 0.5 * (p_TV - q_TV).abs().sum(-1)
    torch.testing.assert_close(sum_of_minima(p_TV, q_TV), expected, rtol=0, atol=1e-14)  # eleven float64 roundings
    assert sum_of_minima(torch.eye(2), torch.eye(2).flip(0)).tolist() == [0, 0]


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rows_are_independent_of_their_chunk(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chunk that drops its remainder, and a crash on an empty answer."""
    monkeypatch.setattr(fidelity, "ROWS", 3)
    p_TV, q_TV, targets_T = logits(tokens, seed=1), logits(tokens, seed=2), torch.zeros(tokens, dtype=torch.long)
    single = [kl_divergence(p_TV[t : t + 1], q_TV[t : t + 1]).item() for t in range(tokens)]
    assert kl_divergence(p_TV, q_TV).tolist() == single
    assert nll(p_TV, targets_T).shape == sum_of_minima(p_TV, q_TV).shape == (tokens,)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_exact(only_a: int, only_b: int) -> None:
    """Catches a one-sided test, and a p-value above one when both counts are equal."""
    n = only_a + only_b
    expected = stats.binomtest(only_a, n, 0.5).pvalue if n else 1.0
    assert mcnemar_exact(only_a, only_b) == pytest.approx(expected, rel=1e-9)  # scipy sums float64 tails


def test_mcnemar_of_many_items() -> None:
    """Catches float overflow of binomial coefficients."""
    expected = stats.binomtest(1500, 3200, 0.5).pvalue
    assert mcnemar_exact(1500, 1700) == pytest.approx(expected, rel=1e-9)  # scipy sums float64 tails


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from((0.9, 0.95)))
def test_wilson_interval(case: tuple[int, int], level: float) -> None:
    """Catches the normal approximation, which leaves [0, 1] and is empty at 0 and n."""
    k, n = case
    expected = stats.binomtest(k, n).proportion_ci(level, method="wilson")
    lo, hi = wilson_interval(k, n, level)
    assert (lo, hi) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)  # float64 on both sides
    assert 0 <= lo <= k / n <= hi <= 1


def test_wilson_interval_without_trials() -> None:
    """Catches a division by zero when nothing was drafted."""
    assert wilson_interval(0, 0) == (0, 1)


def test_bootstrap_law_by_enumeration() -> None:
    """Catches resampling without replacement, or of another size, against all 27 resamples of three values."""
    values_N = torch.tensor([0.0, 1.0, 10.0])
    means = [sum(resample) / 3 for resample in product(values_N.tolist(), repeat=3)]
    # Levels whose quantiles fall well inside a step of the exact law (steps of at least 1/27): at n = 4000 the
    # cumulative probabilities are good to 0.008, and the quantiles are then exactly those of the enumeration.
    for level in (0.95, 0.6):
        expected = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
        assert bootstrap_ci(values_N, n=4000, level=level) == pytest.approx(tuple(expected))


def test_intervals_are_95_percent_unless_asked_otherwise() -> None:
    """Catches a default that is another level than every report says."""
    values_N = torch.arange(20.0)
    assert bootstrap_ci(values_N) == bootstrap_ci(values_N, level=0.95) != bootstrap_ci(values_N, level=0.9)
    assert wilson_interval(3, 9) == wilson_interval(3, 9, 0.95) != wilson_interval(3, 9, 0.9)


def test_bootstrap_is_a_function_of_its_seed() -> None:
    """Catches use of the global generator: a report must be reproducible and leave no trace."""
    values_N = torch.arange(20.0)
    before = torch.get_rng_state()
    assert bootstrap_ci(values_N, n=50, seed=1) == bootstrap_ci(values_N, n=50, seed=1)
    assert bootstrap_ci(values_N, n=50, seed=1) != bootstrap_ci(values_N, n=50, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_bootstrap_edges() -> None:
    """Catches an interval wider than a single value, and a made-up one of none."""
    assert bootstrap_ci(torch.tensor([2.5]), n=10) == (2.5, 2.5)
    with pytest.raises(ValueError, match="no values to resample"):
        bootstrap_ci(torch.zeros(0))
