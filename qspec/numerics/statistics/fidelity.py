"""Closeness of two models per token, certainty of a difference, and whether tokens follow their distribution.

Distributions are over the vocabulary. Every sampled token is drawn from a distribution that is known, so the chance
that it falls into a set which was fixed before the draw is known too. The number that do is a sum of Bernoulli
variables, whose distribution is exact for any chances (Poisson binomial).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
import math
from typing import Any

import torch
from torch import Tensor

ROWS = 64
"""Tokens worked on at once, to bound float64 temporaries over large vocabularies."""
RESAMPLES = 100
"""Resamples worked on at once, to bound memory over many values."""
STEPS = 1000
"""A shift of chances is found to so many parts of 1."""


def kl_divergence(logits_p_TV: Tensor, logits_q_TV: Tensor) -> Tensor:
    """KL(p || q) of every token in nats, float64 `[T]`; inf where q rules out what p allows."""
    return _by_rows(_kl, logits_p_TV, logits_q_TV)


def top1_agreement(logits_p_TV: Tensor, logits_q_TV: Tensor) -> Tensor:
    """Whether both name the same most likely token, bool `[T]`; the lowest id of equals."""
    return logits_p_TV.argmax(-1) == logits_q_TV.argmax(-1)


def nll(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Negative log-likelihood of `targets` in nats, float64 `[T]`; perplexity is `exp` of its mean."""
    return _by_rows(_nll, logits_TV, targets_T)


def sum_of_minima(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """`sum min(p, q)` of two distributions, float64 `[T]`: acceptance of q's draft under p (arXiv 2211.17192, 3.6)."""
    return _by_rows(lambda p, q: torch.minimum(p, q).sum(-1, dtype=torch.float64), p_TV, q_TV)


def bootstrap_ci(values_N: Tensor, n: int = 1000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`, from `n` resamples."""
    from scipy import stats

    if values_N.numel() == 0:
        raise ValueError("no values to resample")
    if values_N.numel() == 1:
        return float(values_N), float(values_N)

    def mean(values: Any, axis: int) -> Any:
        return values.mean(axis)

    data, options = (values_N.flatten().double().cpu().numpy(),), {"method": "percentile", "batch": RESAMPLES}
    ci = stats.bootstrap(data, mean, n_resamples=n, confidence_level=level, rng=seed, **options).confidence_interval
    return float(ci.low), float(ci.high)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided p-value that two paired classifiers are equally accurate (exact binomial test).

    `only_a` / `only_b`: items that one alone got right.
    """
    from scipy import special

    return min(1.0, 2 * float(special.bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def wilson_interval(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion `k / n`; `(0, 1)` without trials."""
    from scipy import stats

    if n == 0:
        return 0.0, 1.0
    ci = stats.binomtest(k, n).proportion_ci(level, method="wilson")
    return float(ci.low), float(ci.high)


def excess_p(inside: Sequence[bool], chances: Sequence[float]) -> float:
    """Two-sided chance of as many tokens inside their sets, or of a rarer number; 1 without tokens."""
    from scipy import stats

    if not chances:
        return 1.0
    distribution, count = stats.poisson_binom(list(chances)), sum(inside)
    return min(1.0, 2 * float(min(distribution.cdf(count), distribution.sf(count - 1))))


def detectable_shift(chances: Sequence[float], level: float) -> float:
    """Smallest rise of every chance (total variation) that `excess_p` finds below `level` in 4 of 5 cases; 1: none."""
    from scipy import stats

    if not chances:
        return 1.0
    distribution, most = stats.poisson_binom(list(chances)), len(chances)
    first = bisect_right(range(most + 1), -level / 2, key=lambda count: -float(distribution.sf(count - 1)))

    def detected(step: int) -> bool:
        moved = [min(1.0, chance + step / STEPS) for chance in chances]
        return first <= most and float(stats.poisson_binom(moved).sf(first - 1)) >= 0.8

    return bisect_left(range(STEPS), True, key=detected) / STEPS


def _by_rows(f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([f(*rows) for rows in zip(torch.split(a, ROWS), torch.split(b, ROWS), strict=True)])


def _kl(logits_p_TV: Tensor, logits_q_TV: Tensor) -> Tensor:
    log_p, log_q = logits_p_TV.double().log_softmax(-1), logits_q_TV.double().log_softmax(-1)
    terms = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0)  # 0 log 0 = 0
    return terms.sum(-1).clamp_min(0)


def _nll(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return -logits_TV.double().log_softmax(-1).gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
