"""Calibration of models that cannot be calibrated (what it measures: tests/nn/test_decoder.py)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qspec.errors import SourceError
from qspec.quantization.calibrate import calibrate, random_rows
from tests.observed import ROWS, load
from tests.tiny import tiny_model


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_activations_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    """Would catch damaged weights that are found only in the packaged pair, or blamed on its KV scales."""
    model = load(tiny_model("llama", tmp_path))
    name = "model.layers.0.mlp.up_proj.weight"
    damaged = replace(model, tensors={**model.tensors, name: torch.full_like(model.tensors[name], value)})
    with pytest.raises(SourceError, match=r"model\.layers\.\d.* computes NaN or infinity"):
        calibrate(damaged, ROWS)


def test_random_rows_reach_the_whole_vocabulary_and_no_further() -> None:
    """Would catch ids that the embedding lacks, rows that repeat, and another draw on resume."""
    rows = random_rows(7, 3, 50, seed=1)
    assert [len(row) for row in rows] == [50] * 3
    assert set().union(*rows) == set(range(7))
    assert rows[0] != rows[1]
    assert random_rows(7, 3, 50, seed=1) == rows != random_rows(7, 3, 50, seed=2)
