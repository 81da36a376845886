"""One candidate per unit, least total error within a budget of bytes: a multiple-choice knapsack."""

from collections.abc import Sequence
from dataclasses import dataclass

from qspec.errors import RecipeError


@dataclass(frozen=True)
class _Step:
    """From one candidate of a unit to the next of its convex hull: bytes more, error less."""

    unit: int
    candidate: int
    cost: int
    gain: float

    @property
    def order(self) -> tuple[float, int, int]:
        """Most error removed per byte first; of equals the earlier unit's, and the cheaper step."""
        return (-self.gain / self.cost, self.unit, self.cost)


def allocate(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Index of each unit's candidate, from bytes and errors per unit and candidate.

    Walks the steps of the units' convex hulls in order of error removed per byte and takes each that fits. The total
    is never above `budget`. A larger budget is never worse: at the first step that only it affords, all that the
    smaller one takes instead costs less, at no better rate. The error exceeds the optimum by less than that of the
    first step that does not fit (`gap`), because with it the relaxed problem, a lower bound, is already beaten. Equal
    input gives equal output. Raises `RecipeError` where even the cheapest candidates are too large.
    """
    return _walk(costs, errors, budget)[0]


def gap(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> float:
    """Bound of `allocate`'s distance from the optimum: the error that the first step left out would remove."""
    return _walk(costs, errors, budget)[1]


def _walk(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int) -> tuple[list[int], float]:
    pairs = [list(zip(cost, error, strict=True)) for cost, error in zip(costs, errors, strict=True)]
    chosen = [pair.index(min(pair)) for pair in pairs]
    left = budget - sum(pair[c][0] for pair, c in zip(pairs, chosen, strict=True))
    if left < 0:
        raise RecipeError(f"budget of {budget:,} bytes", f"the smallest possible size is {budget - left:,}", "raise it")
    hulls = [_hull(i, costs[i], errors[i], first) for i, first in enumerate(chosen)]
    closed, bound = set[int](), 0.0
    for step in sorted((step for hull in hulls for step in hull), key=lambda step: step.order):
        if step.unit in closed:
            continue
        if step.cost > left:
            closed.add(step.unit)  # later steps of a unit build on this one
            bound = bound or step.gain
            continue
        chosen[step.unit], left = step.candidate, left - step.cost
    return chosen, bound


def _hull(unit: int, cost: Sequence[int], error: Sequence[float], first: int) -> list[_Step]:
    """Steps from the cheapest candidate along the lower convex hull of `(cost, error)`, of falling rate."""
    steps, at = list[_Step](), first
    while True:
        ahead = [
            _Step(unit, c, cost[c] - cost[at], error[at] - error[c])
            for c in range(len(cost))
            if cost[c] > cost[at] and error[c] < error[at]
        ]
        if not ahead:
            return steps
        best = min(ahead, key=lambda step: (-step.gain / step.cost, -step.cost, step.candidate))
        steps.append(best)
        at = best.candidate
