"""What may be said of measured effects."""

import math

import pytest

from qspec.numerics.statistics.evidence import CHANGE, DROP, Evidence, of_difference, of_ratio, of_share, useful
from qspec.numerics.statistics.fidelity import mcnemar_exact
from qspec.numerics.statistics.paired import detectable_ratio, detectable_share, geometric_mean, proportion_difference
from qspec.numerics.statistics.student import quantile, values_needed


def ratios(*values: float) -> Evidence:
    return of_ratio(geometric_mean(values)[1], len(values))


def items(right: int, lost: int, won: int, n: int, chance: float = 0.0) -> Evidence:
    """The original got `right` of `n`, of which the other arm lost some; `won` of the others."""
    ci, p_value, least = proportion_difference(lost, won, n), mcnemar_exact(lost, won), detectable_share(lost + won, n)
    return of_difference(right / n, ci, p_value, n, least, lost + won, chance)


def test_one_prompt_says_nothing() -> None:
    """Would catch "no gain" said of a single prompt that was 2.71 times as fast."""
    found = ratios(2.71)
    assert (found.few, found.sign, found.ci, found.detectable, found.needed) == (True, 0, None, None, None)
    assert found.shortage("prompts") == "too few prompts to say: 1"


@pytest.mark.parametrize("values", [(0.05, 30.0), (0.3, 3.0), (1e-4, 1.0, 1e4)])
def test_an_interval_that_spans_everything_is_not_shown(values: tuple[float, ...]) -> None:
    """Would catch "95 % CI 4.99e-09 to 8.46e+09" and "one of 1264540123134 % would have been"."""
    found = ratios(*values)
    assert (found.few, found.ci, found.detectable) == (True, None, None)
    assert found.needed is None or found.needed > len(values)
    assert f"too few prompts to say: {len(values)}" in found.shortage("prompts")


