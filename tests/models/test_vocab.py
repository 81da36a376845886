"""Padding rows: added as zeros, cut when there are too many, nothing else touched."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from qspec.models.vocab import match_rows, real_vocab
from qspec.nn.eager.decoder import Decoder
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.quantization.rtn import quantize
from qspec.records import ArchMap, LoadedModel
from qspec.schema.recipe import Recipe
from qspec.schemes.build import build_plan
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.types import Sampling
from tests.observed import load
from tests.tiny import VOCAB_SIZE, tiny_model

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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pair_never_drafts_padding(tmp_path: Path, temperature: float):
    """Would catch a served draft whose padding beats its tokens: rows that point both ways, so that one is ahead."""
    target = load(tiny_model("llama", tmp_path / "target", vocab_size=VOCAB_SIZE + 20))
    narrow = load(tiny_model("llama", tmp_path / "draft"))
    draft = match_rows(narrow, target.arch.vocab_size)
    head = draft.lm_head().clone()
    head[VOCAB_SIZE], head[VOCAB_SIZE + 1] = 100, -100
    draft = replace(draft, tensors=draft.tensors | {"lm_head.weight": head})  # type: ignore[operator]
    none = {"scheme": "none"}
    recipe = Recipe.model_validate(
        {
            "name": "padded",
            "target": {"model": "tiny", "quantization": none},
            "draft": {"kind": "model", "model": "tiny", "quantization": none},
            "speculation": {"max_length": 64},
        }
    )
    plan = build_plan(recipe.target.quantization)
    made = [quantize(half, None, plan) for half in (target, draft)]
    pair = open_pair(package(made[0], made[1], recipe, tmp_path / "out"))
    assert real_vocab(target.tokenizer) == VOCAB_SIZE
    assert isinstance(pair.drafter, ModelDrafter)
    sampling = Sampling(temperature)
    proposal = pair.drafter.propose([1, 7, 9], 5, sampling, torch.Generator().manual_seed(0))
    assert int(proposal.tokens_K.max()) < VOCAB_SIZE
    expected = ModelDrafter(Decoder.from_float(narrow)).propose(
        [1, 7, 9], 5, sampling, torch.Generator().manual_seed(0)
    )
    assert proposal.tokens_K.tolist() == expected.tokens_K.tolist()
    if proposal.probs_KV is not None:
        assert proposal.probs_KV.shape[-1] == target.arch.vocab_size
        assert not proposal.probs_KV[:, VOCAB_SIZE:].any()
