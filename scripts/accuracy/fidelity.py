"""Measure the arms of a matrix one by one, keep each, and print who is closer to the original.

qspec beside llm-compressor at equal exported formats: KL, top-1 agreement and perplexity of
eval/matrices/fidelity.yaml. Finished arms are kept in runs/bench_fidelity and not measured again; the rows go to
eval/baselines/<matrix>.json.
  --only PATTERN   arms whose name (model/contest/engine method) holds the regular expression
  --again          measure those anew        --list   show arms and what is done        --threads N
  --rows           rows of what is kept, measure nothing: with the intervals of the present code
  --matrix FILE    another matrix, such as eval/matrices/ablation.yaml
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
import gc
import hashlib
import json
from pathlib import Path
import re
from tempfile import TemporaryDirectory
import time
from typing import Any

import torch
from torch import Tensor

from qspec.bridges.text import data_file, windows
from qspec.errors import QspecError
from qspec.models.load import load
from qspec.nn.eager.decoder import Decoder
from qspec.nn.lm import LM
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.quantization.job import Calibration, quantize_model
from qspec.records import LoadedModel
from qspec.schema.recipe import FusionSpec
from qspec.schemes.build import build_plan, resolve_plan
from scripts.accuracy.compare import exported_format, measure, reference, summary, verdict
from scripts.accuracy.matrix import Contest, Subject, read_matrix
from scripts.common import digest, read_options, write_baseline
from scripts.engines.convert_llama2c import convert

WORK = Path("runs/bench_fidelity")
BASELINES = Path("eval/baselines")
Record = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """One checkpoint to make and measure; `engine` "" is the original."""

    model: str
    subject: Subject
    contest: str
    engine: str
    method: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.contest}/{self.engine} {self.method}".replace("/ ", "/")

    @property
    def rules(self) -> Contest:
        return self.subject.contests[self.contest]

    @property
    def path(self) -> Path:
        """Where its record is kept: by what decides its numbers, so that a changed setting is a new arm."""
        subject = self.subject.model_dump(mode="json", exclude={"contests"}, exclude_defaults=True)
        own = "original"
        if self.engine:
            parts = self.rules.peers if self.engine == "llmcompressor" else self.rules.ours
            own = json.dumps([self.engine, self.rules.base | parts[self.method]], sort_keys=True)
        return WORK / f"{re.sub('[^A-Za-z0-9+]+', '-', self.name)}-{digest([subject, own])}.json"

    def record(self) -> Record | None:
        return json.loads(self.path.read_bytes()) if self.path.exists() else None

    @property
    def done(self) -> bool:
        """A refusal is asked for again: the library that refused may have learned."""
        return "corpora" in (self.record() or {})


def arms_of(matrix: dict[str, Subject]) -> Iterator[Arm]:
    for model, subject in matrix.items():
        yield Arm(model, subject, "", "", "original")
        for contest, rules in subject.contests.items():
            for engine, parts in (("llmcompressor", rules.peers), ("qspec", rules.ours)):
                yield from (Arm(model, subject, contest, engine, method) for method in parts)


def missing(subject: Subject) -> str | None:
    """Why the subject's model cannot be had here, None if it can; one of llama2.c is converted first."""
    if subject.llama2c is None or Path(subject.model).exists():
        return None
    model, tokenizer = map(data_file, subject.llama2c)
    if model is None or tokenizer is None:
        return f"needs {' and '.join(subject.llama2c)} in QSPEC_DATA"
    convert(model, tokenizer, Path(subject.model))
    return None


