"""The confidence threshold."""

import pytest

from qspec.numerics.speculation.threshold import best_threshold


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
