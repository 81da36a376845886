"""Measure the cells of a matrix one by one, keep each, and print how drafts and policies do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
import gc
import json
from pathlib import Path
import re
from tempfile import TemporaryDirectory
import time
from typing import Any

from bench_cli import digest, read_options, write_baseline
import torch

from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.pipeline import Calibration, Originals, load_originals, quantize_model
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.records import LoadedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import LookupDraft, ModelDraft, Recipe, SelfDraft
from qspec.schema.results import Measurement, Speed
from qspec.schema.spec_matrix import SpecSubject, read_spec_matrix
from qspec.spec.types import Drafter
from qspec.stages.bench import arm_facts, find_mismatches, load_requests, measure
from qspec.stages.bench_arm import Arm
from qspec.stages.bench_stats import Request, Run, summarize
from qspec.stages.check import real_vocab
from qspec.stages.drafting import draft_policy, lookup_drafter, model_drafter

WORK = Path("runs/bench_spec")
BASELINE = Path("eval/baselines/spec_bench.json")
NO_CEILING = Measurement(metric="memory read", value=float("nan"), unit="B/s", n=0)
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One draft under one policy at one temperature."""

    model: str
    subject: SpecSubject
    draft: str
    policy: str
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.model}/{self.draft}/{self.policy}/{self.temperature:g}"

    @property
    def recipe(self) -> Recipe:
        return self.subject.recipe(self.draft, self.policy, self.temperature)

    @property
    def path(self) -> Path:
        """Where its record is kept: by all that decides its numbers, so that a changed setting is a new cell."""
        return WORK / f"{re.sub('[^A-Za-z0-9+.]+', '-', self.name)}-{digest(self.recipe.as_dict())}.json"

    def record(self) -> dict[str, Any] | None:
        return json.loads(self.path.read_bytes()) if self.path.exists() else None


def cells_of(matrix: dict[str, SpecSubject]) -> Iterator[Cell]:
    for model, subject in matrix.items():
        for draft in subject.drafts:
            for policy in subject.policies:
                yield from (Cell(model, subject, draft, policy, t) for t in subject.benchmark.temperatures)


class Bench:
    """One subject and one draft in memory: the target, its prompts, the drafter's model."""

    def __init__(self, cell: Cell, progress: Progress, loaded: Originals | None = None) -> None:
        """`loaded`: models of another cell of the subject; a self draft of them all is the target itself."""
        self.subject, self.draft, self._recipe, self._progress = cell.subject, cell.draft, cell.recipe, progress
        draft = self._recipe.draft
        if loaded is not None and isinstance(draft, SelfDraft) and draft.layers is None:
            self._originals = Originals(loaded.target, loaded.target)
        else:
            self._originals = load_originals(cell.recipe, progress)
        self.model = self._originals.target

    @cached_property
    def target(self) -> AnyDecoder:
        return self._decoder(self.model, self._recipe.target.quantization)

    @cached_property
    def draft_model(self) -> AnyDecoder:
        assert self._originals.draft is not None
        assert isinstance(self._recipe.draft, ModelDraft | SelfDraft)
        return self._decoder(self._originals.draft, self._recipe.draft.quantization)

    @cached_property
    def requests(self) -> list[Request]:
        spec = self.subject.benchmark
        return load_requests(spec, self.model.tokenizer, self.subject.max_length - spec.max_new_tokens)[0]

    def other_draft(self, cell: Cell) -> "Bench":
        """The same target with another draft; its model too, where only what drafts before it differs."""
        other = Bench(cell, self._progress, self._originals)
        other.target, other.requests = self.target, self.requests
        mine, its = self._recipe.draft, other._recipe.draft
        if isinstance(mine, SelfDraft) and isinstance(its, SelfDraft) and _weights(mine) == _weights(its):
            other.draft_model = self.draft_model
        return other

    def drafter(self) -> Drafter:
        """A drafter that has learned nothing yet."""
        draft = self._recipe.draft
        if isinstance(draft, LookupDraft):
            return lookup_drafter(draft)
        assert isinstance(draft, ModelDraft | SelfDraft)
        assert self._originals.draft is not None
        return model_drafter(self.draft_model, draft, self.model.arch, real_vocab(self._originals.draft.tokenizer))

    def record(self, cell: Cell) -> dict[str, Any]:
        """Rows of a cell, and what it took."""
        start, recipe = time.perf_counter(), cell.recipe
        plain = Arm(self.target)
        drafting = replace(plain, drafter=self.drafter(), policy=draft_policy(recipe.speculation.draft_length))
        arms, eos_ids = {"plain": plain, "draft": drafting}, self.model.arch.eos_ids
        runs = measure(arms, self.requests, recipe, eos_ids, self._progress)
        rows = list(rows_of(cell, arms, self.requests, runs))
        asked = {"engine": engine_name(self.target), "prompts": len(self.requests)}
        return {"seconds": round(time.perf_counter() - start, 1), "rows": rows, **asked}

    def _decoder(self, model: LoadedModel, spec: QuantSpec) -> AnyDecoder:
        text = Calibration(self._recipe.calibration, self.model.tokenizer, self.subject.seed, self._progress)
        with TemporaryDirectory(dir=WORK) as work:
            quantized = quantize_model(model, spec, self._recipe.fusion, text, Path(work), torch.float32)
            length = min(self.subject.max_length, model.arch.max_positions)
            return open_decoder(quantized, max_length=length)  # while its files are there


