"""Padding rows: added as zeros, cut when there are too many, nothing else touched."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from qspec.records import ArchMap, LoadedModel
from qspec.stages.pad import match_rows

ARCH = ArchMap("llama", "LlamaForCausalLM", 1, 4, 4, 1, 1, 4, 6, 8, (1.0, 1.0))


def model(tied: bool) -> LoadedModel:
    tensors = {"model.embed_tokens.weight": torch.randn(6, 4), "model.norm.weight": torch.randn(4)}
    if not tied:
        tensors["lm_head.weight"] = torch.randn(6, 4)
    return LoadedModel(replace(ARCH, tied=tied), tensors, {"vocab_size": 6, "x": 1}, cast(Any, None), {})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [5, 9])
def test_rows_match_and_values_stay(rows: int, tied: bool):
    """Would catch a head and embedding of different sizes, or tokens whose rows moved."""
    before = model(tied)
    after = match_rows(before, rows)
    assert (after.arch.vocab_size, after.config["vocab_size"], after.config["x"]) == (rows, rows, 1)
    assert after.tensors.keys() == before.tensors.keys()
    kept = min(rows, 6)
    assert torch.equal(after.lm_head()[:kept], before.lm_head()[:kept])
    assert after.tensors["model.embed_tokens.weight"].shape == (rows, 4)
    assert not after.lm_head()[6:].any()
    assert before.config["vocab_size"] == 6


def test_equal_rows_cost_nothing():
    """Would catch a copy of a model that needs no padding."""
    before = model(True)
    assert match_rows(before, 6) is before
