"""Accounting of speculative steps."""

import pytest
import torch

from qspec.numerics.statistics.fidelity import sum_of_minima, wilson_interval
from qspec.speculation.stats import (
    Counts,
    SpecStats,
    acceptance_by_position,
    intervals_by_position,
    teacher_forced_betas,
)
from qspec.speculation.types import Sampling, StepRecord
from tests.speculation.toys import TableLM, blend, table

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


def test_positions_have_intervals_of_their_own_counts() -> None:
    """Catches intervals over all steps where only some reached a position."""
    assert intervals_by_position(STEPS)[2] == wilson_interval(1, 3)
    assert len(intervals_by_position(STEPS)) == len(acceptance_by_position(STEPS))


def test_best_length_follows_measured_costs() -> None:
    """Catches verification taken as free beyond one row: there the longest draft would be best."""
    free = [StepRecord(4, 3, 0.04, 1.0, 0.0)] * 4 + [StepRecord(4, 4, 0.04, 1.0, 0.0)] * 4
    dear = [StepRecord(4, 3, 0.04, 1 + 0.9 * 4, 0.0)] * 4 + [StepRecord(4, 4, 0.04, 1 + 0.9 * 4, 0.0)] * 4
    cheap, costly = (SpecStats.from_steps(steps, t_plain_step=1.0) for steps in (free, dear))
    assert cheap.best_length == 16
    assert cheap.best_speedup > cheap.predicted_speedup > 1
    assert costly.best_length <= 1
    assert dict(costly.verify_costs) == {1: 1.0, 5: pytest.approx(4.6)}  # a product of floats
    a = cheap.alpha
    assert cheap.expected_tokens == pytest.approx(1 + a + a**2 + a**3 + a**4)  # a sum of floats


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=4)], ids=["greedy", "sampled"])
def test_teacher_forced_rates_are_sums_of_minima_behind_every_token(sampling: Sampling) -> None:
    """Catches distributions of the wrong rows, unfiltered distributions, or a draft's padding that takes mass."""
    target, wide = table(1, 6), torch.full((6, 6, 9), 30.0, dtype=torch.float64)
    wide[..., :6] = draft = blend(2, target, 0.4)
    prompt, answer = [3, 1, 4], [2, 2, 0, 5]
    betas_T = teacher_forced_betas(TableLM(target), TableLM(wide), prompt, answer, sampling)
    text = [*prompt, *answer]
    rows = [[sampling.probs(t[text[i - 2], text[i - 1]][None]) for t in (target, draft)] for i in range(3, 7)]
    assert torch.equal(betas_T, torch.cat([sum_of_minima(p, q) for p, q in rows]))


def test_teacher_forcing_takes_what_fits() -> None:
    """Catches an overflow of a draft whose context is shorter than the text."""
    lm = TableLM(table(1, 6))
    betas = [teacher_forced_betas(lm, TableLM(table(1, 6), n), [3, 1, 4], [2, 2, 0, 5], Sampling()) for n in (2, 4, 9)]
    assert [beta.tolist() for beta in betas] == [[], [1.0] * 2, [1.0] * 4]


def test_sources_are_counted_apart() -> None:
    """Catches tokens of a lookup counted for the model behind it, and steps without drafts counted for either."""
    steps = [
        StepRecord(4, 3, 0.1, 1.0, 0.0, 4, "lookup"),
        StepRecord(2, 0, 0.1, 1.0, 0.0, 6, "model"),
        StepRecord(2, 1, 0.1, 1.0, 0.0, 2, "lookup"),
        StepRecord(0, 0, 0.0, 1.0, 0.0),
    ]
    stats = SpecStats.from_steps(steps, t_plain_step=1.0)
    assert stats.by_source == {"lookup": Counts(2, 6, 4), "model": Counts(1, 2, 0)}
    assert stats.nodes_per_step == 3


def test_steps_without_drafts_have_their_own_cost() -> None:
    """Catches a policy at 0 whose drafter still works, hidden among steps that draft."""
    steps = [StepRecord(4, 4, 0.5, 1.0, 0.3)] * 3 + [StepRecord(0, 0, 0.02, 1.0, 0.03)] * 2
    stats = SpecStats.from_steps(steps, t_plain_step=1.0)
    assert stats.idle_steps == 2
    assert stats.idle_cost == pytest.approx(0.05)
    assert SpecStats.from_steps(steps[:3], t_plain_step=1.0).idle_cost == 0
