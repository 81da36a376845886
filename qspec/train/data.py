"""What a speculator head learns from: states and laws of the quantized target on text, and on answers of its own.

Letters: T rows of a sequence, H hidden size, K likeliest ids that are kept of a law. Row t holds a token, the target's
final-norm state behind it, and the law of what follows. Files appear one by one; none is made twice of the same.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
import json
from pathlib import Path
import random
from typing import Any

import torch
from torch import Tensor

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.bridges.text import calibration_rows, requests
from qspec.errors import SourceError
from qspec.nn.lm import StatefulLM
from qspec.numerics.quantization.affine import quantize_activation_dynamic
from qspec.numerics.quantization.formats import FP8_E4M3
from qspec.numerics.speculation.probs import sample
from qspec.progress import Progress
from qspec.provenance import atomic_write, digest_of, sha256_folder
from qspec.records import Tokenizer
from qspec.schema.recipe import CalibrationSpec, DataSpec
from qspec.schema.training import PromptSource, TrainingData
from qspec.speculation.types import draw_uniforms
from qspec.train.processes import barrier, rank_and_world

TEXT, ANSWERS = "text", "answers"
_SEQUENCES = 64
"""Sequences of a file."""
_MISSES = 10_000
"""Requests in a row that are too long, after which no more are looked at."""
_SCALES = "hidden_scale"
"""Beside states that are kept as codes."""


@dataclass(frozen=True)
class Rollout:
    """One sequence: tokens `[T]`, states `[T, H]` (float16), and laws as ids and probabilities `[T, K]`.

    prompt_P: what was read before, of which no states and laws are kept.
    """

    tokens_T: Tensor
    hidden_TH: Tensor
    ids_TK: Tensor
    probs_TK: Tensor
    greedy: bool = False
    prompt_P: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


@dataclass(frozen=True)
class Stage:
    """What a stage's files are made of: token rows, those of a file together, and a key to all that decides them."""

    name: str
    parts: list[list[list[int]]]
    key: dict[str, Any]


def both_stages(target: Path, tokenizer: Tokenizer, spec: TrainingData, seed: int) -> tuple[Stage, Stage]:
    """Text and answers of the quantized model in the folder `target`."""
    text, prompts = text_parts(spec, tokenizer, seed), prompt_parts(spec, tokenizer, seed)
    kept = {"target": sha256_folder(target), "top": spec.top, "states": spec.states}
    asked = {"prompts": digest_of(prompts), "seed": seed, "batch": spec.batch}
    asked |= {"greedy": spec.greedy, "answer_tokens": spec.answer_tokens}
    return Stage(TEXT, text, kept | {"text": digest_of(text)}), Stage(ANSWERS, prompts, kept | asked)


def make_data(
    folder: Path,
    lm: StatefulLM,
    stages: Sequence[Stage],
    spec: TrainingData,
    eos_ids: Collection[int],
    seed: int,
    progress: Progress,
) -> None:
    """Fill `folder` for both stages; a call that was killed goes on with the file that was not finished.

    Files that were made of something else are made anew. Processes share the files of a stage.
    """
    rank, world = rank_and_world()
    if rank == 0:
        for leftover in folder.glob(".*"):  # of a call that was killed
            leftover.unlink()
        for stage in stages:
            _claim(folder, stage, progress)
    barrier()
    for stage in stages:
        own = range(rank, len(stage.parts), world)
        progress.stage(f"training data: {stage.name}, {len(own)} files")
        for i in progress.track(own, stage.name, len(own), "file"):
            path = folder / f"{stage.name}-{i:05}.safetensors"
            if not path.exists():
                made = read_rows(lm, stage.parts[i], spec)
                if stage.name == ANSWERS:
                    generator = torch.Generator().manual_seed(seed * 100_003 + i)
                    made = answer(lm, stage.parts[i], spec, eos_ids, generator)
                _write(path, list(made), spec)
                progress.say(f"{path.name} of {len(stage.parts)}")
    barrier()


