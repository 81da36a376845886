"""Decode with and without drafts while a target's layers are in memory, or read for every pass, in turns by prompt.

Targets whose layers are read from disk or host memory for every pass, beside the same in memory, plain and with drafts:
tokens per second, speedup, bandwidth, and how much of the reading is hidden. About six minutes on a quiet machine.
Subjects of eval/matrices/offload.yaml, each kept in runs/bench_offload when it is done; --only PATTERN  --list  --again
--threads N. The rows go to eval/baselines/offload.json.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
import json
import mmap
import os
from pathlib import Path
import re
from statistics import median, quantiles
import time
from typing import Any

import torch

from qspec.measure.arm import TokenizedPrompt
from qspec.nn.cpp.offload import OffloadedDecoder, Reading, packed_path
from qspec.nn.engines import AnyDecoder, open_decoder
from qspec.pair.drafters.registry import draft_policy
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.speculation.engine import generate
from qspec.speculation.types import Drafter, DraftLength, Generation, Sampling
from scripts.common import digest, read_options, write_baseline
from scripts.drafts.matrix import OffloadSubject, read_spec_matrix
from scripts.drafts.policies import PLAIN, WORK as MODELS, Bench, Comparison

WORK = Path("runs/bench_offload")
BASELINE = Path("eval/baselines/offload.json")
CHUNK = 4 << 20
WARM_UP_TOKENS = 2
ANSWERS = {"copying": ("summarization", "rag"), "chat": ("writing",)}
Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A target with a share of its layers in memory, and how it decodes."""

    share: float
    draft: str
    policy: str
    target: AnyDecoder
    drafter: Drafter | None = None
    length: DraftLength | None = None

    def run(self, request: TokenizedPrompt, tokens: int) -> "Run":
        before = reading(self.target)
        generation = generate(
            self.target,
            self.drafter,
            self.length,
            request.tokens,
            tokens,
            Sampling(),
            (),  # as many tokens from every arm
            torch.Generator().manual_seed(0),
            domain=request.category,
        )
        return Run(self, request.category, generation, reading(self.target).since(before))


@dataclass(frozen=True)
class Run:
    """One answer, and what was read for it."""

    arm: Arm
    category: str
    generation: Generation
    read: Reading

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.generation.tokens) - 1) / self.generation.seconds


def reading(target: AnyDecoder) -> Reading:
    return target.reading() if isinstance(target, OffloadedDecoder) else Reading(0, 0.0, 0.0)


class OffloadBench(Bench):
    """A subject's target under all its limits, its drafts, and its prompts."""

    def __init__(self, name: str, subject: OffloadSubject, progress: Progress) -> None:
        super().__init__(Comparison(name, subject), progress)
        self.name, self.subject = name, subject
        self.weights = f"bench-{digest([subject.target.model_dump(mode='json'), subject.seed])}"

    @cached_property
    def targets(self) -> dict[float, AnyDecoder]:
        """By the share of layers in memory."""
        length, direct = self.subject.max_length, self.subject.direct_io
        with self._quantized(self._model, self._recipe.target.quantization) as model:
            whole = OffloadedDecoder.open(model, self.weights, 1 << 60, length).sizes
            limits = {share: whole.holding(round(share * len(whole.layers))).total for share in self.subject.resident}
            opened = {
                share: OffloadedDecoder.open(model, self.weights, limit, length, direct)
                for share, limit in limits.items()
            }
            return {1.0: open_decoder(model, max_length=length), **opened}

    @cached_property
    def all_arms(self) -> list[Arm]:
        arms = []
        for share, target in self.targets.items():
            arms.append(Arm(share, PLAIN, "", target))
            for draft, policy in self.comparison.cells.values():
                recipe = self.subject.recipe(draft, policy)
                length = draft_policy(recipe.speculation.draft_length)
                arms.append(Arm(share, draft, policy, target, self.drafter(recipe), length))
        return arms

    def answers(self) -> Iterator[Run]:
        """All arms in turns, prompt by prompt; the first one rotates."""
        requests, arms, most = self.requests(), self.all_arms, self.subject.benchmark.max_new_tokens
        for arm in arms:
            arm.run(requests[0], WARM_UP_TOKENS)
        for i, request in enumerate(self._progress.track(requests, self.name, len(requests))):
            first = i * len(arms) // len(requests)
            for arm in arms[first:] + arms[:first]:
                yield arm.run(request, most)

    def rows(self) -> Iterator[Row]:
        """By share, draft and policy: over all prompts, then by kind of answer."""
        arms = self.all_arms  # the file is there from now on
        ceiling = [self._read_rate()]
        runs = list(self.answers())
        ceiling.append(self._read_rate())
        for arm in arms:
            for kind, categories in {"all": tuple({r.category for r in runs}), **ANSWERS}.items():
                here = [run for run in runs if run.arm.share == arm.share and run.category in categories]
                mine, plain = [r for r in here if r.arm is arm], [r for r in here if r.arm.draft == PLAIN]
                if mine:
                    yield self._facts(arm, kind) | row(mine, plain) | {"plain_read_mb_s": round(max(ceiling) / 1e6)}

    def _facts(self, arm: Arm, kind: str) -> Row:
        residency = arm.target.residency if isinstance(arm.target, OffloadedDecoder) else None
        storage = "disk, past the file cache" if self.subject.direct_io else "file cache in memory"
        return {
            "model": self.name,
            "read_from": storage if residency else None,
            "layers_in_memory": len(residency.resident if residency else arm.target.arch.layers),
            "layers": arm.target.arch.n_layers,
            "mb_per_pass": round(residency.read / 1e6, 1) if residency else 0.0,
            "drafter": arm.draft,
            "policy": arm.policy,
            "category": kind,
        }

    def _read_rate(self) -> float:
        """Bytes per second of the packed file, read from beginning to end as the subject reads."""
        flags = os.O_RDONLY | (os.O_DIRECT if self.subject.direct_io else 0)
        buffer, file = mmap.mmap(-1, CHUNK), os.open(packed_path(self.weights), flags)
        begin, at = time.perf_counter(), 0
        while count := os.preadv(file, [buffer], at):
            at += count
        os.close(file)
        return at / (time.perf_counter() - begin)


