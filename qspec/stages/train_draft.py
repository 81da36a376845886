"""Train a speculator head in two stages: on what the quantized target reads, then on what it writes.

A run that is killed goes on after its last checkpoint and ends with the same weights. Under `torchrun` every process
takes its share of each batch, and gradients are averaged. Letters as in `stages.head_data`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
import json
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.numerics import speculator as losses
from qspec.progress import Progress
from qspec.provenance import atomic_write, staged_dir
from qspec.schema.training import TrainingSpec
from qspec.stages.head_data import Batch, HeadData
from qspec.stages.processes import average, first, rank_and_world

CHECKPOINT, CURVE = "checkpoint", "curve.jsonl"
_WEIGHTS, _BEST, _OPTIMIZER, _STATE = "head.safetensors", "best.safetensors", "optimizer.safetensors", "state.json"
_TIMED = 10
"""Steps from which a budget in minutes becomes a number of steps."""
_JUDGED_AT_ONCE = 1024
_MOST_JUDGED = 8192


@dataclass(frozen=True)
class Judgement:
    """Held-out acceptance of each head, teacher-forced: sum of minima at temperature 1, agreement of the likeliest."""

    sampled: list[float]
    greedy: list[float]
    n: int

    @property
    def score(self) -> float:
        """Expected tokens per step, mean of both."""
        return (losses.expected_tokens(self.sampled) + losses.expected_tokens(self.greedy)) / 2


@dataclass
class Course:
    """Where a training stands. `first` and `total`: steps of stage 1, and of both."""

    first: int
    total: int
    step: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0
    curve: list[dict[str, object]] = field(default_factory=list)


def train(
    head: MLPSpeculator,
    stages: tuple[HeadData, HeadData],
    judged: HeadData,
    spec: TrainingSpec,
    seed: int,
    folder: Path,
    progress: Progress,
) -> Course:
    """Train `head` in place; it ends with the weights that were best on `judged`.

    `folder` keeps the checkpoint, and the curve as JSON lines.
    """
    rank, world = rank_and_world()
    optimizer = torch.optim.AdamW(_trained(head), lr=spec.rate, betas=spec.betas, weight_decay=spec.weight_decay)
    course = _restore(folder / CHECKPOINT, head, optimizer)
    best = _weights(head) if course is None else dict(read_tensors(folder / CHECKPOINT / _BEST))
    course = course or _plan(head, optimizer, stages, spec, seed)
    start, loss_sum, since = perf_counter() - course.seconds, 0.0, 0
    batches = _batches(stages, course, spec, seed)
    while course.step < course.total:
        starts_T, data = next(batches)
        factor = losses.rate_at(course.step, course.first, course.total, spec.stage2_rate)
        optimizer.param_groups[0]["lr"] = spec.rate * factor
        loss_sum += _step(head, optimizer, data.batch(starts_T[rank::world], head.shape.n_predict), spec)
        course.step, since = course.step + 1, since + 1
        if course.step % spec.evaluate_every and course.step != course.total:
            continue
        course.seconds = perf_counter() - start
        found = judge(head, judged)
        if found.score > course.best:
            course.best, course.best_step, best = found.score, course.step, _weights(head)
        course.curve.append(
            {
                "step": course.step,
                "stage": 1 if course.step <= course.first else 2,
                "seconds": round(course.seconds, 1),
                "rate": spec.rate * factor,
                "loss": round(loss_sum / since, 4),
                "score": round(found.score, 4),
                "sampled": [round(x, 4) for x in found.sampled],
                "greedy": [round(x, 4) for x in found.greedy],
            }
        )
        loss_sum, since = 0.0, 0
        if rank == 0:
            _save(folder, head, best, optimizer, course)
            progress.say(_line(course, found))
    head.load_state_dict(best, strict=False)
    return course


@torch.no_grad()
def judge(head: MLPSpeculator, data: HeadData) -> Judgement:
    """Acceptance on held-out sequences, at evenly spread starts where there are many."""
    n = head.shape.n_predict
    starts = data.starts[:: -(-len(data.starts) // _MOST_JUDGED)]
    sampled_N, greedy_N = torch.zeros(n), torch.zeros(n)
    for starts_T in starts.split(_JUDGED_AT_ONCE):
        batch = data.batch(starts_T, n)
        for i, logits_TD in enumerate(head(batch.hidden_TH, batch.tokens_TN)):
            ids_TK, probs_TK = batch.ids_TNK[:, i], batch.probs_TNK[:, i]
            sampled_N[i] += losses.overlap(logits_TD.softmax(-1), ids_TK, probs_TK).sum()
            greedy_N[i] += losses.agreement(logits_TD, ids_TK).sum()
    return Judgement((sampled_N / len(starts)).tolist(), (greedy_N / len(starts)).tolist(), len(starts))


def loss_of(head: MLPSpeculator, batch: Batch, kind: str) -> Tensor:
    """Sum of the losses of all heads."""
    total = torch.zeros(())
    for i, logits_TD in enumerate(head(batch.hidden_TH, batch.tokens_TN)):
        law = batch.ids_TNK[:, i], batch.probs_TNK[:, i]
        match kind:
            case "cross_entropy":
                total = total + losses.token_loss(logits_TD, batch.labels_TN[:, i])
            case "kl":
                total = total + losses.law_loss(logits_TD, *law)
            case _:
                total = total + losses.overlap_loss(logits_TD, *law)
    return total


def _step(head: MLPSpeculator, optimizer: torch.optim.Optimizer, batch: Batch, spec: TrainingSpec) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(head, batch, spec.loss)
    loss.backward()
    average([parameter.grad for parameter in _trained(head) if parameter.grad is not None])
    torch.nn.utils.clip_grad_norm_(_trained(head), spec.clip)
    optimizer.step()
    return float(loss.detach())


def _batches(
    stages: tuple[HeadData, HeadData], course: Course, spec: TrainingSpec, seed: int
) -> Iterator[tuple[Tensor, HeadData]]:
    """Starts of every step that is to come, and the data that they point into."""
    for step in range(course.step, course.total):
        second = step >= course.first
        data, done = stages[second], step - course.first if second else step
        per_epoch = max(1, len(data.starts) // spec.batch)
        epoch, at = divmod(done, per_epoch)
        order = data.order(seed + second, epoch)
        yield order[at * spec.batch : (at + 1) * spec.batch], data


def _plan(
    head: MLPSpeculator,
    optimizer: torch.optim.Optimizer,
    stages: tuple[HeadData, HeadData],
    spec: TrainingSpec,
    seed: int,
) -> Course:
    """The number of steps that the budget allows; a budget of minutes is timed on a few steps of rate 0."""
    if spec.positions is not None:
        total = max(1, spec.positions // spec.batch)
    else:
        assert spec.minutes is not None
        optimizer.param_groups[0]["lr"] = 0.0
        batches = _batches(stages, Course(_TIMED, _TIMED), spec, seed)
        begin = perf_counter()
        for starts_T, data in batches:
            _step(head, optimizer, data.batch(starts_T, head.shape.n_predict), spec)
        total = max(1, int(spec.minutes * 60 / (perf_counter() - begin) * _TIMED))
        optimizer.state.clear()
    total = int(first(torch.tensor(total)))
    return Course(round(spec.stage1 * total), total)


def _save(
    folder: Path, head: MLPSpeculator, best: dict[str, Tensor], optimizer: torch.optim.Optimizer, course: Course
) -> None:
    with staged_dir(folder / CHECKPOINT) as part:
        write_tensors(part / _WEIGHTS, _weights(head))
        write_tensors(part / _BEST, best)
        moments = optimizer.state_dict()["state"]
        flat = {f"{i}.{name}": value for i, state in moments.items() for name, value in state.items()}
        write_tensors(part / _OPTIMIZER, flat)
        (part / _STATE).write_text(json.dumps(asdict(course)))
    atomic_write(folder / CURVE, "".join(json.dumps(entry) + "\n" for entry in course.curve))


def _restore(folder: Path, head: MLPSpeculator, optimizer: torch.optim.Optimizer) -> Course | None:
    if not (folder / _STATE).exists():
        return None
    head.load_state_dict({name: value.clone() for name, value in read_tensors(folder / _WEIGHTS).items()}, strict=False)
    state = optimizer.state_dict()
    state["state"] = {}
    for name, value in read_tensors(folder / _OPTIMIZER).items():
        number, _, part = name.partition(".")
        state["state"].setdefault(int(number), {})[part] = value.clone()
    optimizer.load_state_dict(state)
    return Course(**json.loads((folder / _STATE).read_text()))


def _trained(head: MLPSpeculator) -> list[torch.nn.Parameter]:
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


def _weights(head: MLPSpeculator) -> dict[str, Tensor]:
    """What is trained, tied parts once, copied."""
    return {name: value.detach().clone() for name, value in head.named_parameters() if value.requires_grad}


def _line(course: Course, found: Judgement) -> str:
    left = course.seconds / course.step * (course.total - course.step)
    sampled, greedy = (" ".join(f"{x:.3f}" for x in alphas) for alphas in (found.sampled, found.greedy))
    return (
        f"step {course.step} of {course.total}: held-out overlap {sampled}, agreement {greedy}, "
        f"{found.score:.3f} tokens per step; {left / 60:.0f} min left"
    )
