"""How close two models are (per token), and how sure a measured difference is. Laws are over the vocabulary."""

from collections.abc import Callable
import math
from statistics import NormalDist

import torch
from torch import Tensor

ROWS = 64
"""Tokens worked on at once, to bound float64 temporaries over large vocabularies."""


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
    """`sum min(p, q)` of two laws, float64 `[T]`: the acceptance rate of q's draft under p (arXiv 2211.17192, 3.6)."""
    return _by_rows(lambda p, q: torch.minimum(p, q).sum(-1, dtype=torch.float64), p_TV, q_TV)


def bootstrap_ci(values_N: Tensor, n: int = 1000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values`, from `n` resamples."""
    size = values_N.numel()
    if size == 0:
        raise ValueError("no values to resample")
    values, generator = values_N.flatten().double().cpu(), torch.Generator().manual_seed(seed)
    means_n = torch.stack([values[torch.randint(size, (size,), generator=generator)].mean() for _ in range(n)])
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    lo, hi = means_n.quantile(tails).tolist()
    return lo, hi


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided p-value that two paired classifiers are equally accurate (exact binomial test).

    `only_a` / `only_b`: items that one alone got right.
    """
    n = only_a + only_b
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / (1 << n))


def wilson_interval(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion `k / n`; `(0, 1)` without trials."""
    if n == 0:
        return 0.0, 1.0
    z, p = NormalDist().inv_cdf((1 + level) / 2), k / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # Rounding must not push a bound past what was observed, or past 0 and 1.
    return max(0.0, min(p, (centre - spread) / (1 + z * z / n))), min(1.0, max(p, (centre + spread) / (1 + z * z / n)))


def _by_rows(f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([f(*rows) for rows in zip(torch.split(a, ROWS), torch.split(b, ROWS), strict=True)])


def _kl(logits_p_TV: Tensor, logits_q_TV: Tensor) -> Tensor:
    log_p, log_q = logits_p_TV.double().log_softmax(-1), logits_q_TV.double().log_softmax(-1)
    terms = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0)  # 0 log 0 = 0
    return terms.sum(-1).clamp_min(0)


def _nll(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return -logits_TV.double().log_softmax(-1).gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
