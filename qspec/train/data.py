"""Training data of a draft: states and distributions of the quantized target on text and its own answers.

Letters: P tokens of a prompt, T rows of a sequence, S numbers of a position's state, K likeliest ids that are kept of a
distribution. Row t holds a token, the target's state behind it, and the distribution of what follows. The state is the
final-norm one, or the residuals in front of chosen layers (`taps`), those of the prompt too.
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
from qspec.nn.lm import StatefulLM, TappedLM
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
    """One sequence: tokens `[T]`, states (float16), and distributions as ids and probabilities `[T, K]`.

    prompt_P: what was read before, of which no distributions are kept. states_MS: `[T, S]`, with taps `[P + T, S]`.
    """

    tokens_T: Tensor
    states_MS: Tensor
    ids_TK: Tensor
    probs_TK: Tensor
    greedy: bool = False
    prompt_P: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


@dataclass(frozen=True)
class SequenceData:
    """Sequences that a draft reads from their beginning; a start is a sequence's number."""

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
class StageSources:
    """Sources of a stage's files: token rows, those of a file together, and a key to all that decides them."""

    name: str
    parts: list[list[list[int]]]
    taps: tuple[int, ...]
    key: dict[str, Any]


@dataclass(frozen=True)
class Lessons:
    """Rows that a draft is trained on, and answers that are held out; key: all that decides them."""

    text: list[Rollout]
    answers: list[Rollout]
    judged: list[Rollout]
    key: list[dict[str, Any]]


def lessons(
    spec: TrainingData,
    folder: Path,
    target: QuantizedModel,
    seed: int,
    out: Path,
    progress: Progress,
    taps: tuple[int, ...] = (),
) -> Lessons:
    """Texts and answers of the quantized model of `folder`, kept in `out`: a call that was killed goes on.

    taps: layers in front of which residuals are kept, in place of final-norm states. Processes share a stage's files.
    """
    stages = both_stages(folder, target.tokenizer, spec, seed, taps)
    length = max(spec.prompt_tokens + spec.answer_tokens, spec.text_length)
    lm = open_fitting("the quantized target", target, length)
    text, answers = made_data(Kept(out), lm, stages, spec, target.arch.eos_ids, seed, progress)
    return Lessons(text, *split(answers, spec.held_out), [stage.key for stage in stages])


def both_stages(
    target: Path, tokenizer: Tokenizer, spec: TrainingData, seed: int, taps: tuple[int, ...]
) -> tuple[StageSources, StageSources]:
    """Text and answers of the quantized model in the folder `target`."""
    text, prompts = text_parts(spec, tokenizer, seed), prompt_parts(spec, tokenizer, seed)
    same = {"target": sha256_folder(target), "top": spec.top, "states": spec.states}
    same |= {"taps": taps} if taps else {}
    generated = {"prompts": digest_of(prompts), "seed": seed, "batch": spec.batch}
    generated |= {"greedy": spec.greedy, "answer_tokens": spec.answer_tokens}
    read = StageSources(TEXT, text, taps, same | {"text": digest_of(text)})
    return read, StageSources(ANSWERS, prompts, taps, same | generated)


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
        made = read_rows(lm, stage.parts[i], spec, stage.taps)
        if stage.name == ANSWERS:
            generator = torch.Generator().manual_seed(seed * 100_003 + i)
            made = answer(lm, stage.parts[i], spec, eos_ids, generator, stage.taps)
        _write(folder / _FILE, list(made), spec, max(1, len(stage.taps)))

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


def read_rows(
    lm: StatefulLM, rows: Sequence[list[int]], spec: TrainingData, taps: tuple[int, ...] = ()
) -> Iterator[Rollout]:
    """The target reads text."""
    reader = _forks(lm, 1, taps)[0]
    for row in rows:
        reader.truncate(0)
        tokens_T = torch.tensor(row)
        likeliest = _likeliest(reader.forward(tokens_T), spec.top)
        yield Rollout(tokens_T, _tapped(reader) if taps else reader.hidden(len(row)).half(), *likeliest)


