"""A draft model in training: whole sequences, behind their prompts, one at a time.

Letters: P tokens of a prompt, T rows of a sequence, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
import json
from pathlib import Path
import shutil
from typing import Any

import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.hf import load_folder, open_trainable
from qspec.models.layers import keep_layers, require_layers
from qspec.models.load import stored_dtype
from qspec.numerics.speculation.speculator import agreement, loss_of, overlap
from qspec.pair.open import open_fitting
from qspec.progress import Progress
from qspec.provenance import atomic_write, digest_of, staged_dir
from qspec.records import EMBEDDING, HEAD, LoadedModel, QuantizedModel
from qspec.schema.drafts import ModelDraft
from qspec.schema.recipe import Recipe
from qspec.schema.training import DistillSpec, Loss
from qspec.train.choose_layers import choose_layers
from qspec.train.data import ANSWERS, TEXT, Rollout, both_stages, make_data, read_data
from qspec.train.head_data import split
from qspec.train.loop import CURVE, Judgement, facts, require_same, train
from qspec.train.processes import barrier, rank_and_world

_MOST_JUDGED = 4096


@dataclass(frozen=True)
class SequenceData:
    """Sequences that a model reads from their beginning; a start is a sequence's number."""

    sequences: Sequence[Rollout]

    @property
    def starts(self) -> Tensor:
        return torch.arange(len(self.sequences))

    @property
    def rows(self) -> int:
        """States that all sequences have."""
        return sum(len(one.tokens_T) for one in self.sequences)

    def per_step(self, states: int) -> int:
        return max(1, round(states * len(self.sequences) / self.rows))

    def order(self, seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(self.sequences), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


@dataclass(frozen=True)
class ModelLearner:
    """A causal language model of transformers; implements `train.loop.Learner` over `SequenceData`.

    Gradients are added up sequence by sequence: nothing is padded, and memory holds one sequence's laws.
    """

    module: Any
    spec: DistillSpec

    def backward(self, data: SequenceData, starts_T: Tensor, loss: Loss) -> float:
        """States count alike, whatever the length of their sequence."""
        total, expected = 0.0, len(starts_T) * data.rows / len(data.sequences)
        for i in starts_T.tolist():
            one = data.sequences[i]
            share = self._loss(one, loss) * (len(one.tokens_T) / expected)
            share.backward()
            total += float(share.detach())
        return total

    @torch.no_grad()
    def judge(self, data: SequenceData) -> Judgement:
        sampled, greedy, n = 0.0, 0.0, 0
        for one in data.sequences[:: -(-data.rows // _MOST_JUDGED)]:
            logits_TV, _ = self._read(one)
            sampled += float(overlap(logits_TV.softmax(-1), one.ids_TK, one.probs_TK.float()).sum())
            greedy += float(agreement(logits_TV, one.ids_TK).sum())
            n += len(one.tokens_T)
        return Judgement([sampled / n], [greedy / n], n)

    def _loss(self, one: Rollout, kind: Loss) -> Tensor:
        """Mean over the rows of a sequence."""
        logits_TV, hidden_TH = self._read(one)
        behind_T = torch.cat([one.tokens_T[1:].long(), torch.tensor([-1])])  # what followed the last row was not kept
        loss = loss_of(kind, logits_TV, behind_T, one.ids_TK, one.probs_TK.float())
        if self.spec.hidden:
            target_TH = one.hidden_TH.float()
            loss = loss + self.spec.hidden * (hidden_TH - target_TH).square().mean() / target_TH.square().mean()
        return loss

    def _read(self, one: Rollout) -> tuple[Tensor, Tensor]:
        """Float32 logits `[T, V]` and final-norm states `[T, H]` of a sequence's own rows."""
        tokens, rows = torch.cat([one.prompt_P, one.tokens_T]).long(), len(one.tokens_T)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.compute == "bfloat16"):
            read = self.module(tokens[None], use_cache=False, output_hidden_states=True, logits_to_keep=rows)
        return read.logits[0].float(), read.hidden_states[-1][0, -rows:].float()


FACTS = "distillation.json"


_CHOICE = "layers.json"


_CHOSEN_ON = 64
"""Tokens of a text that layers are chosen on: their order hardly depends on longer ones, the time does."""


def distill(
    recipe: Recipe, draft: ModelDraft, model: LoadedModel, target: QuantizedModel, out: Path, progress: Progress
) -> Path:
    """Train the recipe's draft, layers of `model`, on what `target`, of `out/target`, reads and writes; `out/draft`.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    assert draft.training is not None, "a draft is trained as the recipe says"
    spec, rank = draft.training, rank_and_world()[0]
    stages = both_stages(out / "target", target.tokenizer, spec.data, recipe.seed)
    made_of = [stage.key for stage in stages]
    require_same(out / "training", recipe.seed, spec, made_of)
    chosen = _layers(spec, model, stages[0].parts, out / _CHOICE, progress) if rank == 0 else {}
    length = max(spec.data.prompt_tokens + spec.data.answer_tokens, spec.data.text_length)
    lm = open_fitting("the quantized target", target, length)
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
            compressed.write_float(replace(kept, files={}), part, torch.float32)
    barrier()
    module = open_trainable(folder, kept.arch)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(spec.embeddings or name not in (EMBEDDING, HEAD))
    return module


def _export(recipe: Recipe, learner: ModelLearner, kept: LoadedModel, out: Path, said: dict[str, Any]) -> None:
    """The trained draft with the target's tokenizer and the config of its layers, and what it says of itself."""
    with staged_dir(out / "draft") as part:
        written = part / "written"
        learner.module.save_pretrained(written)
        kept.tokenizer.save(written)
        trained = replace(kept, tensors=load_folder(written).tensors)
        compressed.write_float(trained, part, stored_dtype(recipe, kept))
        shutil.rmtree(written)
        (part / FACTS).write_text(json.dumps(said, indent=1) + "\n")
        (part / CURVE).write_bytes((out / "training" / CURVE).read_bytes())
