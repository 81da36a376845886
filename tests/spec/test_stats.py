"""Accounting of speculative steps."""

import pytest

from qspec.spec.stats import SpecStats, acceptance_by_position
from qspec.spec.types import StepRecord

STEPS = [  # drafted, accepted, then seconds of drafting, verifying, the rest; the first step drafts behind a prefill
    StepRecord(4, 4, 9.0, 1.5, 0.1),
    StepRecord(4, 1, 0.8, 1.5, 0.1),
    StepRecord(4, 0, 0.8, 1.5, 0.1),
    StepRecord(0, 0, 0.0, 1.0, 0.1),
    StepRecord(2, 2, 0.4, 1.5, 0.1),
]


def test_counts_and_ratios() -> None:
    """Catches untested drafts counted as rejected, and a prefill that makes the draft look slow."""
    stats = SpecStats.from_steps(STEPS, t_plain_step=1.0)
    assert (stats.steps, stats.drafted, stats.accepted) == (5, 14, 7)
    assert stats.alpha == 7 / 9  # 7 stood, 2 steps ended by a rejection
    assert stats.alpha_ci[0] < stats.alpha < stats.alpha_ci[1]
    assert stats.tokens_per_step == 12 / 5
    assert stats.c == pytest.approx(0.2)  # 0.8 s for 4 tokens: the median, exact but for one division
    assert stats.verify_cost == 1.5


def test_measured_speedup_counts_every_second() -> None:
    """Catches a measured speedup that leaves out drafting, the prefill of the draft, or the overhead."""
    stats = SpecStats.from_steps(STEPS, t_plain_step=1.0)
    assert stats.measured_speedup == pytest.approx(12 / (11.0 + 7.0 + 0.5))  # a sum of floats


def test_prediction_follows_the_lengths_in_use() -> None:
    """Catches a prediction at one mean length: E is concave in the length, so that would flatter the pair."""
    stats = SpecStats.from_steps(STEPS, t_plain_step=1.0)
    a = stats.alpha
    tokens = 3 * (1 + a + a**2 + a**3 + a**4) + 1 + (1 + a + a**2)
    assert stats.predicted_speedup == pytest.approx(tokens / (14 * 0.2 + 5 * 1.5))  # a sum of floats


def test_acceptance_by_position_counts_only_steps_that_reached_it() -> None:
    """Catches short drafts in the denominator of late positions, which makes any adaptive length look bad."""
    assert acceptance_by_position(STEPS) == (3 / 4, 2 / 4, 1 / 3, 1 / 3)


def test_plain_decoding_predicts_nothing() -> None:
    """Catches a division by zero without drafts."""
    stats = SpecStats.from_steps([StepRecord(0, 0, 0.0, 1.0, 0.0)] * 3, t_plain_step=1.0)
    assert (stats.alpha, stats.alpha_ci, stats.c, stats.per_position) == (0.0, (0.0, 1.0), 0.0, ())
    assert stats.predicted_speedup == stats.measured_speedup == 1.0


def test_statistics_of_nothing_are_refused() -> None:
    """Catches NaN in a report."""
    with pytest.raises(ValueError, match="no statistics"):
        SpecStats.from_steps([], t_plain_step=1.0)
