"""A head for a part of the vocabulary, against the whole one."""

from dataclasses import replace
from functools import cache
from pathlib import Path
import tempfile
from typing import Any

import pytest
import torch

from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.eager.decoder import Decoder
from qspec.quantization.rotate import untied
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schemes.build import build_plan
from qspec.speculation import engine
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Sampling
from tests.observed import load, observe
from tests.tiny import VOCAB_SIZE, tiny_model

TOKENS = torch.randint(5, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(1))
IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:77].sort().values
GONE = torch.tensor([token for token in range(VOCAB_SIZE) if token not in set(IDS.tolist())])
SPECS: dict[str, dict[str, Any]] = {
    "float, tied": {"scheme": "W8A8"},
    "float": {"scheme": "W8A8"},
    "W8A8": {"scheme": "W8A8", "ignore": []},
    "W4A16": {"scheme": "W4A16", "group_size": 32, "ignore": []},
    "FP8": {"scheme": "FP8", "ignore": []},
    "outliers": {"scheme": "W8A8", "ignore": [], "outliers": {"share": 1.0}},
}


@cache
def half(name: str) -> QuantizedModel:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model("llama", Path(folder), tie_word_embeddings="tied" in name)
        model = load(path)
        model = model if "tied" in name or not model.arch.tied else untied(model)
        made = quantize(model, observe(path), build_plan(QuantSpec.model_validate(SPECS[name])))
        return replace(made, tensors={key: made.tensors[key].clone() for key in made.tensors})


@pytest.mark.parametrize("kind", [Decoder, NativeDecoder])
@pytest.mark.parametrize("name", SPECS)
def test_a_short_head_says_what_the_whole_one_says_of_its_ids(name: str, kind: Any) -> None:
    """Rows of other ids, scales of other rows, or ids mapped back to the wrong place; room for one never kept."""
    if kind is NativeDecoder and (reason := NativeDecoder.missing()):
        pytest.skip(f"needs the C++ core: {reason}")
    model = half(name)
    whole, short = (kind.from_quantized(m, max_length=64) for m in (model, replace(model, head_ids=IDS)))
    expected_TV, found_TV = whole.forward(TOKENS), short.forward(TOKENS)
    assert torch.equal(found_TV[:, IDS], expected_TV[:, IDS])
    assert bool(torch.isneginf(found_TV[:, GONE]).all())
    forks = [short.fork(), short.fork()]
    for logits_TV in kind.forward_many(forks, [TOKENS, TOKENS], [None, None]):
        assert torch.equal(logits_TV[:, IDS], expected_TV[:, IDS])
        assert bool(torch.isneginf(logits_TV[:, GONE]).all())
    if kind is NativeDecoder:
        assert torch.equal(short.fork().greedy(TOKENS), found_TV.argmax(-1))
        (best_T,) = kind.greedy_many([short.fork()], [TOKENS], [None])
        assert torch.equal(best_T, found_TV.argmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, 100, 0.9)])
def test_drafts_stay_inside_and_answers_are_the_target_s(sampling: Sampling) -> None:
    """A draft outside of the ids, or a law that is not 0 there: sampling would no longer be the target's."""
    model = half("W8A8")
    target, short = (Decoder.from_quantized(m, max_length=64) for m in (model, replace(model, head_ids=IDS)))
    generator, context = torch.Generator().manual_seed(0), TOKENS.tolist()
    proposal = ModelDrafter(short).propose(context, 6, sampling, generator)
    assert set(proposal.tokens_K.tolist()) <= set(IDS.tolist())
    if proposal.probs_KV is not None:
        assert proposal.probs_KV.shape[1] == VOCAB_SIZE
        assert bool((proposal.probs_KV[:, GONE] == 0).all())
        assert torch.allclose(proposal.probs_KV.sum(-1), torch.ones(6))
    tree = TreeDrafter(short.fork(), width=90).propose(context, 4, sampling, generator)
    assert set(tree.tokens_K.tolist()) <= set(IDS.tolist())
    if sampling.greedy:
        said = [
            engine.generate(target.fork(), drafter, Fixed(3), context, 24, sampling, (), generator).tokens
            for drafter in (None, ModelDrafter(short.fork()))
        ]
        assert said[0] == said[1]
