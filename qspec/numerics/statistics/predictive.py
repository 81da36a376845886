"""How far a model's prediction may miss, from those that were confirmed: beyond the spread that it knows of.

Errors are of logarithms, so that twice too fast and half too fast are equally wrong. Halves: half-widths of 95 %
intervals that know no error of the model itself.
"""

from collections.abc import Sequence
import math
from statistics import NormalDist

from qspec.numerics.statistics import student

Z = NormalDist().inv_cdf(0.975)
TOLERANCE = 0.25
"""Part by which a prediction may miss a measured speed, either way, and still be said to hold."""


def miss(predicted: float, measured: float) -> float:
    """How far a prediction is off, by the larger over the smaller: 0.5 for half as much again, either way."""
    low, high = sorted((predicted, measured))
    return high / low - 1 if low > 0 else math.inf


def off(predicted: float, measured: float) -> bool:
    """Whether a prediction is further off than `TOLERANCE`."""
    return not miss(predicted, measured) <= TOLERANCE


def excess_deviation(errors: Sequence[float], halves: Sequence[float]) -> float:
    """Root of the mean square of errors beyond what their halves explain; 0 if they explain all, or without errors."""
    squares = [error**2 - (half / Z) ** 2 for error, half in zip(errors, halves, strict=True)]
    return math.sqrt(max(0.0, sum(squares) / len(squares))) if squares else 0.0


def widened(half: float, errors: Sequence[float], halves: Sequence[float]) -> float:
    """Half-width of the 95 % interval with the model's own error, known from `errors` of others; `half` without any."""
    if not errors:
        return half
    spread = math.hypot(half / Z, excess_deviation(errors, halves))
    return student.quantile(0.975, len(errors)) * spread


def left_out(errors: Sequence[float], halves: Sequence[float]) -> list[float]:
    """The same of every confirmed one, from all others."""
    return [
        widened(half, [*errors[:i], *errors[i + 1 :]], [*halves[:i], *halves[i + 1 :]]) for i, half in enumerate(halves)
    ]
