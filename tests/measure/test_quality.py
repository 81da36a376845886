"""Short answers, and what rounding took from a draft: against damage of every kind that acceptance alone hides."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qspec.measure.quality import HeadDrafts, ModelDrafts, greedy, loop_share, measure_answers, measure_draft
from qspec.models.layers import truncate_layers
from qspec.models.vocab import limited
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.engines import open_decoder
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize, swap_linears
from qspec.numerics.quantization.affine import QTensor
from qspec.pair.head import target_rows
from qspec.progress import Progress
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel, QuantizedModel
from qspec.report.quality import EIGHT, FEWER
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import FidelitySpec
from qspec.schema.results import DraftFidelity
from qspec.schemes.build import build_plan
from qspec.speculation.drafters.mlp import MlpDrafter
from tests.arms import Parrot
from tests.observed import load
from tests.tiny import TEXT, tiny_model

QUIET = Progress(quiet=True)
LENGTH = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> FidelitySpec:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    return FidelitySpec(data=str(path), windows=4, length=LENGTH)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([7] * 12, 1.0),
        ([1, 2, 3] * 4, 1.0),
        ([*range(12), *[5, 6] * 12], 21 / 34),
        (list(range(12)), 0.0),
        ([], 1.0),
        ([4, 2], 1.0),
    ],
)
def test_loops_by_hand(tokens: list[int], share: float) -> None:
    """Would catch loops of several tokens that are missed, text called a loop, and an answer of nothing called text."""
    assert loop_share(tokens) == pytest.approx(share, abs=0.04)


def test_greedy_answers_stop_and_see_what_is_no_number() -> None:
    """Would catch an answer that runs past its end, and NaN that an arg-max turns into a token."""
    assert greedy(Parrot([9, 8, 2, 5]), [1, 1, 1], 10, {2}) == ([9, 8, 2], True)
    assert greedy(Parrot([9, 8, 2, 5]), [1, 1, 1], 2, {2}) == ([9, 8], True)
    broken = Parrot([9, 8, 2, 5])
    broken.noise_PV[4:] = torch.nan
    assert not greedy(broken, [1, 1, 1], 10, {2})[1]


def test_answers_of_both_arms_are_compared(model: LoadedModel, text: FidelitySpec) -> None:
    """Would catch arms that are swapped, and a quantized one that repeats a token and is taken for the original."""
    arm = open_decoder(model, max_length=128)
    answers = measure_answers(arm, Parrot([9], vocab=300), model.tokenizer, text, {2}, QUIET).rows
    assert len(answers) == 4
    assert {answer.quantized_loop for answer in answers} == {1.0}
    assert max(answer.original_loop for answer in answers) < 0.5
    assert {answer.quantized for answer in answers} == {model.tokenizer.decode([9] * 32)}


def draft_of(
    model: LoadedModel, scheme: str, layers: int, damage: Callable[[QTensor], QTensor] | None = None
) -> QuantizedModel:
    spec = {"scheme": scheme, **({"group_size": 32} if "4" in scheme else {})}
    made = quantize(truncate_layers(model, layers), None, build_plan(QuantSpec.model_validate(spec)))
    if damage is None:
        return made
    name = "model.layers.0.mlp.down_proj"
    linear = made.linears[name]
    return replace(made, linears={**made.linears, name: replace(linear, weight=damage(linear.weight))})


def measured(model: LoadedModel, text: FidelitySpec, packaged: QuantizedModel) -> DraftFidelity:
    layers = packaged.arch.n_layers
    target = open_decoder(draft_of(model, "W8A8", 2), max_length=LENGTH)
    original = open_decoder(truncate_layers(model, layers), max_length=LENGTH)
    drafts = ModelDrafts(original, open_decoder(packaged, max_length=LENGTH))
    return measure_draft(target, drafts, model.tokenizer, text, QUIET)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("scheme", "most"), [("W8A8", EIGHT), ("W4A16", FEWER)])
def test_an_honest_draft_is_close_to_the_one_it_was(
    model: LoadedModel, text: FidelitySpec, layers: int, scheme: str, most: object
) -> None:
    """Would catch a draft called spoilt for its own bits: a whole copy of the target, or its first layer."""
    found = measured(model, text, draft_of(model, scheme, layers))
    assert isinstance(most, type(EIGHT))
    assert found.kl.value < most.kl / 4
    assert found.top1_agreement.value > most.agreement
    assert found.acceptance.value > 0.8 * found.unrounded_acceptance.value
    assert (found.unrounded_acceptance.value > 0.95) == (layers == 2)  # the original itself, but for the target's bits


def flipped(weight: QTensor) -> QTensor:
    return replace(weight, codes=weight.codes.flip(0))


def rescaled(weight: QTensor) -> QTensor:
    return replace(weight, scale=64 * weight.scale)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("damage", [flipped, rescaled])
def test_a_spoilt_copy_of_the_target_is_seen(
    model: LoadedModel, text: FidelitySpec, layers: int, damage: Callable[[QTensor], QTensor]
) -> None:
    """Would catch a self draft with a layer's rows in another order, or wrong scales: the original drafted with that
    same layer, so that nothing was lost beside it.
    """
    found = measured(model, text, draft_of(model, "W8A8", layers, damage))
    assert found.kl.value > EIGHT.kl
    assert found.acceptance.value < found.unrounded_acceptance.value


def test_a_draft_of_few_ids_is_compared_on_those(model: LoadedModel, text: FidelitySpec) -> None:
    """Would catch an infinite distance for ids that the packaged draft leaves out by its recipe."""
    packaged = limited(draft_of(model, "W8A8", 1), 100, [[i % 300 for i in range(900)]])
    found = measured(model, text, packaged)
    assert found.kl.value < EIGHT.kl / 4
    assert found.unrounded_acceptance.value == pytest.approx(found.acceptance.value, abs=0.05)


def heads(model: LoadedModel, damage: float | None = None) -> HeadDrafts:
    """A float head for the tiny model, and the same in INT8 with `damage` times the scales of one layer."""
    made = []
    for _ in range(2):
        head = MLPSpeculator(SpeculatorShape(64, 300, 2, 16, shared=True), None, *target_rows(model))
        initialize(head, torch.Generator().manual_seed(0))
        made.append(head.eval().requires_grad_(False))
    swap_linears(made[1], lambda linear: Int8Map.rounded(linear.weight))
    if damage is not None:
        made[1].proj[0].weight.scale.mul_(damage)
    return HeadDrafts(MlpDrafter(made[0]), MlpDrafter(made[1]), LENGTH)


def test_heads_are_compared_behind_the_targets_states(model: LoadedModel, text: FidelitySpec) -> None:
    """Would catch a head that is compared at the wrong place, or whose spoilt layer the original drafted with too."""
    target = open_decoder(draft_of(model, "W8A8", 2), max_length=LENGTH)
    honest = measure_draft(target, heads(model), model.tokenizer, text, QUIET)
    assert honest.kl.value < EIGHT.kl / 4
    spoilt = measure_draft(target, heads(model, -30.0), model.tokenizer, text, QUIET)
    assert spoilt.kl.value > EIGHT.kl
    assert spoilt.unrounded_acceptance.value == pytest.approx(honest.unrounded_acceptance.value)


def test_a_head_drafts_the_token_behind_the_next(model: LoadedModel, text: FidelitySpec) -> None:
    """Would catch laws that are one place apart: the head's behind a state and a token, the target's behind both."""
    target, drafts = open_decoder(model, max_length=LENGTH), heads(model)
    tokens_T = torch.arange(5, 25)
    target.truncate(0)
    drafts.begin(target)
    laws = drafts.logits(target, tokens_T, target.forward(tokens_T))
    target.truncate(0)
    target.forward(tokens_T[:8])
    head = drafts.original.head
    expected = head.advance(0, head.begin(target.hidden()), tokens_T[8:9])[1]
    assert torch.allclose(laws[1][7], expected[0], atol=1e-4)
    assert torch.allclose(laws[0][7], target.forward(tokens_T[8:9])[0], atol=1e-4)
