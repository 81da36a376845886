"""Train a draft in two stages: on what the quantized target reads, then on what it writes.

A run that is killed goes on after its last checkpoint and ends with the same weights. Under `torchrun` every process
takes its share of each batch, and gradients are averaged. Letter: T starts of a batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
import json
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.errors import RecipeError
from qspec.kept import Kept
from qspec.numerics.speculation.speculator import expected_tokens, rate_at
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.records import QuantizedModel
from qspec.schema.training import Loss, TrainingSpec
from qspec.train.processes import average, first, first_makes, rank_and_world

CURVE = "curve.jsonl"


_WEIGHTS, _BEST, _OPTIMIZER = "weights.safetensors", "best.safetensors", "optimizer.safetensors"


_TIMED = 10
"""Steps from which a budget in minutes becomes a number of steps."""


class Data(Protocol):
    """Numbered starts of what is learned: states, or whole sequences."""

    @property
    def starts(self) -> Tensor: ...

    def per_step(self, states: int) -> int:
        """Starts that make up a step of so many states."""

    def order(self, seed: int, epoch: int) -> Tensor:
        """All starts, in the random order of an epoch."""


D = TypeVar("D", bound=Data)


@dataclass
class Course:
    """Where a training stands. `first`, `total`: steps of stage 1, and of both."""

    first: int
    total: int
    step: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    curve: list[dict[str, object]] = field(default_factory=list)

    @property
    def lines(self) -> str:
        """The curve as JSON lines, for the file `CURVE`."""
        return "".join(json.dumps(entry) + "\n" for entry in self.curve)


@dataclass(frozen=True)
class Judgement:
    """Held-out acceptance of each draft, teacher-forced: sum of minima at temperature 1, agreement of the likeliest."""

    sampled: list[float]
    greedy: list[float]
    n: int

    @property
    def score(self) -> float:
        """Expected tokens per step, mean of both."""
        return (expected_tokens(self.sampled) + expected_tokens(self.greedy)) / 2


D_contra = TypeVar("D_contra", bound=Data, contravariant=True)


class Learner(Protocol[D_contra]):
    """A draft in training; parameters that need no gradient stay as they are."""

    @property
    def module(self) -> nn.Module: ...

    def backward(self, data: D_contra, starts_T: Tensor, loss: Loss) -> float:
        """Add the gradient of the mean loss at some starts to the parameters'; returns that loss."""

    def judge(self, data: D_contra) -> Judgement:
        """Acceptance on held-out data, at evenly spread starts where there are many."""


def train(
    learner: Learner[D],
    stages: tuple[D, D],
    judged: D,
    spec: TrainingSpec,
    seed: int,
    folder: Path,
    progress: Progress,
    made_of: Sequence[Mapping[str, Any]] = (),
) -> Course:
    """Train a draft in place; it ends with the weights that were best on `judged`, be it those of the beginning.

    `folder` keeps the checkpoints of all settings; `made_of` is all that decides the data. Raises `RecipeError` for
    batches that are too small to be shared.
    """
    module, (rank, world) = learner.module, rank_and_world()
    kept, key = Kept(folder), [seed, spec.model_dump(mode="json"), list(made_of)]
    for data, share in zip(stages, (spec.stage1, 1 - spec.stage1), strict=True):
        if share:
            _require_shares(data, spec, world)
    optimizer = torch.optim.AdamW(_trained(module), lr=spec.rate, betas=spec.betas, weight_decay=spec.weight_decay)
    checkpoint = first_makes(lambda: kept.find("checkpoint", key))
    if checkpoint is None:
        course = _plan(learner, optimizer, stages, spec, seed)
        _note(course, learner.judge(judged), 0.0, float("nan"))
        best = _weights(module)
    else:
        course = Course(**checkpoint.value)
        best = _restore(checkpoint.folder, module, optimizer)
    start, loss_sum, since = perf_counter() - course.seconds, 0.0, 0
    steps = course.total - course.step
    for starts_T, data in progress.track(_batches(stages, course, spec, seed), "steps", steps, "step"):
        rate = spec.rate * rate_at(course.step, course.first, course.total, spec.stage2_rate)
        optimizer.param_groups[0]["lr"] = rate
        loss_sum += _step(learner, optimizer, data, starts_T, spec)
        course.step, since = course.step + 1, since + 1
        if course.step % spec.evaluate_every and course.step != course.total:
            continue
        course.seconds = perf_counter() - start
        judgement = learner.judge(judged)
        if _note(course, judgement, rate, loss_sum / since):
            best = _weights(module)
        loss_sum, since = 0.0, 0
        if rank == 0:
            kept.keep("checkpoint", key, partial(_save, module, best, optimizer, course))
            progress.say(_line(course, judgement))
    module.load_state_dict(best, strict=False)
    return course


