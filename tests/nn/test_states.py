"""Hidden states by position: what heads read of their target."""

from pathlib import Path

import pytest
import torch

from qspec.models.load import load
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cuda.decoder import CudaDecoder
from qspec.nn.cuda.model import obstacle
from qspec.nn.eager.decoder import Decoder
from qspec.nn.lm import HiddenLM, TappedLM
from qspec.schema.quantization import ModelSpec
from tests.tiny import tiny_model

NATIVE = pytest.mark.skipif(NativeDecoder.missing() is not None, reason=str(NativeDecoder.missing()))
DECODERS = [Decoder.from_float, pytest.param(NativeDecoder.from_float, marks=NATIVE)]


def on_cuda(model):
    """The engine for CUDA, on the eager twins of its operations."""
    return CudaDecoder.load(model, torch.float32, 256, 1, "cpu")


TAPPED = [*DECODERS, on_cuda]
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


KINDS = ("llama", "gemma2", "mixtral")
"""Plain; embeddings scaled and norms behind; a mixture of experts."""


@pytest.mark.parametrize("decoder", TAPPED)
@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_what_enters_the_layers(kind, decoder, tmp_path):
    """Would catch outputs in place of inputs, layers counted from 1, or the last one behind the final norm.

    transformers' `hidden_states[k]` enters layer k, but the last one, which is normed there.
    """
    from transformers import AutoModelForCausalLM

    folder = tiny_model(kind, tmp_path / kind, num_hidden_layers=3)
    model = load(ModelSpec(model=str(folder)))
    if decoder is on_cuda and (reason := obstacle(model)) is not None:
        pytest.skip(reason)
    tokens_T, lm = torch.arange(5, 75), decoder(model)
    assert isinstance(lm, TappedLM)
    lm.tap([0, 1, 3])
    lm.forward(tokens_T, last=1)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    seen: list[torch.Tensor] = []
    whole.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        states = whole(tokens_T[None], output_hidden_states=True).hidden_states
    want_TS = torch.cat([states[0][0], states[1][0], seen[-1]], 1)
    torch.testing.assert_close(lm.tapped(0), want_TS, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lm.tapped(69), want_TS[69:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("decoder", TAPPED)
def test_taps_follow_the_sequence(model, decoder):
    """Would catch rows of rejected drafts, of other nodes of a tree, of another request, or of layers that it taps."""
    lm, other = decoder(model), decoder(model)
    other.tap([0, 1, 2])
    other.forward(TOKENS)
    whole_TNK = other.tapped(0).view(6, 3, -1)
    lm.tap([1])

    def same(got_TS, want_TNK):
        torch.testing.assert_close(got_TS, want_TNK.flatten(1), atol=1e-5, rtol=1e-5)

    lm.forward(TOKENS[:2], last=1)
    lm.forward(torch.tensor([60, 5, 6]))
    lm.truncate(3)
    same(lm.tapped(0), whole_TNK[:3, [1]])
    lm.forward_tree(torch.tensor([7, 70]), [-1, -1])
    lm.forward_tree(torch.tensor([9, 80]), [-1, -1, 0, 1])
    lm.keep([1, 3])
    same(lm.tapped(1), whole_TNK[1:5, [1]])
    fork, third = lm.fork(), lm.fork()
    fork.tap([0, 2])
    type(lm).forward_many([fork, third, lm], [TOKENS[:4], TOKENS[:1], TOKENS[5:]], [None, None, None])
    same(lm.tapped(2), whole_TNK[2:, [1]])
    same(fork.tapped(0), whole_TNK[:4, [0, 2]])
    lm.truncate(0)
    lm.forward(TOKENS)
    same(lm.tapped(0), whole_TNK[:, [1]])
    lm.tap([])
    lm.forward(TOKENS)
    assert lm.tapped(0).numel() == 0


@NATIVE
def test_taps_of_the_core_equal_the_eager_twins(model):
    """Would catch rows of long passes that are copied before every thread has finished the layer in front."""
    tokens_T = torch.randint(5, 300, (200,), generator=torch.Generator().manual_seed(0))
    rows = []
    for lm in (NativeDecoder.from_float(model), Decoder.from_float(model)):
        lm.tap([0, 1, 2])
        for part_T in tokens_T.split([150, 1, 49]):
            lm.forward(part_T, last=1)
        rows.append(lm.tapped(0))
    torch.testing.assert_close(*rows, atol=1e-4, rtol=1e-4)
