"""The arms that a pair is measured by: its target alone and with its draft, and the original beside them."""

from dataclasses import replace

import torch

from qspec.nn.engines import AnyDecoder
from qspec.numerics.roofline import PassCost
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.devices import read_device
from qspec.schema.recipe import MlpDraft, ModelDraft, NgramDraft, Recipe
from qspec.spec.drafters.ngram import NgramDrafter
from qspec.spec.types import Drafter
from qspec.stages.bench_arm import Arm
from qspec.stages.check import real_vocab
from qspec.stages.drafting import draft_policy, model_drafter
from qspec.stages.footprint import footprint, mlp_footprint
from qspec.stages.open_pair import LoadedPair
from qspec.stages.planned import computed_with, head_rows

Opened = tuple[LoadedModel, AnyDecoder]
"""A float model, and what runs it."""


def own_arms(pair: LoadedPair) -> dict[str, Arm]:
    """The pair's target alone, with its draft, and with prompt lookup, which every draft with weights must beat."""
    cost = _cost(pair.model, pair.recipe)
    plain = _plain(pair.target, cost)
    drafted = _drafted(plain, cost, pair.drafter, draft_cost(pair), pair.recipe)
    arms = {"quantized": plain, "quantized + draft": replace(drafted, new_drafter=pair.new_drafter)}
    if not isinstance(pair.recipe.draft, NgramDraft):
        arms["quantized + prompt lookup"] = _drafted(plain, cost, NgramDrafter(), None, pair.recipe)
    return arms


def original_arms(pair: LoadedPair, original: Opened, draft: Opened | None = None) -> dict[str, Arm]:
    """The original target alone, and with the pair's draft, or its draft model as it was before it was quantized."""
    recipe, (model, target) = pair.recipe, original
    cost, drafter, drafting = _cost(model, recipe), pair.new_drafter(), draft_cost(pair)
    if draft is not None:
        assert isinstance(recipe.draft, ModelDraft)
        drafter = model_drafter(draft[1], recipe.draft, model.arch, real_vocab(model.tokenizer))
        drafting = _cost(draft[0], recipe)
    plain = _plain(target, cost)
    return {"original": plain, "original + draft": _drafted(plain, cost, drafter, drafting, recipe)}


def draft_cost(pair: LoadedPair) -> PassCost | None:
    """What the pair's draft reads and computes for a token; None for a lookup."""
    if isinstance(pair.recipe.draft, MlpDraft):
        return mlp_footprint(pair.recipe.draft, pair.model.arch, _width(pair.recipe)).cost
    return None if pair.draft_model is None else _cost(pair.draft_model, pair.recipe, head_rows(pair.recipe))


def _plain(target: AnyDecoder, cost: PassCost) -> Arm:
    return Arm(target, weight_bytes=int(cost.weight_bytes), kv_bytes_per_token=cost.kv_bytes)


def _drafted(plain: Arm, cost: PassCost, drafter: Drafter, drafting: PassCost | None, recipe: Recipe) -> Arm:
    policy = draft_policy(recipe.speculation.draft_length)
    size, c_hat = (0, 0.0) if drafting is None else (int(drafting.weight_bytes), drafting.ops / cost.ops)
    return replace(plain, drafter=drafter, policy=policy, draft_bytes=size, c_hat=c_hat)


def _cost(model: LoadedModel | QuantizedModel, recipe: Recipe, rows: int = 0) -> PassCost:
    """rows: ids that its head is run for; 0: all."""
    names, width = model.arch.linears(), _width(recipe)
    if isinstance(model, QuantizedModel):
        return footprint(model.arch, model.plan.resolve(names), model.plan.kv, width, rows).cost
    return footprint(model.arch, dict.fromkeys(names), None, width).cost


def _width(recipe: Recipe) -> int:
    """Bytes of a float as it is computed with."""
    dtype: torch.dtype = getattr(torch, computed_with(recipe, read_device(recipe.device)))
    return dtype.itemsize
