"""The arms that a pair is measured by: its target alone and with its draft, and the original beside them."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from qspec.bridges import compressed
from qspec.measure.arm import Arm
from qspec.measure.evaluate import evaluate
from qspec.measure.quality import Drafts, HeadDrafts, ModelDrafts, measure_answers, measure_draft
from qspec.models.load import load, resolve_arch
from qspec.models.vocab import real_vocab
from qspec.nn.engines import AnyDecoder, engine_name
from qspec.numerics.roofline import PassCost
from qspec.pair.check import Subject, provenance
from qspec.pair.drafters.kind import Weights
from qspec.pair.drafters.registry import draft_policy, head_drafter, kind_of
from qspec.pair.open import LoadedPair, compute_dtype, engine_options, open_fitting
from qspec.planning.planned import computed_with
from qspec.progress import Progress
from qspec.provenance import (
    staged_dir,
)
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.devices import read_device
from qspec.schema.recipe import Recipe
from qspec.schema.results import Accuracy, Provenance
from qspec.schemes.footprint import footprint
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.types import Drafter

Opened = tuple[LoadedModel, AnyDecoder]
"""A float model, and what runs it."""


def own_arms(pair: LoadedPair) -> dict[str, Arm]:
    """The pair's target alone, with its draft, and with prompt lookup, which every draft with weights must beat."""
    cost = _cost(pair.model, pair.recipe)
    plain = _plain(pair.target, cost)
    drafted = _drafted(plain, cost, pair.drafter, draft_cost(pair), pair.recipe)
    arms = {"quantized": plain, "quantized + draft": replace(drafted, new_drafter=pair.new_drafter)}
    if pair.recipe.draft.beside_lookup:
        arms["quantized + prompt lookup"] = _drafted(plain, cost, NgramDrafter(), None, pair.recipe)
    return arms


def original_arms(pair: LoadedPair, original: Opened, draft: Opened | None = None) -> dict[str, Arm]:
    """The original target alone, and with the pair's draft, or its draft model as it was before it was quantized."""
    recipe, (model, target) = pair.recipe, original
    cost, drafter, drafting = _cost(model, recipe), pair.new_drafter(), draft_cost(pair)
    if draft is not None:
        weights, tokens = Weights(decoder=draft[1]), real_vocab(model.tokenizer)
        drafter = kind_of(recipe.draft).drafter(weights, model.arch, tokens)
        drafting = _cost(draft[0], recipe)
    plain = _plain(target, cost)
    return {"original": plain, "original + draft": _drafted(plain, cost, drafter, drafting, recipe)}


def draft_cost(pair: LoadedPair) -> PassCost | None:
    """Bytes that the pair's draft reads and operations that it computes for a token; None for a lookup."""
    recipe, model = pair.recipe, pair.draft.model
    if model is not None:
        return _cost(model, recipe, recipe.draft.head_rows)
    head = kind_of(recipe.draft).footprint(pair.model.arch, _width(recipe))
    return None if head is None else head.cost


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


@dataclass(frozen=True)
class Originals:
    """The models as they came; `draft` is None for a draft without weights, or with a `head`."""

    target: LoadedModel
    draft: LoadedModel | None
    head: Path | None = None


def load_originals(recipe: Recipe, progress: Progress) -> Originals:
    """Both models. A draft that is not trained yet, or a head of other sizes, is refused before anything is loaded, and
    a draft with another tokenizer before compute.
    """
    progress.stage("load")
    kind = kind_of(recipe.draft)
    kind.require_trained()
    head = kind.require_files(resolve_arch(recipe.target))
    target = load(recipe.target)
    return Originals(target, kind.original(target), head)


