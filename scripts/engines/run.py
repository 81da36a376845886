"""Ask the engines of a matrix in turns, keep every round, and print who is fastest and how far from the original.

qspec beside other CPU engines on one model: speed in turns, KL on the same text; cells of
eval/matrices/cpu_engines.yaml. Run scripts/study build_peers first. Rounds are kept in runs/bench_engines and not
measured again; the rows go to eval/baselines/cpu_engines.json. A quiet machine is needed: see "load" in the baseline.
  --only PATTERN   engines whose name holds the regular expression (and the baseline)    --again   measure those anew
  --list           engines and what is done    --threads N    --rounds N    --new N   fewer tokens, for a try
  --kl             only the distances from the original, which need no quiet machine    --speed   only the speeds
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
import json
import os
from pathlib import Path
import re
import signal
import sys
import time
from typing import Any

import torch

from qspec.errors import QspecError
from qspec.measure.bench import bandwidth
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from scripts.accuracy.compare import measure, summary
from scripts.accuracy.fidelity import Bench as Fidelity
from scripts.common import read_options, write_baseline
from scripts.engines.build_peers import fidelity_subject, installed, python_of, refusals, weights_path
from scripts.engines.cells import Cell, cells_of, requests_of
from scripts.engines.client import AskedLM, Worker
from scripts.engines.journal import WORK, Kept, distance_path, file_stem, note, read_journal
from scripts.engines.matrix import EngineMatrix, EngineSpec, read_engine_matrix
from scripts.engines.rows import Answer, Row, speed_row, table

BASELINE = Path("eval/baselines/cpu_engines.json")
WARM_UP = 4
LOADING = 240.0
"""Seconds for an engine to load, so that one that hangs takes little of a quiet hour."""


def missing(engine: EngineSpec, matrix: EngineMatrix) -> str | None:
    """Why an engine cannot be run here, None if it can."""
    known = refusals()
    if engine.peer is not None and not installed(engine.peer, matrix.peers[engine.peer]):
        return known.get(engine.peer, "is not installed: run scripts/study build_peers")
    if engine.weights is not None and not weights_path(engine.weights).exists():
        return known.get(engine.weights, f"has no weights {engine.weights}: run scripts/study build_peers")
    return None


def open_worker(name: str, matrix: EngineMatrix) -> Worker:
    engine = matrix.engines[name]
    script = Path(__file__).resolve().parent / "peers" / f"run_{engine.worker}.py"
    return Worker(name, [python_of(engine.peer), script], matrix.threads, WORK / f"{file_stem(name)}.log")


def load_options(engine: EngineSpec, matrix: EngineMatrix, model: str) -> dict[str, Any]:
    batch = max(matrix.shapes[name].batch for name in engine.shapes or matrix.shapes)
    options = engine.options | {"threads": matrix.threads, "batch": batch}
    if options.get("original"):
        options["original"] = model
    if engine.weights is not None:
        options["weights"] = str(weights_path(engine.weights))
    return options


class Comparison:
    """The engines of a run: loaded one after the other, then asked in turns. `refused`: by engine or cell key."""

    def __init__(self, matrix: EngineMatrix, progress: Progress) -> None:
        self.matrix, self._progress = matrix, progress
        self.fidelity = Fidelity(fidelity_subject(matrix), progress)
        self.refused: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def load(self, name: str) -> Worker | None:
        """A worker that answers, or None and the reason kept."""
        engine = self.matrix.engines[name]
        reason = missing(engine, self.matrix)
        if reason is not None:
            self.refused[name] = reason
            return None
        self._progress.stage(f"load {name}")
        worker = open_worker(name, self.matrix)
        try:
            facts = worker.ask(
                "load", patience=LOADING, **load_options(engine, self.matrix, self.fidelity.subject.model)
            )
        except QspecError as error:
            worker.close()
            self.refused[name] = str(error)
            return None
        self.facts[name] = dict(facts)
        return worker

    def speeds(self, cells: list[Cell], kept: Kept) -> None:
        """Warm every cell up, then ask all in turns, round by round; the first one rotates."""
        rounds = range(self.matrix.rounds)
        todo = [cell for cell in cells if any(r not in kept.get(cell.key, {}) for r in rounds)]
        requests = {
            c.shape_name: requests_of(c.shape, self.matrix.prompts, self.fidelity.model.tokenizer) for c in todo
        }
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name in dict.fromkeys(cell.name for cell in todo):
                if (worker := self.load(name)) is not None:
                    workers[name] = stack.enter_context(worker)
            live = [cell for cell in todo if cell.name in workers]
            live = [
                cell for cell in live if self._ask(workers, cell, requests, min(WARM_UP, cell.shape.new)) is not None
            ]
            jobs = [(r, live[(r + i) % len(live)]) for r in rounds for i in range(len(live))]
            for r, cell in self._progress.track(jobs, "rounds", len(jobs), "answer"):
                if cell.key in self.refused or r in kept.get(cell.key, {}):
                    continue
                answer = self._ask(workers, cell, requests, cell.shape.new)
                if answer is not None:
                    kept.setdefault(cell.key, {})[r] = answer
                    note({"key": cell.key, "round": r, "facts": self.facts[cell.name], "answer": asdict(answer)})

    def _ask(self, workers: dict[str, Worker], cell: Cell, requests: dict[str, Any], new: int) -> Answer | None:
        try:
            reply = workers[cell.name].ask(
                "generate", prompts=requests[cell.shape_name], new=new, speculation=cell.speculation_options
            )
        except QspecError as error:
            self.refused[cell.key] = str(error)
            return None
        return Answer(**reply)

    def distances(self, name: str, path: Path) -> None:
        """KL of an engine on every corpus, kept in `path`; one that cannot be had is kept as refused."""
        worker = self.load(name)
        if worker is None:
            return
        with worker:
            lm = AskedLM(worker, self.fidelity.model.arch.vocab_size, WORK / "logits.bin")
            try:
                measured = {
                    corpus: measure(lm, rows, self.fidelity.references(rows))
                    for corpus, rows in self.fidelity.corpora.items()
                }
            except QspecError as error:
                self.refused[name] = str(error)
                return
        atomic_write(path, json.dumps({"facts": self.facts[name], "corpora": measured}))


def rows_of(comparison: Comparison, cells: list[Cell], read: float | None) -> Iterator[Row]:
    """Speeds, then distances, then what was refused. read: bytes per second from memory."""
    matrix, (kept, facts) = comparison.matrix, read_journal(set())
    same = {(c.name, c.shape_name, c.speculation): kept.get(c.key, {}) for c in cells}
    for cell in cells:
        head = {"engine": cell.name, "precision": cell.engine.precision}
        case = {"speculation": cell.speculation, "shape": cell.shape_name, "batch": cell.shape.batch}
        case |= {"prompt": cell.shape.prompt, "gen": cell.shape.new}
        mine = kept.get(cell.key)
        if not mine:
            known = (comparison.refused.get(key) for key in (cell.key, cell.name))
            reason = next(filter(None, known), None) or missing(cell.engine, matrix)
            if reason:
                yield head | case | {"refused": reason}
            continue
        size = facts[cell.key]["weight_bytes"]
        ceiling = read * cell.shape.batch / size if read and cell.speculation == "none" and cell.shape.new > 1 else None
        baseline = same.get((matrix.baseline, cell.shape_name, "none"), {})
        plain = {} if cell.speculation == "none" else same[cell.name, cell.shape_name, "none"]
        head |= {"version": facts[cell.key]["version"], "weight_bytes": size}
        yield speed_row(head | case, mine, baseline, plain, ceiling)
    for name, engine in matrix.engines.items():
        path, head = distance_path(name, matrix), {"engine": name, "precision": engine.precision}
        if not path.exists() and name in comparison.refused:
            yield head | {"refused": comparison.refused[name]}
        for corpus, measured in (json.loads(path.read_bytes())["corpora"] if path.exists() else {}).items():
            yield head | {"corpus": corpus} | summary(measured)


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--kl", action="store_true")
    parser.add_argument("--speed", action="store_true")


def matrix_of(args: argparse.Namespace) -> EngineMatrix:
    matrix = read_engine_matrix(args.matrix)
    changed: dict[str, Any] = {}
    if args.new:
        shapes = {
            name: shape.model_copy(update={"new": min(args.new, shape.new)}) for name, shape in matrix.shapes.items()
        }
        changed["shapes"] = shapes
    changed |= {"rounds": args.rounds} if args.rounds else {}
    changed |= {"threads": args.threads} if args.threads else {}
    return matrix.model_copy(update=changed)


def main() -> None:
    args = read_options(__doc__, "cpu_engines.yaml", more_options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # workers are stopped, not orphaned, with this process
    matrix, progress = matrix_of(args), Progress()
    torch.set_num_threads(matrix.threads)
    WORK.mkdir(parents=True, exist_ok=True)
    every = list(cells_of(matrix))
    chosen = [cell for cell in every if cell.name == matrix.baseline or re.search(args.only, cell.name)]
    kept, _ = read_journal({cell.key for cell in chosen} if args.again and not args.kl else set())
    if args.list:
        for cell in chosen:
            print(f"{len(kept.get(cell.key, {}))} of {matrix.rounds}", cell.key)
        return
    comparison, facts = Comparison(matrix, progress), environment()
    facts |= {"started": time.strftime("%Y-%m-%d %H:%M"), "load": " ".join(f"{x:.1f}" for x in os.getloadavg())}
    read = None
    if not args.kl:
        read = bandwidth().value
        comparison.speeds(chosen, kept)
        read = max(read, bandwidth().value)
        facts |= {"memory read": f"{read / 1e9:.2f} GB/s", "threads of each engine": str(matrix.threads)}
    if not args.speed:
        for name in (name for name in matrix.engines if re.search(args.only, name) and matrix.engines[name].logits):
            path = distance_path(name, matrix)
            if args.again or not path.exists():
                comparison.distances(name, path)
    progress.close()
    rows = list(rows_of(comparison, every, read))
    write_baseline(BASELINE, facts, rows)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
