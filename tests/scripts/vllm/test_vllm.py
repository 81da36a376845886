"""vLLM beside qspec: where answers part, and what is held to be a near tie there."""

from dataclasses import replace

import pytest
import torch

from qspec.measure.arm import TokenizedPrompt
from qspec.pair.open import LoadedPair, open_pair
from qspec.pair.package import package
from qspec.records import EMBEDDING, HEAD, QuantizedModel
from scripts.vllm.near_tie import DRAWS, STEP, Look, Parting, judge, nudged, row  # what `integration` itself imports
from scripts.vllm.run import INT8, parting, verdict
from tests.pairs import halves, recipe


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    folder = tmp_path_factory.mktemp("integration")
    return open_pair(package(*halves(folder / "source"), recipe(), folder / "out"))


def test_answers_part_at_their_first_difference() -> None:
    """Catches a parting one token late, without its prompt, or where one answer only goes on."""
    asked = TokenizedPrompt("qa", [7, 8])
    assert parting(asked, [1, 2, 3], [1, 2, 4]) == (2, Parting([7, 8, 1, 2], 3, 4))
    assert parting(asked, [1, 2], [1, 2, 4]) == (2, None)


@pytest.mark.parametrize(
    ("gap", "magnifies", "near_tie"), [(0.25, False, True), (0.26, False, False), (0.9, True, True), (1.1, True, False)]
)
def test_only_a_target_that_rounds_inputs_is_forgiven_what_was_measured(
    gap: float, magnifies: bool, near_tie: bool
) -> None:
    """Catches a yardstick that forgives everything, or a float target judged by more than the rounding of logits."""
    own, draws = Look(gap, 5, 17.0), [Look(gap - 1.0, 6, 17.0), Look(gap + 0.5, 5, 17.0)]
    found = row(own, draws, magnifies)
    assert (found["near_tie"], found["rounding"], found["moved"]) == (near_tie, 0.25, 1.0)
    assert (found["changed_own"], found["draws"]) == (1, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_change_is_one_rounding_of_the_inputs_alone(pair: LoadedPair, tied: bool) -> None:
    """Catches a change that reaches the head too, is none at all, or is larger than rounding makes it."""
    model = _tied(pair.model) if tied else pair.model
    moved = nudged(model, 0)
    assert torch.equal(_head(moved), _head(model))
    before_VK, after_VK = model.tensors[EMBEDDING].float(), moved.tensors[EMBEDDING]
    up_VK = after_VK.abs() > before_VK.abs()
    assert 0.4 < float(up_VK.float().mean()) < 0.6
    torch.testing.assert_close(after_VK, torch.where(up_VK, 1 + STEP, 1 - STEP) * before_VK)


def test_a_parting_is_measured_on_the_pair(pair: LoadedPair) -> None:
    """Catches a gap of other tokens, and perturbed models that are the model itself."""
    logits_V = pair.target.forward(torch.tensor([5, 6, 7]), last=1)[0]
    best, other = logits_V.topk(2).indices.tolist()
    (found,) = judge(pair, [Parting([5, 6, 7], best, other)])
    assert found["gap"] == pytest.approx(float(logits_V[best] - logits_V[other]), abs=1e-4)  # it is rounded
    assert found["moved"] > 0
    assert found["draws"] == DRAWS
    assert judge(pair, []) == []


def test_a_difference_that_nothing_explains_fails() -> None:
    """Catches an exit status 0 for answers of qspec and vLLM that part, or for another acceptance."""
    rates = [{"engine": "qspec", "ci": [0.5, 0.7]}, {"engine": "vLLM", "ci": [0.6, 0.8]}]
    part = {"compared": "qspec and vLLM", "category": "qa", "equal_until": 3, "gap": 4.0}
    assert verdict([part | {"near_tie": True}, *rates]) == []
    assert verdict([part | {"near_tie": False}, *rates]) == ["qspec and vLLM: qa parts at token 3 by 4.0"]
    assert len(verdict([rates[0], {"engine": "vLLM", "ci": [0.71, 0.8]}])) == 1


def test_overflow_excuses_what_it_explains_and_nothing_else() -> None:
    """Catches exact products taken for overflow, and a draft that changed vLLM's own text."""
    rates = [{"engine": "qspec", "ci": [0.5, 0.7]}, {"engine": "vLLM", "ci": [0.6, 0.8]}]
    part = {"compared": "qspec and vLLM", "category": "qa", "equal_until": 3, "gap": 4.0, "near_tie": False}
    exact, over = ({"compared": INT8, "layers": 7, "error": error} for error in (1e-7, 0.02))
    assert len(verdict([part, exact, *rates])) == 1
    assert verdict([part, over, *rates]) == []
    assert len(verdict([part | {"compared": "vLLM and vLLM with its draft"}, over, *rates])) == 1


def _head(model: QuantizedModel) -> torch.Tensor:
    return model.tensors[EMBEDDING if model.arch.tied else HEAD]


def _tied(model: QuantizedModel) -> QuantizedModel:
    """The same with the embedding as its head."""
    tensors = {name: tensor for name, tensor in model.tensors.items() if name != HEAD}
    return replace(model, arch=replace(model.arch, tied=True), tensors=tensors)