def _weights(draft: SelfDraft) -> tuple[int | None, QuantSpec]:
    return draft.layers, draft.quantization


def rows_of(cell: Cell, arms: dict[str, Arm], requests: list[Request], runs: list[Run]) -> Iterator[Row]:
    """Over all prompts, then by category."""
    facts = {name: arm_facts(name, arms) for name in arms}
    differing = find_mismatches(arms, facts, requests, runs)
    for category in dict.fromkeys(["all", *(request.category for request in requests)]):
        mine = [r for r in runs if category in ("all", requests[r.prompt].category)]
        found = {name: [m for m in ms if category in ("all", m.category)] for name, ms in differing.items()}
        yield row(cell, category, summarize(facts, requests, mine, found, NO_CEILING, {}))


def row(cell: Cell, category: str, speed: Speed) -> Row:
    accepted, ratio = next(iter(speed.acceptance)), next(iter(speed.ratios), None)
    equality = next(iter(speed.equality), None)
    prediction = next(iter(speed.predictions), None)
    sources = {source.source: [source.steps, source.drafted, source.accepted] for source in accepted.sources}
    return {
        "model": cell.model,
        "drafter": cell.draft,
        "policy": cell.policy,
        "category": category,
        "temperature": cell.temperature,
        "n": accepted.prompts,
        "tokens_per_step": round(accepted.tokens_per_step, 4),
        "drafted_per_step": round(accepted.drafted / accepted.steps, 4),
        "alpha": round(accepted.alpha.value, 4) if accepted.alpha.n else None,
        "ci": [round(end, 4) for end in accepted.alpha.ci or ()],
        "speedup": None if ratio is None else round(ratio.speedup.value, 4),
        "speedup_ci": None if ratio is None else [round(end, 4) for end in ratio.speedup.ci or ()],
        "predicted": None if prediction is None else round(prediction.predicted, 4),
        "c": None if prediction is None else round(prediction.draft_cost, 4),
        "idle_share": None if prediction is None else round(prediction.idle_share or 0.0, 4),
        "idle_cost": None if prediction is None else round(prediction.idle_cost or 0.0, 4),
        "sources": sources,
        "equal": None if equality is None else equality.equal / equality.n,
        "lossless": None if equality is None else equality.lossless,
    }


def table(cells: list[Cell]) -> Iterator[str]:
    for cell in cells:
        for found in (cell.record() or {"rows": []})["rows"][:1]:
            interval = " to ".join(f"{end:.2f}" for end in found["speedup_ci"] or ())
            yield (
                f"{cell.name}: alpha {found['alpha']}, {found['tokens_per_step']:.2f} tokens per step, "
                f"speedup {found['speedup']} ({interval}), predicted {found['predicted']}, equal {found['equal']}"
            )


def main() -> None:
    args = read_options(__doc__, "spec_bench.yaml")
    progress = Progress()
    WORK.mkdir(parents=True, exist_ok=True)
    every = list(cells_of(read_spec_matrix(args.matrix)))
    chosen = [cell for cell in every if re.search(args.only, cell.name)]
    if args.list:
        for cell in chosen:
            record = cell.record()
            print("to do  " if record is None else f"{record['seconds']:5.0f} s", cell.name)
        return
    bench: Bench | None = None
    for cell in chosen:
        if cell.record() is not None and not args.again:
            continue
        if bench is None or bench.subject is not cell.subject:
            bench = Bench(cell, progress)
        elif bench.draft != cell.draft:
            bench = bench.other_draft(cell)
        progress.stage(cell.name)
        atomic_write(cell.path, json.dumps(bench.record(cell)))
        gc.collect()
    progress.close()
    rows = [row for cell in every if (record := cell.record()) for row in record["rows"]]
    write_baseline(BASELINE, environment() | {"torch threads": str(torch.get_num_threads())}, rows)
    print(*table(chosen), sep="\n")


if __name__ == "__main__":
    main()