def _claim(folder: Path, stage: Stage, progress: Progress) -> None:
    """Remove a stage's files if they were made of something else, and say so; note what the next ones are made of."""
    note, known = folder / f"{stage.name}.json", dict[str, Any]()
    with suppress(OSError, ValueError):
        known = json.loads(note.read_text(encoding="utf-8"))
    if known == stage.key:
        return
    files = list(folder.glob(f"{stage.name}-*.safetensors"))
    if files:
        changed = ", ".join(name for name, value in stage.key.items() if known.get(name) != value)
        progress.say(f"training data: {stage.name} is made anew, for other {changed}")
    for path in files:
        path.unlink()
    atomic_write(note, json.dumps(stage.key, indent=1) + "\n")


def text_parts(spec: TrainingData, tokenizer: Tokenizer, seed: int) -> list[list[list[int]]]:
    """Stage 1: rows of running text, those of a file together."""
    data = tuple(DataSpec(name=source.name, weight=source.weight) for source in spec.text)
    samples = max(1, spec.text_tokens // spec.text_length)
    rows = calibration_rows(CalibrationSpec(data=data, samples=samples, length=spec.text_length), tokenizer, seed)
    random.Random(seed).shuffle(rows)
    return _parts(rows)


def prompt_parts(spec: TrainingData, tokenizer: Tokenizer, seed: int) -> list[list[list[int]]]:
    """Stage 2: short prompts, those of a file together."""
    return _parts(list(islice(short_prompts(spec, tokenizer, seed), spec.answers)))


def read_rows(lm: StatefulLM, rows: Sequence[list[int]], spec: TrainingData) -> Iterator[Rollout]:
    """The target reads text."""
    for row in rows:
        lm.truncate(0)
        tokens_T = torch.tensor(row)
        laws = _likeliest(lm.forward(tokens_T), spec.top)
        yield Rollout(tokens_T, lm.hidden(len(row)).half(), *laws)


def short_prompts(spec: TrainingData, tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Tokens of requests through the chat template, sources mixed by weight, endlessly: every row, then again.

    Raises `SourceError` for a source without requests, and where none is short enough.
    """
    generator, misses = random.Random(seed), 0
    pools = [_endless(source, seed) for source in spec.prompts]
    weights = [source.weight for source in spec.prompts]
    while misses < _MISSES:
        text = next(generator.choices(pools, weights)[0])
        tokens = tokenizer.chat([{"role": "user", "content": text}])
        misses = 0 if len(tokens) <= spec.prompt_tokens else misses + 1
        if not misses:
            yield tokens
    rule = f"leaves out each of {misses:,} requests, all are longer"
    raise SourceError(f"training.data.prompt_tokens {spec.prompt_tokens}", rule, "raise it, or name shorter prompts")


def _endless(source: PromptSource, seed: int) -> Iterator[str]:
    """Requests of one source in random order, each time around with another wording."""
    texts = list(source.texts) or requests(source.name or "")
    if not texts:
        raise SourceError(f"prompts {source.name}", "hold no request", "name a data set with prompts, or give texts")
    order = random.Random(f"{seed} {source.name} {source.ask[0]}")
    for turn in range(10**9):
        order.shuffle(texts)
        for i, text in enumerate(texts):
            yield source.ask[(i + turn) % len(source.ask)].format(text=" ".join(text.split(" ")[: source.words]))


@dataclass
class _Answer:
    """A sequence on its way: rows so far, and what is fed next."""

    lm: StatefulLM
    greedy: bool
    prompt: list[int]
    tokens: list[int]
    hidden: list[Tensor]
    laws: list[tuple[Tensor, Tensor]]
    next: int = -1

    def take(self, logits_1V: Tensor, uniform_1: Tensor, top: int) -> None:
        """Note the newest row and choose the token behind it."""
        self.hidden.append(self.lm.hidden().half())
        self.laws.append(_likeliest(logits_1V, top))
        drawn = logits_1V.argmax(-1) if self.greedy else sample(logits_1V.softmax(-1), uniform_1)
        self.next = int(drawn)

    def finished(self) -> Rollout:
        ids, probs = zip(*self.laws, strict=True)
        tokens_T, prompt_P = torch.tensor(self.tokens), torch.tensor(self.prompt, dtype=torch.int32)
        return Rollout(tokens_T, torch.cat(self.hidden), torch.cat(ids), torch.cat(probs), self.greedy, prompt_P)


@torch.no_grad()
def answer(
    lm: StatefulLM,
    prompts: Sequence[list[int]],
    spec: TrainingData,
    eos_ids: Collection[int],
    generator: torch.Generator,
) -> Iterator[Rollout]:
    """Answers to `prompts`, `spec.batch` at once; rows begin with the prompt's last token."""
    waiting, free = list(reversed(prompts)), [lm.fork() for _ in range(min(spec.batch, len(prompts)))]
    active: list[_Answer] = []
    while waiting or active:
        while waiting and free:
            prompt, sequence = waiting.pop(), free.pop()
            sequence.truncate(0)
            greedy = bool(draw_uniforms(1, generator) < spec.greedy)
            begun = _Answer(sequence, greedy, prompt[:-1], prompt[-1:], [], [])
            begun.take(sequence.forward(torch.tensor(prompt), last=1), draw_uniforms(1, generator), spec.top)
            active.append(begun)
        fed = [torch.tensor([one.next]) for one in active]
        logits = lm.forward_many([one.lm for one in active], fed, [None] * len(active))
        uniforms = draw_uniforms(len(active), generator).split(1)
        for one, logits_1V, uniform_1 in zip(active, logits, uniforms, strict=True):
            one.tokens.append(one.next)
            one.take(logits_1V, uniform_1, spec.top)
        for one in [one for one in active if one.next in eos_ids or len(one.tokens) >= spec.answer_tokens]:
            active.remove(one)
            free.append(one.lm)
            yield one.finished()


def read_data(folder: Path, stage: str) -> list[Rollout]:
    """All sequences of a stage, in the order in which they were made."""
    return [rollout for path in sorted(folder.glob(f"{stage}-*.safetensors")) for rollout in _sequences(path)]


def _sequences(path: Path) -> Iterator[Rollout]:
    stored = read_tensors(path)
    counts, prompts = stored["lengths"].tolist(), stored["prompts"].split(stored["prompt_lengths"].tolist())
    tokens, ids, probs = (stored[name].split(counts) for name in ("tokens", "ids", "probs"))
    hidden = stored["hidden"]
    if _SCALES in stored:
        hidden = (hidden.float() * stored[_SCALES]).half()
    yield from map(Rollout, tokens, hidden.split(counts), ids, probs, stored["greedy"].tolist(), prompts)


def _write(path: Path, made: list[Rollout], spec: TrainingData) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.partial")
    write_tensors(
        part,
        {
            "lengths": torch.tensor([len(one.tokens_T) for one in made]),
            "greedy": torch.tensor([one.greedy for one in made]),
            "prompt_lengths": torch.tensor([len(one.prompt_P) for one in made]),
            "prompts": torch.cat([one.prompt_P for one in made]),
            "tokens": torch.cat([one.tokens_T for one in made]).int(),
            "ids": torch.cat([one.ids_TK for one in made]),
            "probs": torch.cat([one.probs_TK for one in made]),
            **_states(torch.cat([one.hidden_TH for one in made]), spec),
        },
    )
    part.replace(path)


def _states(hidden_MH: Tensor, spec: TrainingData) -> dict[str, Tensor]:
    """As `spec.states` says: in float16, or as codes with a scale each."""
    if spec.states == "float16":
        return {"hidden": hidden_MH}
    codes_MH, scale_M1 = quantize_activation_dynamic(hidden_MH.float(), FP8_E4M3)
    return {"hidden": codes_MH, _SCALES: scale_M1}


def _parts(rows: list[list[int]]) -> list[list[list[int]]]:
    return [rows[at : at + _SEQUENCES] for at in range(0, len(rows), _SEQUENCES)]


def _likeliest(logits_TV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Ids (int32) and probabilities (float16) of the likeliest tokens `[T, K]`."""
    values_TK, ids_TK = logits_TV.topk(min(top, logits_TV.shape[-1]))
    return ids_TK.int(), (values_TK - logits_TV.logsumexp(-1, keepdim=True)).exp().half()