def facts(seed: int, spec: TrainingSpec, target: QuantizedModel, course: Course) -> dict[str, Any]:
    """Facts of its training that a trained draft carries."""
    best = next(entry for entry in course.curve if entry["step"] == course.best_step)
    return {
        "target": dict(target.source),
        "training": spec.model_dump(mode="json", exclude={"data"}),
        "data": spec.data.model_dump(mode="json"),
        "seed": seed,
        "steps": course.total,
        "kept_step": course.best_step,
        "held_out": {"sampled": best["sampled"], "greedy": best["greedy"]},
        "seconds": round(course.seconds),
        "environment": {name: environment()[name] for name in ("torch", "cpu", "threads")},
    }


def _require_shares(data: Data, spec: TrainingSpec, world: int) -> None:
    """Every process gets something of every batch: gradients are averaged one by one."""
    starts = min(data.per_step(spec.batch), len(data.starts))
    if starts < world:
        rule = f"is {starts} starts per step, for {world} processes"
        raise RecipeError(f"training.batch {spec.batch}", rule, "raise it, give more data, or start fewer processes")


def _note(course: Course, judgement: Judgement, rate: float, loss: float) -> bool:
    """Add a point to the curve; whether it is the best so far."""
    course.curve.append(
        {
            "step": course.step,
            "stage": 1 if course.step <= course.first else 2,
            "seconds": round(course.seconds, 1),
            "rate": rate,
            "loss": round(loss, 4) if course.step else None,
            "score": round(judgement.score, 4),
            "sampled": [round(x, 4) for x in judgement.sampled],
            "greedy": [round(x, 4) for x in judgement.greedy],
        }
    )
    if judgement.score <= course.best:
        return False
    course.best, course.best_step = judgement.score, course.step
    return True


def _step(
    learner: Learner[D], optimizer: torch.optim.Optimizer, data: D, starts_T: Tensor, spec: TrainingSpec
) -> float:
    """One step on all of `starts_T`, of which this process takes its share; returns the loss of that."""
    rank, world = rank_and_world()
    share_T = starts_T[rank::world]
    optimizer.zero_grad(set_to_none=True)
    loss = learner.backward(data, share_T, spec.loss)
    trained = _trained(learner.module)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    average(gradients, len(share_T) * world / len(starts_T))
    torch.nn.utils.clip_grad_norm_(trained, spec.clip)
    optimizer.step()
    return loss


def _batches(stages: tuple[D, D], course: Course, spec: TrainingSpec, seed: int) -> Iterator[tuple[Tensor, D]]:
    """Starts of every step that is to come, and the data that they point into."""
    for step in range(course.step, course.total):
        second = step >= course.first
        data, done = stages[second], step - course.first if second else step
        size = data.per_step(spec.batch)
        epoch, at = divmod(done, max(1, len(data.starts) // size))
        yield data.order(seed + second, epoch)[at * size : (at + 1) * size], data


def _plan(
    learner: Learner[D], optimizer: torch.optim.Optimizer, stages: tuple[D, D], spec: TrainingSpec, seed: int
) -> Course:
    """The number of steps that the budget allows; a budget of minutes is timed on a few steps of rate 0."""
    if spec.positions is not None:
        total = max(1, spec.positions // spec.batch)
    else:
        assert spec.minutes is not None
        optimizer.param_groups[0]["lr"] = 0.0
        begin = perf_counter()
        for starts_T, data in _batches(stages, Course(round(spec.stage1 * _TIMED), _TIMED), spec, seed):
            _step(learner, optimizer, data, starts_T, spec)
        total = max(1, int(spec.minutes * 60 / (perf_counter() - begin) * _TIMED))
        optimizer.state.clear()
    total = int(first(torch.tensor(total)))
    return Course(round(spec.stage1 * total), total)


def _save(
    module: nn.Module, best: dict[str, Tensor], optimizer: torch.optim.Optimizer, course: Course, folder: Path
) -> dict[str, Any]:
    write_tensors(folder / _WEIGHTS, _weights(module))
    write_tensors(folder / _BEST, best)
    moments = optimizer.state_dict()["state"]
    flat = {f"{i}.{name}": value for i, state in moments.items() for name, value in state.items()}
    write_tensors(folder / _OPTIMIZER, flat)
    return asdict(course)


def _restore(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Put weights and moments back; returns the weights that were best."""
    module.load_state_dict(dict(read_tensors(folder / _WEIGHTS)), strict=False)
    state = optimizer.state_dict()
    state["state"] = {}
    for name, value in read_tensors(folder / _OPTIMIZER).items():
        number, _, part = name.partition(".")
        state["state"].setdefault(int(number), {})[part] = value.clone()
    optimizer.load_state_dict(state)
    return dict(read_tensors(folder / _BEST))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained weights, tied parts once."""
    return {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}


def _line(course: Course, judgement: Judgement) -> str:
    left = course.seconds / course.step * (course.total - course.step)
    sampled, greedy = (" ".join(f"{x:.3f}" for x in alphas) for alphas in (judgement.sampled, judgement.greedy))
    return (
        f"step {course.step} of {course.total}: held-out overlap {sampled}, agreement {greedy}, "
        f"{judgement.score:.3f} tokens per step; {left / 60:.0f} min left"
    )
