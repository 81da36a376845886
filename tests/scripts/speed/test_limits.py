"""Where drafts stop paying: the prediction beside each cell, and the batch that a schedule is made of."""

from pathlib import Path
from typing import Any

import pytest

from qspec.eval_files import eval_dir
from scripts.speed import limits as bench_limits
from scripts.speed.matrix import read_speed_matrix

ROOT = Path(__file__).resolve().parents[3]

SUBJECT = next(iter(read_speed_matrix(eval_dir() / "matrices/speculation_limits.yaml").values()))


def _row(arm: str, batch: int, speedup: float, shape: str = "64-32", **drafted: float) -> dict[str, Any]:
    return {"arm": arm, "shape": shape, "batch": batch, "tpot_speedup": [speedup]} | drafted


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


def test_the_schedule_ends_behind_the_last_batch_that_pays() -> None:
    """Catches drafts switched off by one prompt length alone, and a batch that pays behind one that seems not to."""
    cells = {(1, "64-32"): 1.2, (1, "512-32"): 0.9, (2, "64-32"): 0.8, (4, "512-32"): 1.01, (8, "64-32"): 0.7}
    rows = [_row("pair", batch, value, shape) for (batch, shape), value in cells.items()]
    rows += [_row("head, 1 candidate", batch, 0.5) for batch in SUBJECT.batches]
    one, pair = bench_limits.limits(SUBJECT, rows)
    assert (one["never_pays_from_batch"], one["by_batch"]) == (1, [(1, 8, 0)])
    assert (pair["never_pays_from_batch"], pair["by_batch"]) == (8, [(1, 7, 8), (8, 8, 0)])