def _forks(lm: StatefulLM, count: int, taps: tuple[int, ...]) -> list[StatefulLM]:
    """Sequences of a model that keep what `taps` names."""
    forks = [lm.fork() for _ in range(count)]
    for fork in forks if taps else ():
        assert isinstance(fork, TappedLM), "an engine that tells no residuals"
        fork.tap(taps)
    return forks


def _tapped(lm: StatefulLM) -> Tensor:
    """Residuals `[·, S]` of a whole sequence."""
    assert isinstance(lm, TappedLM)
    return lm.tapped(0).half()


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
    """A sequence on its way: rows so far, and what is fed next. taps: whether the model keeps the states itself."""

    lm: StatefulLM
    taps: bool
    greedy: bool
    prompt: list[int]
    tokens: list[int]
    hidden: list[Tensor]
    likeliest: list[tuple[Tensor, Tensor]]
    next: int = -1

    def take(self, logits_1V: Tensor, uniform_1: Tensor, top: int) -> None:
        """Note the newest row and choose the token behind it."""
        if not self.taps:
            self.hidden.append(self.lm.hidden().half())
        self.likeliest.append(_likeliest(logits_1V, top))
        drawn = logits_1V.argmax(-1) if self.greedy else sample(logits_1V.softmax(-1), uniform_1)
        self.next = int(drawn)

    def finished(self) -> Rollout:
        ids, probs = zip(*self.likeliest, strict=True)
        tokens_T, prompt_P = torch.tensor(self.tokens), torch.tensor(self.prompt, dtype=torch.int32)
        states_MS = _tapped(self.lm) if self.taps else torch.cat(self.hidden)
        return Rollout(tokens_T, states_MS, torch.cat(ids), torch.cat(probs), self.greedy, prompt_P)


@torch.no_grad()
def answer(
    lm: StatefulLM,
    prompts: Sequence[list[int]],
    spec: TrainingData,
    eos_ids: Collection[int],
    generator: torch.Generator,
    taps: tuple[int, ...] = (),
) -> Iterator[Rollout]:
    """Answers to `prompts`, `spec.batch` at once; rows begin with the prompt's last token."""
    waiting, free = list(reversed(prompts)), _forks(lm, min(spec.batch, len(prompts)), taps)
    active: list[_Answer] = []
    while waiting or active:
        while waiting and free:
            prompt, sequence = waiting.pop(), free.pop()
            sequence.truncate(0)
            greedy = bool(draw_uniforms(1, generator) < spec.greedy)
            begun = _Answer(sequence, bool(taps), greedy, prompt[:-1], prompt[-1:], [], [])
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
    states_MS = stored["hidden"]
    if _SCALES in stored:
        scale_N1 = stored[_SCALES]
        states_MS = (states_MS.reshape(len(scale_N1), -1).float() * scale_N1).half().view(states_MS.shape)
    if len(states_MS) > sum(counts):
        counts = [count + len(prompt_P) for count, prompt_P in zip(counts, prompts, strict=True)]
    yield from map(Rollout, tokens, states_MS.split(counts), ids, probs, stored["greedy"].tolist(), prompts)


def _write(path: Path, made: list[Rollout], spec: TrainingData, parts: int = 1) -> None:
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
            **_states(torch.cat([one.states_MS for one in made]), spec, parts),
        },
    )


def _states(states_MS: Tensor, spec: TrainingData, parts: int) -> dict[str, Tensor]:
    """As `spec.states` says: in float16, or as codes with a scale for each of the `parts` of a row."""
    if spec.states == "float16":
        return {"hidden": states_MS}
    codes_NH, scale_N1 = quantize_activation_dynamic(states_MS.float().view(len(states_MS) * parts, -1), FP8_E4M3)
    return {"hidden": codes_NH.view(states_MS.shape), _SCALES: scale_N1}


def _parts(rows: list[list[int]]) -> list[list[list[int]]]:
    return [rows[at : at + _SEQUENCES] for at in range(0, len(rows), _SEQUENCES)]


def _likeliest(logits_TV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Ids (int32) and probabilities (float16) of the likeliest tokens `[T, K]`."""
    values_TK, ids_TK = logits_TV.topk(min(top, logits_TV.shape[-1]))
    return ids_TK.int(), (values_TK - logits_TV.logsumexp(-1, keepdim=True)).exp().half()
