"""Do sampled tokens follow the law that they should? Counts of tokens inside sets against the sets' own probabilities.

Every token is drawn from a law that is known, so the chance that it falls into a set which was fixed before the draw is
known too. The number that do is a sum of Bernoulli variables, whose law is exact for any chances (Poisson binomial).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

STEPS = 1000
"""A shift is found to so many parts of 1."""


def excess_p(inside: Sequence[bool], chances: Sequence[float]) -> float:
    """Two-sided chance of as many tokens inside their sets, or of a rarer number; 1 without tokens."""
    from scipy import stats

    if not chances:
        return 1.0
    law, count = stats.poisson_binom(list(chances)), sum(inside)
    return min(1.0, 2 * float(min(law.cdf(count), law.sf(count - 1))))


def detectable_shift(chances: Sequence[float], level: float, power: float = 0.8) -> float:
    """Smallest rise of every chance (a total variation) that `excess_p` finds below `level` with `power`; 1: none."""
    from scipy import stats

    if not chances:
        return 1.0
    law, most = stats.poisson_binom(list(chances)), len(chances)
    first = bisect_right(range(most + 1), -level / 2, key=lambda count: -float(law.sf(count - 1)))

    def found(step: int) -> bool:
        moved = [min(1.0, chance + step / STEPS) for chance in chances]
        return first <= most and float(stats.poisson_binom(moved).sf(first - 1)) >= power

    return bisect_left(range(STEPS), True, key=found) / STEPS
