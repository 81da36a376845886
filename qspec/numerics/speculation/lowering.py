"""Layers of a draft lowered one after the other: what each costs in acceptance, against what it saves.

A draft cannot change the output, so the only price of fewer bits is acceptance. Units (decoder layers, the head) have
levels of falling precision, 0 the finest; a state has one level per unit. Losses of single units are taken to add up
when the order is made, and every state on the way is measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math

Levels = tuple[int, ...]


@dataclass(frozen=True)
class Stop:
    """A state on the way. acceptance: of its drafts; value: what is to be largest."""

    levels: Levels
    acceptance: float
    value: float


def single_losses(levels: Sequence[int], acceptance: Callable[[Levels], float]) -> list[list[float]]:
    """Loss of acceptance by unit and level, all other units at their finest; `levels`: how many each unit has."""
    start = (0,) * len(levels)
    best = acceptance(start)
    return [
        [0.0, *(best - acceptance((*start[:u], level, *start[u + 1 :])) for level in range(1, count))]
        for u, count in enumerate(levels)
    ]


def path(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]) -> list[Levels]:
    """States from the finest on: each time the unit and level of least loss per cost saved, while any saves something.

    For losses that add up, none of the same cost loses less (the relaxed knapsack's greedy order).
    """
    state, states = [0] * len(losses), [(0,) * len(losses)]
    while (move := _cheapest(state, losses, costs)) is not None:
        unit, level = move
        state[unit] = level
        states.append(tuple(state))
    return states


def descend(
    states: Sequence[Levels], measure: Callable[[Levels], tuple[float, float]], floor: float, patience: int
) -> list[Stop]:
    """Measured states until acceptance falls below `floor` of the first's, or `patience` of them gain no value."""
    stops: list[Stop] = []
    for levels in states:
        stops.append(Stop(levels, *measure(levels)))
        values = [stop.value for stop in stops]
        if stops[-1].acceptance < floor * stops[0].acceptance or len(stops) - 1 - values.index(max(values)) >= patience:
            break
    return stops


def best(stops: Sequence[Stop], floor: float) -> Stop:
    """The state of largest value, of those that keep `floor` of the first's acceptance."""
    return max((s for s in stops if s.acceptance >= floor * stops[0].acceptance), key=lambda s: s.value)


def _cheapest(
    state: Sequence[int], losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]
) -> tuple[int, int] | None:
    chosen: tuple[int, int] | None = None
    least = math.inf
    for unit, at in enumerate(state):
        for level in range(at + 1, len(costs[unit])):
            saved = costs[unit][at] - costs[unit][level]
            if saved > 0 and (rate := (losses[unit][level] - losses[unit][at]) / saved) < least:
                chosen, least = (unit, level), rate
    return chosen
