"""A draft model in training: which of its target's layers stay; whole sequences behind their prompts, one at a time.

Layers go one by one: the one without which the distribution stays closest. Measured, not ranked by how little a layer
turns its input (ShortGPT, arXiv 2403.03853), and anew after each layer that went, since neighbours that can stand in
for each other cannot both go (SLEB, arXiv 2402.09025). Letters: P tokens of a prompt, T rows of a sequence, H hidden
size, V vocabulary, K kept ids of a distribution.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
import json
from pathlib import Path
import shutil
from typing import Any

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.bridges import compressed
from qspec.bridges.hf import load_folder, open_trainable
from qspec.kept import Kept
from qspec.models.layers import keep_layers, require_layers
from qspec.models.load import stored_dtype
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.speculation.speculator import agreement, loss_of, overlap
from qspec.progress import Progress
from qspec.provenance import digest_of, staged_dir
from qspec.records import EMBEDDING, HEAD, LoadedModel
from qspec.schema.drafts import ModelDraft
from qspec.schema.recipe import Recipe
from qspec.schema.training import DistillSpec, Loss
from qspec.train.data import PARTS, Rollout, SequenceData, lessons
from qspec.train.loop import CURVE, Course, Judgement, facts, train
from qspec.train.processes import barrier, first_makes, rank_and_world

_MOST_JUDGED = 4096


@dataclass(frozen=True)
class ModelLearner:
    """A causal language model of transformers; implements `train.loop.Learner` over `SequenceData`.

    Gradients are added up sequence by sequence: nothing is padded, and memory holds one sequence's distributions.
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
            target_TH = one.states_MS.float()
            loss = loss + self.spec.hidden * (hidden_TH - target_TH).square().mean() / target_TH.square().mean()
        return loss

    def _read(self, one: Rollout) -> tuple[Tensor, Tensor]:
        """Float32 logits `[T, V]` and final-norm states `[T, H]` of a sequence's own rows."""
        tokens, rows = torch.cat([one.prompt_P, one.tokens_T]).long(), len(one.tokens_T)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.compute == "bfloat16"):
            read = self.module(tokens[None], use_cache=False, output_hidden_states=True, logits_to_keep=rows)
        return read.logits[0].float(), read.hidden_states[-1][0, -rows:].float()


@dataclass(frozen=True)
class Dropped:
    """A dropped layer, and the KL divergence from the whole model without it and those before, nats per token."""

    layer: int
    kl: float


def choose_layers(
    model: LoadedModel, texts: Sequence[list[int]], count: int, progress: Progress
) -> tuple[tuple[int, ...], list[Dropped]]:
    """The `count` layers that stay, rising, and those that went, in that order. Holds the model in float32."""
    whole = Decoder.from_float(model, torch.float32, max(map(len, texts)))
    tokens = [torch.tensor(text) for text in texts]
    log_probs = [whole.with_layers(range(model.arch.n_layers)).forward(tokens_T).log_softmax(-1) for tokens_T in tokens]
    kept, dropped = list(range(model.arch.n_layers)), list[Dropped]()
    for _ in progress.track(range(len(kept) - count), "drop layers", unit="layer"):
        totals_N = torch.zeros(len(kept))
        for tokens_T, log_probs_TV in zip(tokens, log_probs, strict=True):
            totals_N += _without_each(whole, kept, tokens_T, log_probs_TV)
        kls = (totals_N / sum(map(len, tokens))).tolist()
        at, *others = sorted(range(len(kept)), key=kls.__getitem__)
        dropped.append(Dropped(kept[at], kls[at]))
        then = f"; next: layer {kept[others[0]]}, {kls[others[0]]:.4f}" if others else ""
        progress.say(f"layer {kept[at]} goes: KL {kls[at]:.4f} nats per token without it{then}")
        kept.pop(at)
    return tuple(kept), dropped


