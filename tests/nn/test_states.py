"""Hidden states by position: what a speculator head reads of its target."""

from pathlib import Path

import pytest
import torch

from qspec.models.load import load
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.eager.decoder import Decoder
from qspec.nn.lm import HiddenLM
from qspec.schema.quantization import ModelSpec
from tests.tiny import tiny_model

NATIVE = pytest.mark.skipif(NativeDecoder.missing() is not None, reason=str(NativeDecoder.missing()))
DECODERS = [Decoder.from_float, pytest.param(NativeDecoder.from_float, marks=NATIVE)]
TOKENS = torch.tensor([1, 50, 60, 70, 80, 90])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("states") / "tiny"
    return load(ModelSpec(model=str(tiny_model("llama", folder))))


@pytest.mark.parametrize("decoder", DECODERS)
def test_states_give_the_logits(model, decoder):
    """Would catch states taken before the final norm, or those of another row: the head must turn them into logits."""
    lm = decoder(model)
    assert isinstance(lm, HiddenLM)
    logits_TV = lm.forward(TOKENS)
    torch.testing.assert_close(
        lm.hidden(6) @ model.tensors["lm_head.weight"].float().T, logits_TV, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("decoder", DECODERS)
def test_states_follow_the_sequence(model, decoder):
    """Would catch states of rejected drafts, of other nodes of a tree, or of another request of a batch."""
    lm, other = decoder(model), decoder(model)
    whole_TK = other.forward(TOKENS) is not None and other.hidden(6)
    lm.forward(TOKENS[:2], last=1)
    torch.testing.assert_close(lm.hidden(), whole_TK[1:2])
    lm.forward(torch.tensor([60, 5, 6]))
    lm.truncate(3)
    torch.testing.assert_close(lm.hidden(), whole_TK[2:3])
    lm.forward_tree(torch.tensor([7, 70]), [-1, -1])
    lm.forward_tree(torch.tensor([9, 80]), [-1, -1, 0, 1])
    lm.keep([1, 3])
    torch.testing.assert_close(lm.hidden(2), whole_TK[3:5], atol=1e-5, rtol=1e-5)
    fork = lm.fork()
    type(lm).forward_many([fork, lm], [TOKENS[:4], TOKENS[5:]], [None, None])
    torch.testing.assert_close(lm.hidden(), whole_TK[5:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fork.hidden(4), whole_TK[:4], atol=1e-5, rtol=1e-5)
