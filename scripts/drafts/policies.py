"""Ask every draft under every policy of a matrix in turns, keep each prompt, and print how drafts and policies do.

Drafts and draft-length policies on Spec-Bench's prompts: tokens per step, acceptance and speedup of
eval/matrices/spec_bench.yaml. Plain decoding and every draft under every policy answer each prompt in turns. Prompts
are kept in runs/bench_spec, one of each category after the other, and not asked again; the rows go to
eval/baselines/<matrix>.json.
  --matrix FILE    another matrix, such as eval/matrices/eagle3.yaml
  --only PATTERN   subjects of the matrix whose name holds the regular expression    --again   begin anew
  --list           what is kept    --rows   rows of what is kept, ask nothing    --threads N
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby
import json
from pathlib import Path
import re
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qspec.measure.arm import Arm, Run, TokenizedPrompt
from qspec.measure.arms import load_originals
from qspec.measure.bench import find_mismatches, load_requests, measure
from qspec.measure.stats import ArmFacts, summarize
from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.pair.drafters.registry import Drafters, draft_policy, kind_of
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.quantization.job import Calibration, quantize_model
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schema.results import Measurement, Mismatch, Speed
from qspec.speculation.types import Drafter, Generation, StepRecord
from scripts.common import digest, read_options, write_baseline
from scripts.drafts.matrix import SpecSubject, read_spec_matrix

WORK = Path("runs/bench_spec")
BASELINES = Path("eval/baselines")
NO_CEILING = Measurement(metric="memory read", value=float("nan"), unit="B/s", n=0)
PLAIN = "plain"
Row = dict[str, Any]
Case = tuple[float, int, int]
"""Temperature, repeat, prompt."""


@dataclass(frozen=True)
class Kept:
    """What every arm answered to one prompt, and greedy answers that differ from the plain one."""

    category: str
    engine: str
    runs: list[Run]
    mismatches: list[tuple[str, Mismatch]]

    def line(self) -> str:
        runs = [asdict(run) for run in self.runs]
        for run in runs:
            run["generation"]["steps"] = [list(step.values()) for step in run["generation"]["steps"]]
        differing = [(arm, m.model_dump(mode="json")) for arm, m in self.mismatches]
        head = {"category": self.category, "engine": self.engine}
        return json.dumps(head | {"runs": runs, "mismatches": differing}) + "\n"

    @classmethod
    def read(cls, line: str) -> "Kept":
        entry = json.loads(line)
        for run in entry["runs"]:
            fields = run["generation"]
            run["generation"] = Generation(**fields | {"steps": [StepRecord(*values) for values in fields["steps"]]})
        differing = [(arm, Mismatch(**m)) for arm, m in entry["mismatches"]]
        return cls(entry["category"], entry["engine"], [Run(**run) for run in entry["runs"]], differing)


@dataclass(frozen=True)
class Comparison:
    """A subject of the matrix: its target, and all drafts and policies beside plain decoding."""

    name: str
    subject: SpecSubject

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """Draft and policy of each arm."""
        return {f"{d}, {p}": (d, p) for d in self.subject.drafts for p in self.subject.policies}

    @property
    def path(self) -> Path:
        """Where answers are kept: by all that decides them, so that a changed setting begins anew."""
        return WORK / f"{self.name}-{digest(self.subject.model_dump(mode='json'))}.jsonl"

    def kept(self) -> dict[Case, Kept]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        entries = [Kept.read(line) for line in lines]
        return {case_of(one.runs[0]): one for one in entries}


def case_of(run: Run) -> Case:
    return run.temperature, run.repeat, run.prompt


class Bench:
    """The models of a comparison in memory: the target, its prompts, and the drafts'."""

    def __init__(self, comparison: Comparison, progress: Progress) -> None:
        self.comparison, self._progress = comparison, progress
        self._recipe = comparison.subject.recipe(*next(iter(comparison.cells.values())))
        self._model = load_originals(self._recipe, progress).target
        self._drafters = Drafters(self._model)

    @cached_property
    def target(self) -> AnyDecoder:
        return self._decoder(self._model, self._recipe.target.quantization)

    @property
    def eos_ids(self) -> Collection[int]:
        return self._model.arch.eos_ids

    def requests(self) -> list[TokenizedPrompt]:
        """One of each category after the other, so that a run that was cut short is balanced."""
        subject = self.comparison.subject
        room = subject.max_length - subject.benchmark.max_new_tokens
        requests = load_requests(subject.benchmark, self._model.tokenizer, room)[0]
        rank = {id(r): i for _, same in groupby(requests, lambda r: r.category) for i, r in enumerate(same)}
        return sorted(requests, key=lambda r: rank[id(r)])

    def arms(self) -> dict[str, Arm]:
        arms = {PLAIN: Arm(self.target)}
        for name, (draft, policy) in self.comparison.cells.items():
            recipe = self.comparison.subject.recipe(draft, policy)
            arms[name] = Arm(self.target, self.drafter(recipe), draft_policy(recipe.speculation.draft_length))
        return arms

    def run(self) -> None:
        """Ask what is not kept yet; a prompt is kept when every arm has answered it."""
        arms, requests, eos_ids = self.arms(), self.requests(), self.eos_ids
        runs = measure(arms, requests, self._recipe, eos_ids, self._progress, self.comparison.kept())
        with self.comparison.path.open("a", encoding="utf-8") as file:
            for (_, _, prompt), group in groupby(runs, case_of):
                same = list(group)
                by_arm = find_mismatches(arms, facts(arms), requests, same)
                differing = [(name, m) for name, ms in by_arm.items() for m in ms]
                file.write(Kept(requests[prompt].category, engine_name(self.target), same, differing).line())
                file.flush()

    def drafter(self, recipe: Recipe) -> Drafter:
        return self._drafters.new(recipe.draft, partial(self._open_draft, recipe))

    def _open_draft(self, recipe: Recipe) -> AnyDecoder:
        model, quantization = kind_of(recipe.draft).original(self._model), recipe.draft.quantized
        assert model is not None
        assert quantization is not None
        return self._decoder(model, quantization)

    def _decoder(self, model: LoadedModel, spec: QuantSpec) -> AnyDecoder:
        with self._quantized(model, spec) as quantized:
            return open_decoder(quantized, max_length=min(self.comparison.subject.max_length, model.arch.max_positions))

    @contextmanager
    def _quantized(self, model: LoadedModel, spec: QuantSpec) -> Iterator[QuantizedModel]:
        """A model that lies in files which vanish when the block ends."""
        subject = self.comparison.subject
        text = Calibration(self._recipe.calibration, self._model.tokenizer, subject.seed, self._progress)
        with TemporaryDirectory(dir=WORK) as work:
            yield quantize_model(model, spec, self._recipe.fusion, text, Path(work), torch.float32)