def _without_each(whole: Decoder, kept: Sequence[int], tokens_T: Tensor, log_probs_TV: Tensor) -> Tensor:
    """Sum of the KL divergences of a text without each of the layers that are left `[layers]`."""
    x_TH, losses = whole.embed(tokens_T), list[Tensor]()
    for i, layer in enumerate(kept):
        rest = whole.with_layers(kept[i + 1 :])
        short_TV = rest.run_head(rest.run_layers(x_TH)).log_softmax(-1)
        losses.append(F.kl_div(short_TV, log_probs_TV, reduction="sum", log_target=True))
        x_TH = whole.with_layers([layer]).run_layers(x_TH)
    return torch.stack(losses)


FACTS = "distillation.json"


_CHOSEN_ON = 64
"""Tokens of a text that layers are chosen on: their order hardly depends on longer ones, the time does."""


def distill(recipe: Recipe, draft: ModelDraft, model: LoadedModel, half: Path, out: Path, progress: Progress) -> Path:
    """Train the recipe's draft, layers of `model`, on what the quantized target of `half` reads and writes.

    A call that was killed goes on. Under `torchrun` processes share the data's files and every batch.
    """
    assert draft.training is not None, "a draft is trained as the recipe says"
    spec, target, kept = draft.training, compressed.read(half), Kept(out)
    require_layers(spec.layers, model.arch)
    data = lessons(spec.data, half, target, recipe.seed, out / "data", progress)
    texts = [one.tokens_T[:_CHOSEN_ON].tolist() for one in data.text]
    chosen = first_makes(partial(_layers, spec, model, texts, kept, progress))
    short = keep_layers(model, chosen["kept"])
    progress.stage(f"train the draft: layers {', '.join(map(str, chosen['kept']))}")
    learner = ModelLearner(_trainable(short, spec, kept, chosen), spec)
    text, answers, judged = map(SequenceData, (data.text, data.answers, data.judged))
    course = train(learner, (text, answers), judged, spec, recipe.seed, out / "training", progress, data.key)
    if rank_and_world()[0] == 0:
        record = facts(recipe.seed, spec, target, course) | {"layers": chosen}
        record["rows"] = {name: part.rows for name, part in zip(PARTS, (text, answers, judged), strict=True)}
        _export(recipe, learner, short, out / "draft", record, course)
    barrier()
    progress.close()
    return out / "draft"


def _layers(
    spec: DistillSpec, model: LoadedModel, rows: list[list[int]], kept: Kept, progress: Progress
) -> dict[str, Any]:
    """Which layers stay, and why."""
    layers = spec.layers if isinstance(spec.layers, int) else list(spec.layers)
    texts = rows[: max(1, spec.layer_tokens // len(rows[0]))]
    key = {"asked": layers, "texts": digest_of(texts), "model": model.source.get("sha256")}

    def choose() -> dict[str, Any]:
        if not isinstance(layers, int):
            return key | {"kept": layers, "dropped": []}
        progress.stage(f"choose {layers} of {model.arch.n_layers} layers")
        stay, dropped = choose_layers(model, texts, layers, progress)
        return key | {"kept": list(stay), "dropped": [asdict(one) for one in dropped]}

    return dict(kept.value("layers", key, choose))


def _trainable(short: LoadedModel, spec: DistillSpec, kept: Kept, chosen: dict[str, Any]) -> Any:
    """The draft as it begins, in transformers; embedding and head stay the target's unless they are to be trained."""

    def write(part: Path) -> None:
        compressed.write_float(replace(short, files={}), part, torch.float32)

    module = open_trainable(first_makes(lambda: kept.entry("start", chosen, write)).folder, short.arch)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(spec.embeddings or name not in (EMBEDDING, HEAD))
    return module


def _export(
    recipe: Recipe, learner: ModelLearner, short: LoadedModel, out: Path, record: dict[str, Any], course: Course
) -> None:
    """The trained draft with the target's tokenizer and the config of its layers, and what it says of itself."""
    with staged_dir(out) as part:
        written = part / "written"
        learner.module.save_pretrained(written)
        short.tokenizer.save(written)
        trained = replace(short, tensors=load_folder(written).tensors)
        compressed.write_float(trained, part, stored_dtype(recipe, short))
        shutil.rmtree(written)
        (part / FACTS).write_text(json.dumps(record, indent=1) + "\n")
        (part / CURVE).write_text(course.lines)
