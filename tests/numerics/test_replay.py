"""Replayed speculation against a loop that decodes token by token."""

from itertools import product

from hypothesis import given, strategies as st
import pytest

from qspec.numerics.replay import expected_walk, overlap, runs_of, walk


def decoded(agrees: list[bool], gamma: int) -> int:
    """Steps of a loop that drafts `gamma` tokens and keeps those before the first that falls."""
    at, steps = 1, 0
    while at < len(agrees):
        for _ in range(gamma):
            if at >= len(agrees) or not agrees[at]:
                break
            at += 1
        at, steps = at + 1, steps + 1
    return steps


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 6))
def test_replay_is_the_loop(agrees: list[bool], gamma: int) -> None:
    """A walk that steps over the wrong number of tokens, or counts the prompt's token."""
    assert walk([gamma] * len(agrees), runs_of(agrees), gamma) == (
        {gamma: steps} if (steps := decoded(agrees, gamma)) else {}
    )


@given(st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0]), min_size=2, max_size=7), st.integers(1, 3))
def test_expected_steps_are_the_mean_of_all_outcomes(betas: list[float], gamma: int) -> None:
    """Chances of starts that do not add up: the expectation must equal the sum over all outcomes."""
    mean = 0.0
    for outcome in product([False, True], repeat=len(betas)):
        chance = 1.0
        for stood, beta in zip(outcome, betas, strict=True):
            chance *= beta if stood else 1 - beta
        mean += chance * decoded(list(outcome), gamma)
    assert expected_walk(betas, gamma)[gamma] == pytest.approx(mean)


def test_overlap_is_the_sum_of_minima() -> None:
    """A maximum or a product in the minimum's place."""
    assert overlap({1: 0.7, 2: 0.3}, {1: 0.2, 3: 0.8}) == pytest.approx(0.2)
