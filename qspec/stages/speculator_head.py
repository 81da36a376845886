"""A recipe's MLP speculator: the head as it was trained, fitted to its target, in INT8; or a new one, trained here."""

from pathlib import Path

import torch
from torch import Tensor

from qspec.bridges import speculator
from qspec.bridges.hub import fetch_model
from qspec.errors import RecipeError
from qspec.nn.engines import open_decoder
from qspec.nn.int8_map import Int8Map
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize, start_from, swap_linears
from qspec.progress import Progress
from qspec.provenance import staged_dir
from qspec.records import EMBEDDING, HEAD, ArchMap, LoadedModel, QuantizedModel
from qspec.schema.recipe import MlpDraft, ModelSpec, Recipe
from qspec.stages.draft_data import ANSWERS, TEXT, both_stages, make_data, read_data
from qspec.stages.head_data import frequent_ids, lay_out, split
from qspec.stages.head_learner import HeadLearner
from qspec.stages.load import locate
from qspec.stages.processes import rank_and_world
from qspec.stages.train_draft import CURVE, facts, require_same, train


def shape_of(draft: MlpDraft, arch: ArchMap) -> SpeculatorShape:
    """Sizes of the head that a recipe asks for."""
    return SpeculatorShape(
        arch.hidden_size,
        arch.vocab_size,
        draft.n_predict,
        draft.inner_dim,
        draft.tie_weights,
        draft.scale_input,
        draft.draft_vocab if draft.draft_vocab < arch.vocab_size else 0,
        draft.shared,
    )


def head_folder(draft: MlpDraft, arch: ArchMap) -> Path:
    """Where the head lies, fetched if need be. Raises `SourceError`, and `RecipeError` for one of other sizes."""
    spec = ModelSpec(model=draft.model, revision=draft.revision)
    folder = locate(spec).path or fetch_model(draft.model, draft.revision)[0]
    found, asked = speculator.read_shape(folder), shape_of(draft, arch)
    for name in ("emb_dim", "vocab_size", "n_predict", "inner", "tie_weights", "scale_input", "draft_vocab", "shared"):
        mine, its = getattr(asked, name), getattr(found, name)
        if mine != its:
            rule = f"but its config.json says {its!r}"
            fix = "make the recipe agree, or use another head"
            raise RecipeError(f"draft {draft.model}: {name} {mine!r}", rule, fix)
    return folder


def open_head(folder: Path, target: LoadedModel | QuantizedModel) -> MLPSpeculator:
    """A stored head for a target, every linear layer in INT8: those stored as float, and shared rows, are rounded."""
    head = speculator.read(folder, *target_rows(target))
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    return head


def target_rows(target: LoadedModel | QuantizedModel) -> tuple[Tensor, Tensor]:
    """The target's embedding and output rows `[V, H]`, as its head multiplies with them."""
    embedding_VH = target.tensors[EMBEDDING]
    if isinstance(target, QuantizedModel) and "lm_head" in target.linears:
        return embedding_VH, target.linears["lm_head"].weight.dequantize()
    return embedding_VH, target.tensors.get(HEAD, embedding_VH)


def train_head(recipe: Recipe, target: QuantizedModel, out: Path, progress: Progress) -> Path:
    """Train the recipe's head on what `target`, of `out/target`, reads and writes; returns `out/head`.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    draft = recipe.draft
    assert isinstance(draft, MlpDraft), f"draft kind {draft.kind} is not trained"
    assert draft.training is not None, "a head is trained as the recipe says"
    spec, arch, shape = draft.training, target.arch, shape_of(draft, target.arch)
    stages = both_stages(out / "target", target.tokenizer, spec.data, recipe.seed)
    made_of = [stage.key for stage in stages]
    require_same(out / "training", recipe.seed, spec, made_of)
    length = spec.data.prompt_tokens + spec.data.answer_tokens
    lm = open_decoder(target, max_length=max(length, spec.data.text_length))
    make_data(out / "data", lm, stages, spec.data, arch.eos_ids, recipe.seed, progress)
    text = read_data(out / "data", TEXT)
    answers, judged = split(read_data(out / "data", ANSWERS), spec.data.held_out)
    ids_D = frequent_ids([*text, *answers], shape.draft_vocab, arch.vocab_size)
    head = MLPSpeculator(shape, ids_D, *target_rows(target))
    initialize(head, torch.Generator().manual_seed(recipe.seed))
    if spec.start == "target":
        start_from(head, *target_rows(target))
    progress.stage("train the head")
    laid = [lay_out(part, shape.n_predict, ids_D, arch.vocab_size) for part in (text, answers, judged)]
    learner = HeadLearner(head)
    course = train(learner, (laid[0], laid[1]), laid[2], spec, recipe.seed, out / "training", progress, made_of)
    if rank_and_world()[0] == 0:
        swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
        rows = dict(zip((TEXT, ANSWERS, "held out"), (len(data.tokens_M) for data in laid), strict=True))
        with staged_dir(out / "head") as part:
            speculator.write(head, part, facts(recipe.seed, spec, target, course) | {"rows": rows})
            (part / CURVE).write_bytes((out / "training" / CURVE).read_bytes())
    progress.close()
    return out / "head"
