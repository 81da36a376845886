"""Floors of a pass against hand-computed cases and published tables."""

import pytest

from qspec.numerics.roofline import PassCost, Rates, break_even, bytes_moved, pass_seconds, prefill_seconds, ridge_rows

COST = PassCost(weight_bytes=100.0, kv_bytes=2.0, ops=10.0, attention_ops=1.0)
RATES = Rates(bandwidth=10.0, matmul=100.0, attention=50.0)


def test_memory_bound_pass_counts_weights_once_and_kv_per_sequence():
    """Would catch weights multiplied by the batch, or a KV cache that is read once for all sequences."""
    assert pass_seconds(COST, RATES, batch=3, context=5, rows=1) == (100 + 3 * 5 * 2) / 10


def test_rows_of_a_mixture_read_experts_of_their_own():
    """Would catch verification as cheap as a step: 80 bytes of experts, a quarter each; 3 of 4 are unread by a row."""
    cost = PassCost(100.0, 0.0, 10.0, 1.0, expert_bytes=80.0, expert_share=0.25)
    assert bytes_moved(cost, 1, 0) == 100
    assert bytes_moved(cost, 1, 0, rows=2) == bytes_moved(cost, 2, 0) == 100 + 80 * (0.75 - 0.75**2)
    assert bytes_moved(cost, 1000, 0) == pytest.approx(100 + 80 * 0.75, rel=1e-12)  # all of them
    assert pass_seconds(cost, RATES, batch=1, context=0, rows=2) == pytest.approx(11.5, rel=1e-12)
    assert ridge_rows(cost, RATES) == 1


def test_compute_bound_pass_grows_with_batch_and_rows():
    """Would catch rows that are free at any number: (10 / 100 + 5 * 1 / 50) s per row, 3 * 60 rows."""
    assert pass_seconds(COST, RATES, batch=3, context=5, rows=60) == pytest.approx(3 * 60 * 0.2, rel=1e-12)


def test_prefill_counts_half_of_all_pairs():
    """Would catch attention over future tokens: 4 * 10 / 100 + (16 / 2) * 1 / 50."""
    assert prefill_seconds(COST, RATES, 4) == pytest.approx(0.4 + 0.16, rel=1e-12)


def test_ridge_is_where_both_bounds_meet():
    """Would catch a ridge with bytes and operations swapped: at that many rows, context 0, both bounds are equal."""
    rows = ridge_rows(COST, RATES)
    assert COST.weight_bytes / RATES.bandwidth == pytest.approx(rows * COST.ops / RATES.matmul, rel=1e-12)


@pytest.mark.parametrize(
    ("pays", "batch"),
    [
        ([(1, True), (2, True), (4, False), (8, False)], 4),
        ([(1, True), (2, False), (4, True)], None),
        ([(1, False), (2, False)], 1),
        ([(1, True), (2, False), (4, True), (8, False)], 8),
    ],
)
def test_break_even_is_the_batch_after_the_last_that_pays(pays: list[tuple[int, bool]], batch: int | None):
    """Would catch a switch-off at the first loss, though larger batches gain again."""
    assert break_even(pays) == batch
