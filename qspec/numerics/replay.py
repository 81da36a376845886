"""Speculation replayed over a known text: which steps it would take, from what stands behind every position.

T positions of the text; the first token comes from the prompt's pass. Of a greedy target the replay is exact where the
text is its own: each step starts where the one before ended.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

Steps = Mapping[int, float]
"""Expected number of steps by how many tokens they draft."""


def runs_of(agrees_T: Sequence[bool]) -> list[int]:
    """How many tokens from each position on are agreed upon without a break."""
    runs = [0] * (len(agrees_T) + 1)
    for at in range(len(agrees_T) - 1, -1, -1):
        runs[at] = runs[at + 1] + 1 if agrees_T[at] else 0
    return runs[:-1]


def walk(drafted_T: Sequence[int], runs_T: Sequence[int], gamma: int) -> Counter[int]:
    """Steps that decode positions 1 … T - 1, drafts of at most `gamma`, of which the run at its start stands."""
    steps: Counter[int] = Counter()
    at = 1
    while at < len(runs_T):
        drafted = min(drafted_T[at], gamma)
        steps[drafted] += 1
        at += min(drafted, runs_T[at]) + 1
    return steps


def expected_walk(betas_T: Sequence[float], gamma: int) -> dict[int, float]:
    """The same for chances that the token at each position stands: expected steps, all of `gamma` tokens.

    `starts[t]`: chance that a step starts at t; from there `r` tokens stand with chance `prod beta (1 - beta_(t+r))`.
    """
    size = len(betas_T)
    starts = [0.0] * (size + gamma + 1)
    starts[1] = 1.0
    for at in range(1, size):
        stands = starts[at]
        for r in range(gamma + 1):
            beta = betas_T[at + r] if r < gamma and at + r < size else 0.0
            starts[min(at + r + 1, size)] += stands * (1 - beta)
            stands *= beta
    return {gamma: sum(starts[1:size])}


def overlap(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """`sum min(p, q)` over the tokens that both laws keep; below the whole sum by at most the smaller tail."""
    return min(1.0, sum(min(mass, q[token]) for token, mass in p.items() if token in q))
