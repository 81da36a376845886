"""The Pareto front, the candidate nearest to a budget, and a draft length for every batch size."""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import TypeVar

K = TypeVar("K")
Costs = tuple[float, ...]
"""Costs of one candidate. Less is better; NaN is unknown and never better."""


def front(costs: Mapping[K, Costs]) -> list[K]:
    """Candidates that no other one equals or beats everywhere and beats somewhere, in the order of the first cost."""
    known = {key: tuple(math.inf if math.isnan(c) else c for c in row) for key, row in costs.items()}
    return sorted((k for k, row in known.items() if not dominated(row, known.values())), key=lambda k: known[k])


def dominated(row: Costs, others: Iterable[Costs]) -> bool:
    """Whether another one is nowhere more and somewhere less."""
    return any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in others)


def excess(costs: Costs, limits: Sequence[float | None]) -> float:
    """Sum of relative overshoots, 0 if all limits hold."""
    pairs = [(c, limit) for c, limit in zip(costs, limits, strict=True) if limit is not None]
    return sum(max(0.0, c / limit - 1) if math.isfinite(c) else math.inf for c, limit in pairs)


def choose(costs: Mapping[K, Costs], limits: Sequence[float | None]) -> tuple[K, bool]:
    """The least first cost within the limits (True), or else what oversteps them least (False)."""
    best = min(costs, key=lambda k: (excess(costs[k], limits), costs[k]))
    return best, excess(costs[best], limits) == 0


def paying(lows: Mapping[int, float], longest: int) -> tuple[int, list[tuple[int, int, int]]]:
    """The largest batch size at which drafting is shown to pay (0: none), and the schedule that drafts up to there.

    lows: lower ends of the intervals of the speedup by batch size, 0 where nothing is known; longest: the most that is
    drafted at once. The best estimates would keep drafts where they lose: of many noisy ones the last above 1 is luck.
    """
    last = max((size for size, low in lows.items() if low > 1), default=0)
    return last, schedule({size: longest if size <= last else 0 for size in lows})


def schedule(best: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """`[lo, hi, K]` from the best draft length at each measured batch size, never rising: more rows never make drafts
    cheaper, so a rise is noise. Ranges reach from one measured size to the next.
    """
    sizes, ranges, k = sorted(best), list[tuple[int, int, int]](), math.inf
    for size, after in zip(sizes, [*sizes[1:], sizes[-1] + 1], strict=True):
        k = min(k, best[size])
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], after - 1, int(k))
        else:
            ranges.append((size, after - 1, int(k)))
    return ranges