def facts(names: Sequence[str] | Mapping[str, Any]) -> dict[str, ArmFacts]:
    return {name: ArmFacts(speculative=name != PLAIN, plain=PLAIN) for name in names}


def rows_of(comparison: Comparison) -> Iterator[Row]:
    """By temperature, draft and policy: over all prompts, then by category."""
    kept = comparison.kept().values()
    by_prompt = {one.runs[0].prompt: one.category for one in kept}
    requests = [TokenizedPrompt(by_prompt.get(prompt, ""), []) for prompt in range(max(by_prompt, default=-1) + 1)]
    categories = dict.fromkeys(["all", *by_prompt.values()])
    for temperature in dict.fromkeys(one.runs[0].temperature for one in kept):
        at_temperature = [one for one in kept if one.runs[0].temperature == temperature]
        for name, (draft, policy) in comparison.cells.items():
            for category in categories:
                mine = [one for one in at_temperature if category in ("all", one.category)]
                runs = [run for one in mine for run in one.runs if run.arm in (PLAIN, name)]
                differing = [m for one in mine for arm, m in one.mismatches if arm == name]
                speed = summarize(facts([PLAIN, name]), requests, runs, {name: differing}, NO_CEILING, {})
                head = {
                    "model": comparison.name,
                    "engine": mine[0].engine,
                    "drafter": draft,
                    "policy": policy,
                    "category": category,
                }
                yield head | {"temperature": temperature} | row(speed)


def row(speed: Speed) -> Row:
    accepted, ratio = next(iter(speed.acceptance)), next((r for r in speed.ratios if r.arm != PLAIN), None)
    equality = next(iter(speed.equality), None)
    prediction = next(iter(speed.predictions), None)
    sources = {source.source: [source.steps, source.drafted, source.accepted] for source in accepted.sources}
    return {
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


def table(rows: Sequence[Row]) -> Iterator[str]:
    for row in (row for row in rows if row["category"] == "all"):
        interval = " to ".join(f"{end:.2f}" for end in row["speedup_ci"] or ())
        yield (
            f"{row['model']}, {row['drafter']}, {row['policy']}, T {row['temperature']:g}: "
            f"alpha {row['alpha']}, {row['tokens_per_step']:.2f} tokens per step, "
            f"speedup {row['speedup']} ({interval}), predicted {row['predicted']}, "
            f"equal {row['equal']}, {row['n']} prompts"
        )


def main() -> None:
    args = read_options(__doc__, "spec_bench.yaml", lambda p: p.add_argument("--rows", action="store_true"))
    progress = Progress()
    WORK.mkdir(parents=True, exist_ok=True)
    every = [Comparison(name, subject) for name, subject in read_spec_matrix(args.matrix, SpecSubject).items()]
    chosen = [comparison for comparison in every if re.search(args.only, comparison.name)]
    if args.list:
        for comparison in chosen:
            print(
                f"{len(comparison.kept())} prompts kept,", len(comparison.cells), "arms beside plain", comparison.name
            )
        return
    for comparison in () if args.rows else chosen:
        if args.again:
            comparison.path.unlink(missing_ok=True)
        Bench(comparison, progress).run()
    progress.close()
    rows = [row for comparison in every for row in rows_of(comparison)]
    baseline = BASELINES / f"{args.matrix.stem}.json"
    write_baseline(baseline, environment() | {"torch threads": str(torch.get_num_threads())}, rows)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
