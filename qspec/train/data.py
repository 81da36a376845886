"""Training data of a speculator head: states and distributions of the quantized target on text and its own answers.

Letters: T rows of a sequence, H hidden size, K likeliest ids that are kept of a distribution. Row t holds a token, the
target's final-norm state behind it, and the distribution of what follows.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
import random
from typing import Any

import torch
from torch import Tensor

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.bridges.text import calibration_rows, requests
from qspec.errors import SourceError
from qspec.kept import Entry, Kept
from qspec.nn.lm import StatefulLM
from qspec.numerics.quantization.affine import quantize_activation_dynamic
from qspec.numerics.quantization.formats import FP8_E4M3
from qspec.numerics.speculation.probs import sample
from qspec.pair.open import open_fitting
from qspec.progress import Progress
from qspec.provenance import digest_of, sha256_folder
from qspec.records import QuantizedModel, Tokenizer
from qspec.schema.recipe import CalibrationSpec, DataSpec
from qspec.schema.training import PromptSource, TrainingData
from qspec.speculation.types import draw_uniforms
from qspec.train.processes import barrier, rank_and_world

TEXT, ANSWERS = "text", "answers"
PARTS = TEXT, ANSWERS, "held out"
_SEQUENCES = 64
"""Sequences of a file."""
_MISSES = 10_000
"""Requests in a row that are too long, after which no more are looked at."""
_BEGINNING = 12
"""Tokens by which a sequence is known: what begins alike is taken for the same answer."""
_SCALES = "hidden_scale"
"""Beside states that are kept as codes."""
_FILE = "sequences.safetensors"


@dataclass(frozen=True)
class Rollout:
    """One sequence: tokens `[T]`, states `[T, H]` (float16), and distributions as ids and probabilities `[T, K]`.

    prompt_P: what was read before, of which no states and distributions are kept.
    """

    tokens_T: Tensor
    hidden_TH: Tensor
    ids_TK: Tensor
    probs_TK: Tensor
    greedy: bool = False
    prompt_P: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


@dataclass(frozen=True)
class StageSources:
    """Sources of a stage's files: token rows, those of a file together, and a key to all that decides them."""

    name: str
    parts: list[list[list[int]]]
    key: dict[str, Any]


@dataclass(frozen=True)
class Lessons:
    """Rows that a draft is trained on, and answers that are held out; key: all that decides them."""

    text: list[Rollout]
    answers: list[Rollout]
    judged: list[Rollout]
    key: list[dict[str, Any]]


def lessons(
    spec: TrainingData, folder: Path, target: QuantizedModel, seed: int, out: Path, progress: Progress
) -> Lessons:
    """Texts and answers of the quantized model of `folder`, kept in `out`: a call that was killed goes on.

    Processes share the files of a stage.
    """
    stages = both_stages(folder, target.tokenizer, spec, seed)
    length = max(spec.prompt_tokens + spec.answer_tokens, spec.text_length)
    lm = open_fitting("the quantized target", target, length)
    text, answers = made_data(Kept(out), lm, stages, spec, target.arch.eos_ids, seed, progress)
    return Lessons(text, *split(answers, spec.held_out), [stage.key for stage in stages])


def both_stages(target: Path, tokenizer: Tokenizer, spec: TrainingData, seed: int) -> tuple[StageSources, StageSources]:
    """Text and answers of the quantized model in the folder `target`."""
    text, prompts = text_parts(spec, tokenizer, seed), prompt_parts(spec, tokenizer, seed)
    same = {"target": sha256_folder(target), "top": spec.top, "states": spec.states}
    generated = {"prompts": digest_of(prompts), "seed": seed, "batch": spec.batch}
    generated |= {"greedy": spec.greedy, "answer_tokens": spec.answer_tokens}
    return StageSources(TEXT, text, same | {"text": digest_of(text)}), StageSources(ANSWERS, prompts, same | generated)


def made_data(
    kept: Kept,
    lm: StatefulLM,
    stages: Sequence[StageSources],
    spec: TrainingData,
    eos_ids: Collection[int],
    seed: int,
    progress: Progress,
) -> list[list[Rollout]]:
    """All sequences of each stage, in order; files that `kept` has are not made again."""

    def make(stage: StageSources, i: int, folder: Path) -> None:
        made = read_rows(lm, stage.parts[i], spec)
        if stage.name == ANSWERS:
            generator = torch.Generator().manual_seed(seed * 100_003 + i)
            made = answer(lm, stage.parts[i], spec, eos_ids, generator)
        _write(folder / _FILE, list(made), spec)

    def entry(stage: StageSources, i: int) -> Entry:
        return kept.entry(f"{stage.name}-{i:05}", stage.key, partial(make, stage, i))

    rank, world = rank_and_world()
    for stage in stages:
        own = range(rank, len(stage.parts), world)
        progress.stage(f"training data: {stage.name}, {len(own)} files")
        for i in progress.track(own, stage.name, len(own), "file"):
            entry(stage, i)
    barrier()
    return [[one for i in range(len(stage.parts)) for one in _read(entry(stage, i).folder / _FILE)] for stage in stages]


def split(rollouts: Sequence[Rollout], held_out: float) -> tuple[list[Rollout], list[Rollout]]:
    """Sequences to train on, and the first ones, which are held out; none of those begins like one of these."""
    count = max(1, round(held_out * len(rollouts)))
    judged, others = list(rollouts[:count]), rollouts[count:]
    beginnings = {_beginning(one) for one in judged}
    return [one for one in others if _beginning(one) not in beginnings], judged


def _beginning(one: Rollout) -> tuple[int, ...]:
    return tuple(one.tokens_T[1 : 1 + _BEGINNING].tolist())


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
        likeliest = _likeliest(lm.forward(tokens_T), spec.top)
        yield Rollout(tokens_T, lm.hidden(len(row)).half(), *likeliest)


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
    likeliest: list[tuple[Tensor, Tensor]]
    next: int = -1

    def take(self, logits_1V: Tensor, uniform_1: Tensor, top: int) -> None:
        """Note the newest row and choose the token behind it."""
        self.hidden.append(self.lm.hidden().half())
        self.likeliest.append(_likeliest(logits_1V, top))
        drawn = logits_1V.argmax(-1) if self.greedy else sample(logits_1V.softmax(-1), uniform_1)
        self.next = int(drawn)

    def finished(self) -> Rollout:
        ids, probs = zip(*self.likeliest, strict=True)
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


def _read(path: Path) -> Iterator[Rollout]:
    stored = read_tensors(path)
    counts, prompts = stored["lengths"].tolist(), stored["prompts"].split(stored["prompt_lengths"].tolist())
    tokens, ids, probs = (stored[name].split(counts) for name in ("tokens", "ids", "probs"))
    hidden = stored["hidden"]
    if _SCALES in stored:
        hidden = (hidden.float() * stored[_SCALES]).half()
    yield from map(Rollout, tokens, hidden.split(counts), ids, probs, stored["greedy"].tolist(), prompts)


def _write(path: Path, made: list[Rollout], spec: TrainingData) -> None:
    write_tensors(
        path,
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
