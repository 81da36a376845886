"""A number hidden in running text and asked for at its end: what a model, or its KV cache, loses as contexts grow.

A proxy: minutes where tasks take hours. Answers are teacher-forced: found where every token of it is the likeliest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import random

import torch

from qspec.bridges.text import origin, windows
from qspec.errors import RecipeError
from qspec.measure.items import Items, compare_items, score_interval
from qspec.nn.lm import LM
from qspec.nn.reuse import PrefixReuse
from qspec.numerics.statistics.student import mean_interval
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import NeedleSpec
from qspec.schema.results import Measurement, NeedleRow, Needles, Retrieval, Scalar

CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Delhi", "Rome", "Tunis", "Hanoi", "Accra", "Bern")
DIGITS = 5


@dataclass(frozen=True)
class Question:
    """A prompt of `length` tokens with its answer, both as tokens."""

    length: int
    depth: float
    prompt: list[int]
    answer: list[int]


def measure_needles(
    arms: Mapping[str, Callable[[], LM]], tokenizer: Tokenizer, spec: NeedleSpec, seed: int, progress: Progress
) -> Needles:
    """Every question to every arm: `original`, `quantized` and, where a KV cache is quantized, `float_kv`.

    An arm lives while it is asked. Raises `RecipeError` for lengths that leave no room for text.
    """
    asks = questions(tokenizer, spec, seed)
    answers: dict[str, list[tuple[float, float]]] = {}
    for name, make in arms.items():
        lm = PrefixReuse(make())
        answers[name] = [_ask(lm, q) for q in progress.track(asks, f"needle, {name.replace('_', ' ')}", len(asks))]
    rows = tuple(
        NeedleRow(
            length=question.length,
            depth=question.depth,
            hits={name: given[i][0] for name, given in answers.items()},
            nll={name: given[i][1] for name, given in answers.items()},
        )
        for i, question in enumerate(asks)
    )
    condition: dict[str, Scalar] = {
        "data": Path(spec.data).name,
        "source": origin(spec.data),
        "depths": ", ".join(f"{depth:g}" for depth in spec.depths),
        "repeats": spec.repeats,
        "answer_digits": DIGITS,
    }
    return summary(rows, condition)


def questions(tokenizer: Tokenizer, spec: NeedleSpec, seed: int) -> list[Question]:
    """`repeats` numbers at every depth of every length, in an order that shares beginnings."""
    text = windows(spec.data, 1, max(spec.lengths), tokenizer)[0]
    return [
        _question(tokenizer, text, length, depth, random.Random(f"{seed} {length} {depth} {i}"))
        for length in spec.lengths
        for depth in spec.depths
        for i in range(spec.repeats)
    ]


def _question(tokenizer: Tokenizer, text: Sequence[int], length: int, depth: float, chance: random.Random) -> Question:
    city, number = chance.choice(CITIES), "".join(str(chance.randrange(10)) for _ in range(DIGITS))
    fact = f"\n\nThe secret number of {city} is {number}.\n\n"
    end = f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
    needle, ask, answer = (tokenizer.encode(part, special=False) for part in (fact, end, f" {number}"))
    room = length - len(needle) - len(ask) - len(answer)
    if room < 16:
        rule = f"leaves {room} tokens of text around question and answer in this tokenizer"
        raise RecipeError(f"evaluation.needle.lengths {length}", rule, "use longer ones")
    hay = text[:room]
    at = max(1, round(depth * len(hay)))  # behind BOS
    return Question(length, depth, [*hay[:at], *needle, *hay[at:], *ask], answer)


@torch.no_grad()
def _ask(lm: LM, question: Question) -> tuple[float, float]:
    """Whether the answer is the greedy one (1 or 0), and its mean negative log-likelihood, nats per token."""
    ids, count = [*question.prompt, *question.answer[:-1]], len(question.answer)
    lm.truncate(0)
    logits_AV = lm.forward(torch.tensor(ids), last=count).cpu()
    answer_A = torch.tensor(question.answer)
    right = bool((logits_AV.argmax(-1) == answer_A).all())
    chosen_A = logits_AV.double().log_softmax(-1).gather(-1, answer_A.unsqueeze(-1))
    return float(right), -float(chosen_A.mean())


def summary(rows: Sequence[NeedleRow], condition: dict[str, Scalar]) -> Needles:
    """Over all questions, and by context length."""
    by_length = {
        length: [row for row in rows if row.length == length] for length in dict.fromkeys(r.length for r in rows)
    }
    lengths = tuple(_retrieval(length, own) for length, own in by_length.items())
    return Needles(condition=condition, pooled=_retrieval(0, rows), lengths=lengths, rows=tuple(rows))


def _retrieval(length: int, rows: Sequence[NeedleRow]) -> Retrieval:
    hits = {name: [row.hits[name] for row in rows] for name in rows[0].hits}
    comparison, kv = compare_items(hits["original"], hits["quantized"]), _kv(hits)
    shares = {
        name: Measurement(metric="share found", value=sum(own) / len(own), unit="", n=len(own), ci=score_interval(own))
        for name, own in hits.items()
    }
    return Retrieval(
        length=length,
        found=shares,
        difference=comparison.difference,
        p_value=comparison.p_value,
        recovery=comparison.recovery,
        recovery_ci=comparison.recovery_ci,
        verdict=comparison.verdict("quantized"),
        kv_difference=None if kv is None else kv.difference.model_copy(update={"metric": "quantized - float KV cache"}),
        kv_p_value=None if kv is None else kv.p_value,
        nll=_shift(rows, "original"),
        kv_nll=_shift(rows, "float_kv") if kv else None,
    )


def _kv(hits: Mapping[str, Sequence[float]]) -> Items | None:
    return compare_items(hits["float_kv"], hits["quantized"]) if "float_kv" in hits else None


def _shift(rows: Sequence[NeedleRow], base: str) -> Measurement:
    """How much less likely the answers are to the quantized target: finer than whether they are found."""
    values = [row.nll["quantized"] - row.nll[base] for row in rows]
    metric, mean = f"nll of the answer, quantized - {base.replace('_', ' ')}", sum(values) / len(values)
    return Measurement(metric=metric, value=mean, unit="nats/token", n=len(values), ci=mean_interval(values))