@dataclass(frozen=True)
class Arms:
    """The arms that are compared: the models as they came, and the pair as it was packaged."""

    recipe: Recipe
    originals: Originals
    pair: LoadedPair

    @cached_property
    def original(self) -> AnyDecoder:
        """The original target, with room for as many tokens as the pair's."""
        return self.float_decoder(self.originals.target)

    @cached_property
    def original_draft(self) -> AnyDecoder | None:
        """The draft model as it came; None without one. A whole copy of the target is the original itself."""
        draft = self.originals.draft
        if draft is None:
            return None
        return self.original if draft is self.originals.target else self.float_decoder(draft)

    @property
    def drafts(self) -> Drafts | None:
        """The draft as it came beside the packaged one; None without weights, or where the pair alone has it."""
        pair, packaged, folder = self.pair, self.pair.draft.fork(), self.originals.head
        if packaged.head is not None and folder is not None:
            kind = kind_of(pair.recipe.draft)
            halves = (kind.unrounded(folder, pair.model), packaged)
            heads = [head_drafter(kind, weights, pair.model) for weights in halves]
            return HeadDrafts(heads[0], heads[1], pair.target.max_length)
        if packaged.decoder is None or self.original_draft is None:
            return None
        return ModelDrafts(self.original_draft, packaged.decoder)

    def float_decoder(self, model: LoadedModel) -> AnyDecoder:
        length = min(self.pair.target.max_length, model.arch.max_positions)
        return open_fitting("the original, beside the pair,", model, length, **engine_options(self.recipe))

    def float_kv(self) -> AnyDecoder:
        """The pair's target with its KV cache in floats."""
        model = self.pair.model
        plain = replace(model, plan=replace(model.plan, kv=None), k_scale={}, v_scale={}, q_scale={})
        what, length = "the target with its KV cache in floats, beside the pair,", self.pair.target.max_length
        return open_fitting(what, plain, length, **engine_options(self.recipe))


def provenance_of(pair: LoadedPair, of: Subject) -> Provenance:
    """Where a measurement of an open pair comes from."""
    return provenance(pair.manifest, pair.recipe, of, engine=engine_name(pair.target))


def measure_accuracy(arms: Arms, work: Path, progress: Progress) -> Accuracy:
    """The recipe's evaluation in this process; the folder `work` is for what transformers reads."""
    if arms.recipe.evaluation.off:
        return Accuracy()
    progress.stage("evaluate")
    recipe, target = arms.recipe, arms.originals.target
    folders: dict[str, Path | None] = {"original": None, "quantized": arms.pair.folder / "target"}
    if recipe.asks_transformers:
        folders["original"] = work / "original"
        with staged_dir(work / "original") as part:
            compressed.write_float(target, part, compute_dtype(recipe.dtype))
    eos_ids = target.arch.eos_ids
    float_kv = None if arms.pair.model.plan.kv is None else arms.float_kv
    halves, text = (arms.original, arms.pair.target), recipe.evaluation.fidelity
    accuracy = evaluate(*halves, target.tokenizer, recipe, folders, progress, eos_ids=eos_ids, float_kv=float_kv)
    if text is None:
        return accuracy.measured_on(provenance_of(arms.pair, "target"))
    answers, drafts = measure_answers(*halves, target.tokenizer, text, eos_ids, progress), arms.drafts
    accuracy = accuracy.model_copy(update={"answers": answers}).measured_on(provenance_of(arms.pair, "target"))
    if drafts is None:
        return accuracy
    draft = measure_draft(halves[1], drafts, target.tokenizer, text, progress)
    draft = draft.model_copy(update={"provenance": provenance_of(arms.pair, "draft")})
    return accuracy.model_copy(update={"draft": draft})


def original_runs(arms: Arms) -> dict[str, Arm]:
    """The arms of the models as they came. A draft that is a copy of the target is the pair's own for both."""
    target, draft = arms.originals.target, arms.originals.draft
    if draft is None or arms.original_draft is None or not kind_of(arms.recipe.draft).separate:
        return original_arms(arms.pair, (target, arms.original))
    return original_arms(arms.pair, (target, arms.original), (draft, arms.original_draft))