def row(runs: list[Run], plain: list[Run]) -> Row:
    """Medians and quartiles over prompts; speedup over plain decoding with as many layers in memory, by prompt."""
    ratios = [run.rate / other.rate for run, other in zip(runs, plain, strict=True)]
    steps = [step for run in runs for step in run.generation.steps]
    read = Reading(*(sum(getattr(run.read, name) for run in runs) for name in ("bytes", "seconds", "waited")))
    return {
        "n": len(runs),
        "tokens_per_s": round(median(run.rate for run in runs), 2),
        "tokens_per_s_spread": spread(run.rate for run in runs),
        "speedup": round(median(ratios), 3),
        "speedup_spread": spread(ratios),
        "tokens_per_step": round(sum(len(run.generation.tokens) - 1 for run in runs) / len(steps), 3),
        "drafted_per_step": round(sum(step.drafted for step in steps) / len(steps), 3),
        "verify_ms": round(1e3 * median(step.t_verify for step in steps), 2),
        "draft_ms": round(1e3 * median(step.t_draft for step in steps), 2),
        "equal": sum(a.generation.tokens == b.generation.tokens for a, b in zip(plain, runs, strict=True)),
        "read_mb_s": round(read.bytes / 1e6 / read.seconds) if read.seconds else None,
        "read_hidden": round(read.hidden, 3) if read.seconds else None,
    }


def spread(values: Iterable[float]) -> list[float]:
    """Quartiles; the value itself where there is one."""
    known = list(values)
    first, _, third = quantiles(known, method="inclusive") if len(known) > 1 else known * 3
    return [round(first, 3), round(third, 3)]


def main() -> None:
    args = read_options(__doc__, "offload.yaml")
    MODELS.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    matrix = read_spec_matrix(args.matrix, OffloadSubject)
    chosen = {name: subject for name, subject in matrix.items() if re.search(args.only, name)}
    if args.list:
        print(*(f"{'kept' if kept(name, subject) else 'to do'} {name}" for name, subject in chosen.items()), sep="\n")
        return
    for name, subject in chosen.items():
        if args.again or not kept(name, subject):
            rows = list(OffloadBench(name, subject, progress).rows())
            atomic_write(path_of(name, subject), json.dumps(rows))
    progress.close()
    rows = [row for name, subject in matrix.items() for row in kept(name, subject)]
    write_baseline(BASELINE, environment() | {"torch threads": str(torch.get_num_threads())}, rows)
    print(*(json.dumps(row) for row in rows if row["category"] == "all"), sep="\n")


def path_of(name: str, subject: OffloadSubject) -> Path:
    """Where rows are kept: by all that decides them, so that a changed setting is measured anew."""
    return WORK / f"{re.sub('[^a-z0-9]+', '-', name)}-{digest(subject.model_dump(mode='json'))}.json"


def kept(name: str, subject: OffloadSubject) -> list[Row]:
    path = path_of(name, subject)
    rows: list[Row] = json.loads(path.read_bytes()) if path.exists() else []
    return rows


if __name__ == "__main__":
    main()