class Bench:
    """One subject in memory: the model, its calibration text, and the original's logits on disk."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        self.subject, self._progress = subject, progress

    @cached_property
    def model(self) -> LoadedModel:
        return load(self.subject.source)

    @cached_property
    def text(self) -> Calibration:
        return Calibration(self.subject.calibration, self.model.tokenizer, self.subject.seed, self._progress)

    @cached_property
    def corpora(self) -> dict[str, list[list[int]]]:
        s = self.subject
        return {corpus: windows(corpus, s.windows, s.length, self.model.tokenizer) for corpus in s.corpora}

    @cached_property
    def original(self) -> Decoder:
        return Decoder.from_float(self.model, max_length=self.subject.length)

    def record(self, arm: Arm) -> Record:
        """Everything about an arm; one that cannot be made is a record too."""
        start = time.perf_counter()
        try:
            lm, settings, notes = self.build(arm)
        except QspecError as error:
            return {"refused": str(error)}
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if arm.engine == "qspec":
                raise
            return {"refused": f"failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        made = time.perf_counter() - start
        by_corpus = {c: measure(lm, rows, self.references(rows)) for c, rows in self.corpora.items()}
        seconds = {"make": round(made, 1), "measure": round(time.perf_counter() - start - made, 1)}
        return {"settings": settings, "notes": notes, "seconds": seconds, "corpora": by_corpus}

    def build(self, arm: Arm) -> tuple[LM, Record, list[str]]:
        if not arm.engine:
            return self.original, {}, []
        spec = arm.rules.quantization(arm.engine, arm.method)
        plan = build_plan(spec)
        resolve_plan(plan, self.model.arch)
        first = next(iter(arm.rules.ours))
        equal = build_plan(arm.rules.quantization("qspec", first))
        if exported_format(plan, self.model.arch) != exported_format(equal, self.model.arch):
            raise QspecError(arm.name, f"exports another format than {first}", "compare it in a contest of its own")
        with TemporaryDirectory(dir=WORK) as work:
            quantized = quantize_model(self.model, spec, FusionSpec(), self.text, Path(work), torch.float32)
            decoder = Decoder.from_quantized(quantized, max_length=self.subject.length)  # while its files are there
        return decoder, spec.model_dump(mode="json", exclude_defaults=True), list(quantized.notes)

    def references(self, rows: list[list[int]]) -> Iterator[Tensor]:
        """The original's predictions of each window, computed once."""
        for row in rows:
            key = hashlib.sha256(f"{self.model.source.get('sha256')} {row}".encode()).hexdigest()
            path = WORK / "reference" / f"{key[:24]}.pt"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".partial")
                torch.save(reference(self.original, row), part)
                part.replace(path)
            yield torch.load(path)


def rows_of(arm: Arm, record: Record) -> Iterator[Record]:
    """The rows of an arm for the baseline: one per corpus, or the refusal."""
    head = {"model": arm.model, "scheme": arm.contest, "method": arm.method, "engine": arm.engine}
    if "refused" in record:
        yield head | {"refused": record["refused"]}
        return
    tokens = arm.subject.windows * (arm.subject.length - 1)
    for corpus, distances in record["corpora"].items():
        by_window = [round(value, 7) for value in distances["kl"]]
        yield head | {"corpus": corpus} | summary(distances) | {"tokens": tokens, "kl_windows": by_window}


def table(arms: list[Arm]) -> Iterator[str]:
    """Per contest and corpus: the best of ours, the best peer, and who wins."""
    for model, subject, contest in dict.fromkeys((arm.model, id(arm.subject), arm.contest) for arm in arms):
        mates = [arm for arm in arms if (arm.model, id(arm.subject), arm.contest) == (model, subject, contest)]
        measured = {(arm.engine, arm.method): arm.record() or {} for arm in mates if arm.engine}
        for corpus in mates[0].subject.corpora:
            sides = [
                {
                    method: record["corpora"][corpus]
                    for (engine, method), record in measured.items()
                    if engine == side and "corpora" in record
                }
                for side in ("qspec", "llmcompressor")
            ]
            if any(sides):
                yield f"{model} {contest} {corpus}: {verdict(*sides)}"


def main() -> None:
    args = read_options(__doc__, "fidelity.yaml", lambda parser: parser.add_argument("--rows", action="store_true"))
    progress = Progress()
    WORK.mkdir(parents=True, exist_ok=True)
    every = list(arms_of(read_matrix(args.matrix)))
    chosen = [arm for arm in every if re.search(args.only, arm.name)]
    if args.list:
        for arm in chosen:
            print("done   " if arm.done else "to do  ", arm.name)
        return
    absent = {arm.model: reason for arm in chosen if (reason := missing(arm.subject))}
    bench: Bench | None = None
    for arm in () if args.rows else chosen:
        if arm.model in absent or (arm.done and not args.again):
            continue
        if bench is None or bench.subject is not arm.subject:
            bench = Bench(arm.subject, progress)
        progress.stage(arm.name)
        atomic_write(arm.path, json.dumps(bench.record(arm)))
        gc.collect()
    progress.close()
    rows = [row for arm in every if (record := arm.record()) for row in rows_of(arm, record)]
    baseline = BASELINES / f"{args.matrix.stem}.json"
    write_baseline(baseline, json.loads(baseline.read_bytes())["environment"] if args.rows else environment(), rows)
    print(*table(every), *(f"{model}: skipped, {reason}" for model, reason in absent.items()), sep="\n")


if __name__ == "__main__":
    main()