def test_what_is_needed_is_an_estimate_from_the_spread() -> None:
    """Would catch a number of prompts that does not show the effect that it is stated for."""
    found = ratios(0.6, 1.0, 2.2)
    assert found.needed is not None
    spread = [0.6, 1.0, 2.2]
    many = detectable_ratio(spread * (found.needed // 3))
    assert many == pytest.approx(CHANGE, rel=0.3)  # the spread of repeated values is a little smaller
    assert found.shortage("prompts") == (
        f"too few prompts to say: 3, need about {found.needed:,} (estimated from their spread, for an effect of 10 %)"
    )


def test_what_is_shown_keeps_its_interval() -> None:
    """Would catch a gain that is shown and called too few for its width, and one that is not shown called shown."""
    wide = ratios(2.0, 3.0, 3.9)
    assert (wide.sign, wide.few) == (1, False)
    assert wide.ci is not None
    assert wide.ci[0] > 1
    assert wide.ci[1] > 5
    assert wide.detectable is None  # more than twice as fast would have been needed
    slow = ratios(*(1 / value for value in (2.0, 3.0, 3.9)))
    assert slow.sign == -1
    even = ratios(0.97, 1.02, 1.04, 0.99)
    assert (even.sign, even.few) == (0, False)
    assert even.detectable == pytest.approx(detectable_ratio([0.97, 1.02, 1.04, 0.99]))


@pytest.mark.parametrize("ci", [(0.0, 3.0), (-1.0, 2.0), (0.5, math.inf), (math.nan, math.nan)])
def test_intervals_that_are_none_say_nothing(ci: tuple[float, float]) -> None:
    """Would catch a logarithm of 0, and an infinite end that is printed."""
    assert of_ratio(ci, 5).few


def test_a_share_needs_a_narrow_interval() -> None:
    """Would catch an acceptance rate "0.26 (0 to 0.97)"."""
    assert of_share((0.2, 0.3), 12) == Evidence(12, ci=(0.2, 0.3))
    wide = of_share((0.0, 0.97), 2)
    assert wide.few
    assert wide.needed is not None
    spread = 0.97 / 2 * math.sqrt(2) / quantile(0.975, 1)
    assert wide.needed == values_needed(spread, CHANGE)
    assert of_share((0.1, 0.6), 9).ci == (0.1, 0.6)
    assert of_share((0.1, 0.61), 9).few
    assert of_share(None, 5).few
    assert of_share((0.2, 0.3), 1).few


@pytest.mark.parametrize(
    ("ci", "says"),
    [
        ((1.0, 4.0), True),
        ((1.0, 4.01), False),
        ((3.0, 3.0), True),
        ((0.0, 1e-9), False),
        ((2.0, 1.0), False),
        ((0.1, math.inf), False),
        (None, False),
    ],
)
def test_an_interval_says_something_up_to_twice_its_middle(ci: tuple[float, float] | None, says: bool) -> None:
    """Would catch another factor, one way instead of either, and ends in the wrong order."""
    assert useful(ci) is says


def test_two_values_may_say_something() -> None:
    """Would catch a count that starts at three, and an interval that is believed of a single value."""
    assert ratios(1.2, 1.21).sign == 1
    assert of_ratio((1.1, 1.2), 1).few
    assert of_ratio((1.1, 1.1), 3) == Evidence(3, 1, (1.1, 1.1), 0.0)


def test_words_for_cells() -> None:
    """Would catch chance without its share, and a number of values that is not known."""
    assert Evidence(2, few=True).brief == "too few: 2"
    assert Evidence(2, few=True, needed=1234).brief == "too few: 2, about 1,234 needed"
    assert (Evidence(9, chance=0.25).brief, Evidence(9, chance=0.0).brief) == ("at chance", "none right")
    assert Evidence(9, chance=0.25).shortage("items") == (
        "at chance: 9 items are not answered better than by guessing (25 %), so they can show no loss"
    )
    assert Evidence(9, chance=0.0).shortage("items").startswith("the original is right in none of 9 items")
    assert (Evidence(9).open, Evidence(9, few=True).open) == (False, True)


@pytest.mark.parametrize(("right", "chance"), [(14, 0.1), (17, 0.1), (40, 0.25), (0, 0.0)])
def test_a_score_at_chance_can_lose_nothing(right: int, chance: float) -> None:
    """Would catch "a drop of 7 points would have been shown" where the original guesses."""
    found = items(right, 5, 4, 140, chance)
    assert (found.chance, found.sign, found.detectable, found.few, found.open) == (chance, 0, None, False, True)
    assert ("at chance: 140 items are not answered better than by guessing" in found.shortage("items")) == (chance > 0)


def test_a_shown_loss_is_no_loss_at_chance() -> None:
    """Would catch a verdict from a score that guessing explains, and chance taken for a score above it."""
    assert items(12, 12, 0, 140, 0.1).sign == 0
    assert items(70, 12, 0, 140, 0.1).sign == -1
    assert items(23, 1, 1, 140, 0.1).chance is None  # 16 %: guessing gives so many in 1 of 60 cases


def test_no_more_can_be_lost_than_lies_above_chance() -> None:
    """Would catch "too few" missed where the whole way down to chance would not have shown."""
    small = items(9, 2, 1, 20, 0.25)
    assert (small.few, small.chance) == (True, None)
    assert small.effect == pytest.approx(DROP)
    assert small.needed is not None
    share = 4 / 21
    assert detectable_share(round(share * small.needed), small.needed) == pytest.approx(DROP, rel=0.05)
    large = items(900, 60, 50, 2000, 0.25)
    assert (large.few, large.sign) == (False, 0)
    assert large.detectable is not None
    assert large.detectable < 0.2
    near = items(60, 6, 6, 400, 0.115)  # 15 %, of which guessing explains 11.5
    assert near.few
    assert near.effect == pytest.approx(0.0175)


def test_scores_that_are_not_right_or_wrong_have_no_chance() -> None:
    """Would catch a binomial test of perplexities, and a number of items from pairs that nobody counted."""
    found = of_difference(0.04, (-0.2, 0.3), None, 12, 0.4)
    assert (found.few, found.chance, found.needed) == (True, None, 4800)
    assert of_difference(0.4, (-0.02, 0.03), None, 12, 0.04).detectable == 0.04
    assert of_difference(0.4, (-0.02, 0.03), None, 12, 0.4).few  # all of it, and no more
    assert of_difference(0.5, (-0.02, 0.03), 0.7, 120, 0.04) == Evidence(120, 0, (-0.02, 0.03), 0.04)
