"""The confidence threshold."""

from hypothesis import example, given, strategies as st
import pytest

from qspec.numerics.speculation.threshold import MISS_COST, best_threshold


@pytest.mark.parametrize(
    ("confidences", "stood", "threshold"),
    [
        ([0.9, 0.8, 0.3, 0.2], [True, True, False, False], 0.8),
        ([0.9, 0.8, 0.3, 0.2], [False, False, True, True], 0.2),  # a stop costs 3, so everything is drafted
        ([0.9, 0.5, 0.5, 0.1], [True, True, False, False], 0.5),  # equal confidences fall together
        ([0.6, 0.4], [True, True], None),
        ([0.6, 0.4], [False, False], None),
        ([], [], None),
    ],
)
def test_least_cost(confidences: list[float], stood: list[bool], threshold: float | None) -> None:
    """Catches rates that are swapped, ties torn apart, and a threshold from tokens of one kind."""
    assert best_threshold(confidences, stood) == threshold


def test_price_of_a_miss_moves_it() -> None:
    """Catches a price that multiplies the wrong rate."""
    confidences, stood = [0.9, 0.7, 0.6, 0.5, 0.4, 0.3], [True, True, False, False, False, True]
    assert best_threshold(confidences, stood, miss_cost=9.0) == 0.3
    assert best_threshold(confidences, stood, miss_cost=0.1) == 0.7


@example([(0.3, True), (0.5, True), (0.1, False), (0.1, True), (0.5, True)])  # equals at the end
@example([(0.1, False), (0.1, True), (0.1, False)])  # more fell than stood
@example([(0.1, True), (0.9, True), (0.3, True), (0.1, False), (0.3, True)])
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]), st.booleans()), max_size=12))
def test_least_cost_of_all_thresholds(tokens: list[tuple[float, bool]]) -> None:
    """Catches rates over the wrong tokens, a cost of stopping always that is another, and the highest of equals."""
    good, bad = ([c for c, stood in tokens if stood is kind] for kind in (True, False))

    def cost(threshold: float) -> float:
        kept = sum(c >= threshold for c in good) / len(good)
        return sum(c >= threshold for c in bad) / len(bad) + MISS_COST * (1 - kept)

    found = best_threshold([c for c, _ in tokens], [stood for _, stood in tokens])
    if not good or not bad:
        assert found is None
        return
    least = min(cost(threshold) for threshold in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0))
    seen = sorted({c for c, _ in tokens})
    assert found == next(threshold for threshold in [*seen, 1.0] if cost(threshold) == least)
    assert MISS_COST == 3.0  # as in transformers' assisted generation
