"""Replayed speculation against a loop that decodes token by token."""

from collections import Counter
from itertools import product

from hypothesis import given, strategies as st
import pytest

from qspec.numerics.speculation.replay import expected_walk, overlap, runs_of, walk

AT = tuple[int, int]


def decoded(agrees: list[bool], gamma: int) -> Counter[AT]:
    """Steps of a loop that drafts `gamma` tokens, keeps those before the first that falls, and books what was read."""
    committed, read, steps = 1, 0, Counter[AT]()
    while committed < len(agrees):
        drafted = min(gamma, len(agrees) - committed - 1)
        steps[drafted, committed - read if read else 0] += 1
        stands = 0
        while stands < drafted and agrees[committed + stands]:
            stands += 1
        read = committed + min(stands, drafted - 1)  # the last draft token is never fed
        committed += stands + 1
    return steps


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 6))
def test_replay_is_the_loop(agrees: list[bool], gamma: int) -> None:
    """A walk that steps over the wrong number of tokens, drafts past the end, or forgets what a draft reads again."""
    found = walk([gamma] * len(agrees), runs_of(agrees), gamma)
    assert charged(found) == charged(decoded(agrees, gamma))


@given(st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0]), min_size=2, max_size=7), st.integers(1, 3))
def test_expected_steps_are_the_mean_of_all_outcomes(betas: list[float], gamma: int) -> None:
    """Chances of starts that do not add up: the expectation must equal the sum over all outcomes."""
    mean = Counter[AT]()
    for outcome in product([False, True], repeat=len(betas)):
        chance = 1.0
        for stood, beta in zip(outcome, betas, strict=True):
            chance *= beta if stood else 1 - beta
        for step, count in decoded(list(outcome), gamma).items():
            mean[step] += chance * count
    assert charged(expected_walk(betas, gamma)) == pytest.approx(charged(mean))


def charged(steps: dict[AT, float]) -> dict[AT, float]:
    """Steps without a draft read nothing, and are never reached with chance 0."""
    found = Counter[AT]()
    for (drafted, unread), count in steps.items():
        found[drafted, unread if drafted else 0] += count
    return {step: count for step, count in found.items() if count > 1e-12}


def test_overlap_is_the_sum_of_minima() -> None:
    """A maximum or a product in the minimum's place."""
    assert overlap({1: 0.7, 2: 0.3}, {1: 0.2, 3: 0.8}) == pytest.approx(0.2)
