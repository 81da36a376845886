"""Losses of draft heads against their definitions, and the published schedule."""

import pytest
import torch

from qspec.numerics.speculation.speculator import (
    agreement,
    expected_tokens,
    overlap,
    overlap_loss,
    probs_loss,
    rate_at,
    token_loss,
)

LOGITS = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
IDS = torch.tensor([[2, -1], [0, 1]])
PROBS = torch.tensor([[0.5, 0.3], [0.6, 0.2]], dtype=torch.float64)
SAMPLINGS = LOGITS.softmax(-1)


def test_losses_follow_their_definitions():
    """Would catch ids that the draft does not know counted as its last one, or a mean over the kept ids."""
    expected = -(0.5 * SAMPLINGS[0, 2].log() + 0.6 * SAMPLINGS[1, 0].log() + 0.2 * SAMPLINGS[1, 1].log()) / 2
    torch.testing.assert_close(probs_loss(LOGITS, IDS, PROBS), expected)
    torch.testing.assert_close(
        overlap(SAMPLINGS, IDS, PROBS), torch.stack([SAMPLINGS[0, 2].clamp_max(0.5), SAMPLINGS[1, 0] + 0.2])
    )
    torch.testing.assert_close(overlap_loss(LOGITS, IDS, PROBS), 1 - overlap(SAMPLINGS, IDS, PROBS).mean())
    torch.testing.assert_close(token_loss(LOGITS, torch.tensor([2, -1])), -SAMPLINGS[0, 2].log() / 2)
    assert agreement(LOGITS, torch.tensor([[2], [-1]])).tolist() == [True, False]


def test_overlap_is_what_acceptance_is_bounded_by():
    """Would catch a sum of maxima or a distance: equal distributions overlap wholly, disjoint ones not at all."""
    probs = torch.tensor([[0.2, 0.3, 0.5]])
    torch.testing.assert_close(overlap(probs, torch.tensor([[0, 1, 2]]), probs), torch.ones(1))
    assert float(overlap(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))) == 0


def test_schedule_is_the_published_one():
    """Would catch a linear warm-up, or a second stage that starts where the first one ended."""
    first, total = 15000, 21000
    warm = 15000 // 20
    assert rate_at(warm // 2 - 1, first, total, 0.1) == pytest.approx(0.75)  # 1 - (1 - 1/2) ** 2
    assert rate_at(first // 2, first, total, 0.1) == pytest.approx(0.55)
    assert rate_at(first - 1, first, total, 0.1) == pytest.approx(0.1, rel=1e-3)
    assert rate_at(first + 3000, first, total, 0.1) == pytest.approx(0.055)
    assert rate_at(total - 1, first, total, 0.1) == pytest.approx(0.01, rel=1e-3)
    assert 0 < rate_at(first, first, total, 0.1) < 0.001


def test_expected_tokens_of_a_chain():
    """Would catch rates that are not multiplied along the chain."""
    assert expected_tokens([0.5, 0.5, 0.5]) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
