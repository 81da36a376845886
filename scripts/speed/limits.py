"""Measure speedup by batch, prompt length and candidates beside its prediction; say up to where drafts pay.

Batch x prompt x candidates of eval/matrices/speculation_limits.yaml, cells in turns with plain decoding, every repeat
with prompts of its own; the batch up to which drafts are shown to pay. Needs a quiet machine; resumes.
  --matrix FILE   --only PATTERN   --again   --threads N   --out FILE (default eval/baselines/speculation_limits.json)
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
import shutil

import torch

from qspec.kept import Kept
from qspec.nn.engines import engine_name
from qspec.numerics.speculation.speedup import pass_cost
from qspec.numerics.statistics.pareto import paying
from qspec.numerics.statistics.predictive import off
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.report.study import ratio
from qspec.tune.pieces import Json, pass_times
from qspec.tune.predict import Passes, passes_of
from scripts.common import read_options, write_baseline
from scripts.speed.journal import WORK, Study
from scripts.speed.matrix import SpeedSubject
from scripts.speed.run import Engine, studies, warm_up
from scripts.speed.study import Row

BASELINE = Path("eval/baselines/speculation_limits.json")
PASSES = 7
ROWS = (1, 2, 4, 7, 10, 16)
"""Rows of a sequence in timed passes; those between lie on straight lines."""
SHOWN = (
    *("shape", "batch", "arm", "groups", "tpot_speedup", "predicted", "within_tolerance", "tokens_per_step"),
    *("shown_to_pay_up_to_batch", "by_batch"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=BASELINE)
    parser.set_defaults(server=[], pair=None)


def passes(study: Study, engine: Engine) -> Json:
    """Seconds of the target's passes by shape, batch and rows of each sequence, kept beside the study's cells."""
    subject, seconds = study.subject, Json()
    target = {"target": engine.target(study.arms[0])}
    for shape, lengths in subject.shapes.items():
        settings = [subject.model_dump(mode="json"), shape, ROWS, environment()["cpu"], torch.get_num_threads()]

        def make(context: int = lengths.prompt) -> Json:
            return pass_times(target, ROWS, subject.batches, context, PASSES, engine.progress)

        seconds[shape] = Kept(WORK / "passes").value("passes", settings, make)["target"]
    return seconds


def predicted(rows: Sequence[Row], times: Mapping[str, Passes]) -> Iterator[Row]:
    """Rows with what a model says that knows drafts at the smallest batch and the target's passes, nothing else.

    tokens of a step x T(b, 1) / (b x seconds of a proposal + T(b, 1 + nodes)): one draft after the other.
    """
    first = {(r["arm"], r["shape"]): r for r in reversed(rows)}  # batches rise
    for row in rows:
        small, at = first[row["arm"], row["shape"]], times[row["shape"]][row["batch"]]
        if "nodes_per_step" not in small:
            yield row
            continue
        known = {count: seconds for count, (seconds, _) in at.items()}
        step = row["batch"] * small["draft_ms"] / 1000 + pass_cost(known, 1 + small["nodes_per_step"])
        foretold = round(small["tokens_per_step"] * known[1] / step, 4)
        yield row | {"predicted": foretold, "within_tolerance": not off(foretold, row["tpot_speedup"][0])}


def limits(subject: SpeedSubject, rows: Sequence[Row]) -> Iterator[Row]:
    """By arm: the largest batch at which drafts are shown to pay behind every prompt length, and the schedule of that.

    Where one group of prompts was asked there is no interval, so nothing is shown and no schedule follows: None.
    """
    for arm, spec in subject.arms.items():
        mine = [(row, ratio(row, "tpot_speedup")[1]) for row in rows if row["arm"] == arm and spec.draft is not None]
        if not mine:
            continue
        if all(gain.few for _, gain in mine):
            yield {"arm": arm, "shown_to_pay_up_to_batch": None, "by_batch": None}
            continue
        lows = {
            batch: [gain.ci[0] if gain.ci else 0.0 for row, gain in mine if row["batch"] == batch]
            for batch in subject.batches
        }
        complete = {b: min(known) if len(known) == len(subject.shapes) else 0.0 for b, known in lows.items()}
        last, by_batch = paying(complete, spec.policy.longest)
        yield {"arm": arm, "shown_to_pay_up_to_batch": last, "by_batch": by_batch}


def main() -> None:
    args = read_options(__doc__, "speculation_limits.yaml", add_options)
    WORK.mkdir(parents=True, exist_ok=True)
    progress, rows = Progress(), list[Row]()
    facts = environment() | {"torch threads": str(torch.get_num_threads())}
    if args.list:
        print(*(f"{len(study.kept())} kept {study.name}" for study in studies(args)), sep="\n")
        return
    if args.again:
        shutil.rmtree(WORK / "passes", ignore_errors=True)
    for study in studies(args):
        if args.again:
            shutil.rmtree(study.folder, ignore_errors=True)
        engine = Engine(study.subject, progress)
        times = {shape: passes_of(at) for shape, at in passes(study, engine).items()}
        facts["engine"] = engine_name(engine.target(study.arms[0]))
        warm_up(study.subject, study.arms, engine.measure)
        study.run(engine.measure, facts["engine"], progress)
        foretold = list(predicted(list(study.rows(None)), times))
        rows += [*foretold, *limits(study.subject, foretold)]
    progress.close()
    write_baseline(args.out, facts, rows)
    for row in rows:
        print({key: row[key] for key in SHOWN if key in row})


if __name__ == "__main__":
    main()
