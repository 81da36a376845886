"""Speculation replayed over a known text: which steps it would take, from what is accepted behind every position.

T positions of the text; the first token comes from the prompt's pass. Of a greedy target the replay is exact where the
text is its own: each step starts where the one before ended, and none drafts past the text's end.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

Steps = Mapping[tuple[int, int], float]
"""Expected number of steps, by how many tokens they draft and how many of the text a draft model reads first.

That is 1 after a rejection and 2 after a draft that was accepted whole, whose last token it has not read either; 0:
nothing but the prompt was read before, and the prompt is.
"""


def runs_of(agrees_T: Sequence[bool]) -> list[int]:
    """How many tokens from each position on are agreed upon without a break."""
    runs = [0] * (len(agrees_T) + 1)
    for at in range(len(agrees_T) - 1, -1, -1):
        runs[at] = runs[at + 1] + 1 if agrees_T[at] else 0
    return runs[:-1]


def walk(drafted_T: Sequence[int], runs_T: Sequence[int], gamma: int) -> Counter[tuple[int, int]]:
    """Steps that decode positions 1 … T - 1, drafts of at most `gamma`, of which the run at its start is accepted."""
    steps: Counter[tuple[int, int]] = Counter()
    at, unread = 1, 0
    while at < len(runs_T):
        drafted = min(drafted_T[at], gamma, len(runs_T) - at - 1)
        accepted = min(drafted, runs_T[at])
        steps[drafted, unread] += 1
        at, unread = at + accepted + 1, 2 if accepted == drafted else 1
    return steps


def expected_walk(betas_T: Sequence[float], gamma: int) -> dict[tuple[int, int], float]:
    """The same for chances that the token at each position is accepted: expected steps.

    `starts[t, unread]`: chance that a step starts at t; from there `r` tokens are accepted with chance
    `prod beta (1 - beta_(t+r))`.
    """
    size, steps = len(betas_T), defaultdict[tuple[int, int], float](float)
    starts = defaultdict[tuple[int, int], float](float, {(1, 0): 1.0})
    for at in range(1, size):
        drafted = min(gamma, size - at - 1)
        whole = sum(starts[at, unread] for unread in range(3))
        for unread in range(3):
            steps[drafted, unread] += starts[at, unread]
        for r, beta in enumerate(betas_T[at : at + drafted]):
            starts[at + r + 1, 1] += whole * (1 - beta)
            whole *= beta
        starts[at + drafted + 1, 2] += whole
    return {step: count for step, count in steps.items() if count}


def overlap(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """`sum min(p, q)` over the tokens that both distributions keep; below the whole sum by at most the smaller tail."""
    return min(1.0, sum(min(mass, q[token]) for token, mass in p.items() if token in q))
