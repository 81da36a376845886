"""The speculator's stages, against numbers of its source and against finite differences."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SharedHead, SpeculatorShape, initialize, start_from, swap_linears

REFERENCE = Path(os.environ.get("QSPEC_DATA", "../shared/data")) / "reference/ibm_mlp_speculator.json"
TINY = SpeculatorShape(emb_dim=6, vocab_size=11, n_predict=3, inner_dim=8)
VARIANTS = [(False, False), (True, False), (False, True), (True, True)]


def a_head(tie: bool = False, scale: bool = False, shared: bool = False, draft_vocab: int = 0) -> MLPSpeculator:
    shape = SpeculatorShape(6, 11, 3, 8, tie, scale, draft_vocab, shared)
    ids_D = torch.tensor([0, 2, 3, 7, 10]) if draft_vocab else None
    generator = torch.Generator().manual_seed(1)
    embedding, output = torch.randn(2, 11, 6, generator=generator)
    head = MLPSpeculator(shape, ids_D, embedding, output)
    initialize(head, generator)
    for norm in head.ln:
        nn.init.normal_(norm.bias, generator=generator)
    return head


def fed() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 11, (4, 3), generator=generator)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference file is not on this machine")
def test_published_variants_have_their_number_of_parameters():
    """Would catch a layer too many, a bias, or tying that leaves out or adds a projection."""
    for name, v in json.loads(REFERENCE.read_text())["variants"].items():
        shape = SpeculatorShape(v["emb_dim"], v["vocab"], v["n_predict"], v["inner_dim"], v["tie"], v["scale_input"])
        head = MLPSpeculator(shape, device="meta")
        assert sum(p.numel() for p in head.parameters()) == v["params"], name


def test_weights_of_state_and_token():
    """Would catch another balance: after all heads half of the state's square is still the target's."""
    shape = SpeculatorShape(4096, 32000, 3)
    assert shape.state_weight == pytest.approx(0.890898718)  # 0.5 ** (1 / 6)
    assert shape.state_weight ** (2 * shape.n_predict) == pytest.approx(0.5)
    assert shape.emb_weight == pytest.approx(math.sqrt((1 - 0.5 ** (1 / 3)) * 2048))


@pytest.mark.parametrize(("tie", "scale"), VARIANTS)
def test_stages_follow_the_source(tie, scale):
    """Would catch a norm that subtracts the mean, a tanh GELU, an unscaled state, heads fed with the wrong token."""
    head, (hidden, tokens) = a_head(tie, scale), fed()
    state = hidden / hidden.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() / 2**0.5 if scale else hidden
    for i, logits in enumerate(head(hidden, tokens)):
        own = 0 if tie else i
        x = state @ head.proj[i].weight.T + head.emb[own].weight[tokens[:, i]] * (
            head.shape.emb_weight / head.shape.state_weight
        )
        x = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * head.ln[own].weight + head.ln[own].bias
        state = 0.5 * x * (1 + torch.erf(x / 2**0.5))
        torch.testing.assert_close(logits, state @ head.head[own].weight.T)
    assert (head.proj[1] is head.proj[2]) == tie


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tie", "scale"), VARIANTS)
def test_gradients_are_those_of_finite_differences(tie, scale, shared):
    """Would catch a part cut off from the gradient, or one that is trained though it is the target's."""
    head, (hidden, tokens) = a_head(tie, scale, shared).double(), fed()
    names = [name for name, value in head.named_parameters() if value.requires_grad]
    assert not any(name.endswith("rows.weight") for name in names)

    def loss() -> Tensor:
        return sum((logits.square().mean() for logits in head(hidden.double(), tokens)), torch.zeros(()))

    loss().backward()
    for name in names:
        parameter = head.get_parameter(name)
        with torch.no_grad():
            value, step = parameter.view(-1), 1e-6
            for at in (0, value.numel() // 2):
                kept = float(value[at])
                value[at] = kept + step
                above = float(loss())
                value[at] = kept - step
                below = float(loss())
                value[at] = kept
                slope = float(parameter.grad.view(-1)[at])
                assert slope == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7), name


def test_shared_parts_are_the_targets():
    """Would catch a shared head that copies, trains or permutes the target's rows, or has others in its vocabulary."""
    head = a_head(shared=True, draft_vocab=5)
    assert isinstance(head.head[0], SharedHead)
    plain = a_head(shared=True)
    torch.testing.assert_close(head.head[1].rows.weight, plain.head[1].rows.weight[[0, 2, 3, 7, 10]])
    assert {tuple(logits.shape) for logits in head(*fed())} == {(4, 5)}


def test_an_unshared_head_may_start_from_the_target():
    """Would catch rows that start in another order, or at a size that drowns the state."""
    head, embedding = a_head(), torch.randn(11, 6)
    start_from(head, embedding, embedding)
    row = head.emb[2].weight[4, :6]
    torch.testing.assert_close(torch.nn.functional.cosine_similarity(row, embedding[4], dim=0), torch.tensor(1.0))
    assert float(head.head[0].weight[:, :6].detach().std()) == pytest.approx(8**-0.5, rel=1e-3)


def test_int8_layers_stay_close_and_tied():
    """Would catch layers that are rounded twice, left out, or untied by the swap. 8 bits keep 1 %: far from ties."""
    head = a_head(tie=True, shared=True)
    head.requires_grad_(False)
    before = head(*fed())
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    assert not any(isinstance(module, nn.Linear) for module in head.modules())
    assert head.proj[1] is head.proj[2]
    for a, b in zip(head(*fed()), before, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.05
