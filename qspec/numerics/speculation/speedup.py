"""Gain of speculation (arXiv 2211.17192): expected tokens, walltime, operations, the best draft length.

alpha: acceptance rate; gamma: draft length; c: seconds of a draft step / of a target step; c_hat: the same ratio of
arithmetic operations; verify cost: seconds of a target pass over gamma + 1 rows / over one row.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

from qspec.numerics.statistics.fidelity import wilson_interval

Rate = float | Sequence[float]
"""Acceptance rate of every draft token, or by position, given that all before were accepted (the last goes on)."""


def expected_tokens(alpha: Rate, gamma: int) -> float:
    """Tokens per target pass, `(1 - alpha^(gamma+1)) / (1 - alpha)` (eq. 1); as a sum, exact at alpha = 1 too."""
    return sum(survival(alpha, gamma))


def survival(alpha: Rate, gamma: int) -> list[float]:
    """Chances that a draft is accepted up to each of its positions 0 … gamma (position 0: always)."""
    if isinstance(alpha, int | float):
        return [alpha**i for i in range(gamma + 1)]
    return list(accumulate((alpha[min(i, len(alpha) - 1)] for i in range(gamma)), mul, initial=1.0))


def walltime_speedup(alpha: Rate, gamma: int, c: float, verify_cost: float = 1.0) -> float:
    """Speed against plain decoding (theorem 3.8); `verify_cost` 1 is the paper's assumption."""
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def operations(alpha: Rate, gamma: int, c_hat: float) -> float:
    """Arithmetic operations per token against plain decoding (theorem 3.11)."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: Rate, c: float, max_gamma: int, verify_cost: Callable[[int], float] | None = None, least: int = 0
) -> int:
    """Draft length of the largest walltime speedup, the shortest of equals; 0: plain decoding is fastest.

    `verify_cost` takes the number of rows (gamma + 1); None: every pass costs 1. `least`: the shortest that is tried.
    """
    tokens = list(accumulate(survival(alpha, max_gamma)))

    def speedup(gamma: int) -> float:
        return tokens[gamma] / (gamma * c + (verify_cost(gamma + 1) if verify_cost else 1.0))

    return max(range(least, max_gamma + 1), key=speedup)


def pass_cost(known: Mapping[int, float], rows: int) -> float:
    """Cost of a pass over `rows` from measured ones: straight lines between, flat in front, the mean slope behind.

    A cost that falls with the number of rows is noise: behind the last one it never does.
    """
    counts = sorted(known)
    at = bisect_left(counts, rows)
    if at == 0:
        return known[counts[0]]
    before = counts[at - 1]
    if at < len(counts):
        share = (rows - before) / (counts[at] - before)
        return known[before] + share * (known[counts[at]] - known[before])
    slope = (known[before] - known[counts[0]]) / max(1, before - counts[0])
    return known[before] + max(0.0, slope) * (rows - before)


def alpha_from_counts(drafted: Sequence[int], accepted: Sequence[int]) -> tuple[float, tuple[float, float]]:
    """Acceptance rate with its 95 % Wilson interval, from the counts of each step.

    A step tests its accepted tokens and, if not all, the rejected one; tokens behind a rejection are never
    tested. This is the maximum-likelihood estimate for independent tokens. Without any test: `0, (0, 1)`.
    """
    n_accepted = sum(accepted)
    tested = n_accepted + sum(a < d for d, a in zip(drafted, accepted, strict=True))
    return (n_accepted / tested if tested else 0.0), wilson_interval(n_accepted, tested)
