"""Where drafts stop paying: the prediction beside each cell, and the batch that a schedule is made of."""

from pathlib import Path
from typing import Any

import pytest

from qspec.eval_files import eval_dir
from scripts.speed import limits as bench_limits
from scripts.speed.matrix import read_speed_matrix

ROOT = Path(__file__).resolve().parents[3]

SUBJECT = next(iter(read_speed_matrix(eval_dir() / "matrices/speculation_limits.yaml").values()))


def _row(arm: str, batch: int, *speedup: float, shape: str = "64-32", **drafted: float) -> dict[str, Any]:
    return {"arm": arm, "shape": shape, "batch": batch, "groups": 6, "tpot_speedup": list(speedup)} | drafted


def test_predictions_know_the_smallest_batch_only() -> None:
    """Catches a draft counted once for all requests, rows that forget the newest token, and a cell's own tokens."""
    drafted = {"nodes_per_step": 3.0, "draft_ms": 2.0}
    rows = [
        _row("plain", 1, 1.0),
        _row("pair", 1, 1.1, tokens_per_step=1.5, **drafted),
        _row("pair", 4, 0.8, tokens_per_step=9.9, **drafted),
    ]
    times = {"64-32": {1: {1: (0.010, 0.0), 4: (0.016, 0.0)}, 4: {1: (0.020, 0.0), 4: (0.040, 0.0)}}}
    plain, small, large = bench_limits.predicted(rows, times)
    assert "predicted" not in plain
    assert small["predicted"] == pytest.approx(1.5 * 10 / (2 + 16), abs=1e-4)
    assert large["predicted"] == pytest.approx(1.5 * 20 / (4 * 2 + 40), abs=1e-4)


def _limits(cells: dict[tuple[int, str], tuple[float, ...]], **changed: int | None) -> dict[str, Any]:
    rows = [_row("pair", batch, *ratio, shape=shape) | changed for (batch, shape), ratio in cells.items()]
    (found,) = bench_limits.limits(SUBJECT, rows)
    return found


def test_drafts_end_where_they_are_not_shown_to_pay_behind_every_prompt_length() -> None:
    """Catches the best estimate, and the best prompt length: drafts at batches 2 and 4 where 512-token prompts lose."""
    cells = {
        (1, "64-32"): (1.91, 1.81, 2.01),
        (1, "512-32"): (1.2, 1.05, 1.37),
        (2, "64-32"): (1.47, 1.04, 2.08),
        (2, "512-32"): (0.89, 0.75, 1.06),
        (4, "64-32"): (1.3, 1.1, 1.5),
        (4, "512-32"): (0.77, 0.57, 1.03),
        (8, "64-32"): (1.1, 0.9, 1.3),
        (8, "512-32"): (1.2, 1.1, 1.3),
    }
    found = _limits(cells)
    assert (found["shown_to_pay_up_to_batch"], found["by_batch"]) == (1, [(1, 1, 8), (2, 8, 0)])
    found = _limits(cells | {(4, "512-32"): (1.2, 1.01, 1.4)})
    assert (found["shown_to_pay_up_to_batch"], found["by_batch"]) == (4, [(1, 7, 8), (8, 8, 0)])


def test_a_length_that_was_not_measured_is_not_shown_to_pay() -> None:
    """Catches a batch that pays because its other prompt length is missing, and drafts that lose everywhere."""
    assert _limits({(1, "64-32"): (1.9, 1.8, 2.0)})["by_batch"] == [(1, 8, 0)]
    assert _limits({(1, "64-32"): (0.9, 0.8, 0.95), (1, "512-32"): (1.9, 1.8, 2.0)})["by_batch"] == [(1, 8, 0)]


def test_repeats_of_one_prompt_give_no_schedule() -> None:
    """Catches "1.91 (1.81 to 2.01)" of one prompt that was asked three times, and a cap that follows from it."""
    cells = {(1, shape): (1.91, 1.81, 2.01) for shape in SUBJECT.shapes}
    assert _limits(cells)["by_batch"] is not None
    found = _limits(cells, groups=None)
    assert (found["shown_to_pay_up_to_batch"], found["by_batch"]) == (None, None)


def test_a_prediction_that_is_far_off_is_marked() -> None:
    """Catches a speed that was foretold at half of what it is, beside one that holds, without a word."""
    drafted = {"nodes_per_step": 3.0, "draft_ms": 2.0, "tokens_per_step": 1.5}
    times = {"64-32": {1: {1: (0.010, 0.0), 4: (0.016, 0.0)}}}
    for measured, holds in ((0.8, True), (1.61, False), (0.4, False)):
        (found,) = bench_limits.predicted([_row("pair", 1, measured, **drafted)], times)
        assert found["within_tolerance"] is holds
