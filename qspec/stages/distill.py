"""A draft model made of some of the target's layers, trained towards the quantized target: an ordinary checkpoint."""

from dataclasses import asdict, replace
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qspec.bridges import compressed
from qspec.bridges.hf import load_folder, open_trainable
from qspec.nn.engines import open_decoder
from qspec.progress import Progress
from qspec.provenance import atomic_write, digest_of, staged_dir
from qspec.records import EMBEDDING, HEAD, LoadedModel, QuantizedModel
from qspec.schema.recipe import ModelDraft, Recipe
from qspec.schema.training import DistillSpec
from qspec.stages.choose_layers import choose_layers
from qspec.stages.draft_data import ANSWERS, TEXT, both_stages, make_data, read_data
from qspec.stages.head_data import split
from qspec.stages.model_learner import ModelLearner, SequenceData
from qspec.stages.package import stored_dtype
from qspec.stages.processes import barrier, rank_and_world
from qspec.stages.train_draft import CURVE, facts, require_same, train
from qspec.stages.transform import keep_layers, require_layers

FACTS = "distillation.json"
_CHOICE = "layers.json"
_CHOSEN_ON = 64
"""Tokens of a text that layers are chosen on: their order hardly depends on longer ones, the time does."""


def distill(recipe: Recipe, model: LoadedModel, target: QuantizedModel, out: Path, progress: Progress) -> Path:
    """Train the recipe's draft, layers of `model`, on what `target`, of `out/target`, reads and writes; `out/draft`.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    draft = recipe.draft
    assert isinstance(draft, ModelDraft), f"draft kind {draft.kind} is no model"
    assert draft.training is not None, "a draft is trained as the recipe says"
    spec, rank = draft.training, rank_and_world()[0]
    stages = both_stages(out / "target", target.tokenizer, spec.data, recipe.seed)
    made_of = [stage.key for stage in stages]
    require_same(out / "training", recipe.seed, spec, made_of)
    chosen = _layers(spec, model, stages[0].parts, out / _CHOICE, progress) if rank == 0 else {}
    length = max(spec.data.prompt_tokens + spec.data.answer_tokens, spec.data.text_length)
    lm = open_decoder(target, max_length=length)
    make_data(out / "data", lm, stages, spec.data, model.arch.eos_ids, recipe.seed, progress)
    chosen = chosen or json.loads((out / _CHOICE).read_text())
    kept = keep_layers(model, chosen["kept"])
    text = read_data(out / "data", TEXT)
    answers, judged = split(read_data(out / "data", ANSWERS), spec.data.held_out)
    progress.stage(f"train the draft: layers {', '.join(map(str, chosen['kept']))}")
    learner = ModelLearner(_trainable(kept, spec, out / "start", rank), spec)
    data = SequenceData(text), SequenceData(answers)
    course = train(learner, data, SequenceData(judged), spec, recipe.seed, out / "training", progress, made_of)
    if rank == 0:
        said = facts(recipe.seed, spec, target, course) | {"layers": chosen}
        said["rows"] = {TEXT: data[0].rows, ANSWERS: data[1].rows, "held out": SequenceData(judged).rows}
        _export(recipe, learner, kept, out, said)
    barrier()
    progress.close()
    return out / "draft"


def _layers(
    spec: DistillSpec, model: LoadedModel, text: list[list[list[int]]], path: Path, progress: Progress
) -> dict[str, Any]:
    """Which layers stay, and why; kept in `path` for a call that goes on."""
    layers = spec.layers if isinstance(spec.layers, int) else list(spec.layers)
    rows = [row[:_CHOSEN_ON] for part in text for row in part]
    texts = rows[: max(1, spec.layer_tokens // len(rows[0]))]
    asked = {"asked": layers, "texts": digest_of(texts), "model": model.source.get("sha256")}
    if path.exists() and asked.items() <= (known := json.loads(path.read_text())).items():
        return dict(known)
    require_layers(spec.layers, model.arch)
    found: dict[str, Any] = {"kept": layers, "dropped": []}
    if isinstance(spec.layers, int):
        progress.stage(f"choose {spec.layers} of {model.arch.n_layers} layers")
        kept, dropped = choose_layers(model, texts, spec.layers, progress)
        found = {"kept": list(kept), "dropped": [asdict(one) for one in dropped]}
    atomic_write(path, json.dumps(asked | found, indent=1) + "\n")
    return asked | found


def _trainable(kept: LoadedModel, spec: DistillSpec, folder: Path, rank: int) -> Any:
    """The draft as it begins, in transformers; embedding and head stay the target's unless they are to be trained."""
    if rank == 0:
        with staged_dir(folder) as part:
            compressed.write_float(kept, part, torch.float32)
    barrier()
    module = open_trainable(folder, kept.arch)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(spec.embeddings or name not in (EMBEDDING, HEAD))
    return module


def _export(recipe: Recipe, learner: ModelLearner, kept: LoadedModel, out: Path, said: dict[str, Any]) -> None:
    """The trained draft with the target's tokenizer and the config of its layers, and what it says of itself."""
    with TemporaryDirectory(dir=out) as written, staged_dir(out / "draft") as part:
        learner.module.save_pretrained(written)
        kept.tokenizer.save(Path(written))
        trained = replace(kept, tensors=load_folder(written).tensors)
        compressed.write_float(trained, part, stored_dtype(recipe, kept))
        (part / FACTS).write_text(json.dumps(said, indent=1) + "\n")
        (part / CURVE).write_bytes((out / "training" / CURVE).read_bytes())
