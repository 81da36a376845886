"""Check and time the engine on CUDA, on a machine with torch, triton and this checkout. See `scripts/gpu_bench`."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
import gc
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
from time import monotonic
from typing import Any

import torch

from qspec.provenance import atomic_write, environment
from scripts.gpu import ceilings as gpu_ceilings, cells as gpu_cells, checks as gpu_checks, models as gpu_models
from scripts.gpu.cells import Cell, Rig, Settings
from scripts.gpu.goals import goals

Row = dict[str, Any]
PARTS = ("checks", "ceilings", "8B", "weights", "70B")
LENGTHS = (2000, 200), (512, 128)
BATCHES = (1, 8, 32)
LATER = Cell(2000, 200, 64), Cell(512, 128, 128)
TEXTS = (
    "What is gravity?",
    "Write a short story about a lighthouse keeper.",
    "List five tips for better sleep.",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a string.",
    "What is the capital of France, and what is it known for?",
    "Summarize the plot of Romeo and Juliet.",
    "How do I make tomato soup?",
)
USABLE = 0.9
"""Share of the device's memory that weights and caches may take; the rest is activations and graphs."""
FIRST_GUESS = 30.0
"""Seconds that a cell is expected to take before one was timed."""


@dataclass
class Journal:
    """Rows so far: on disk, whole, after every one."""

    path: Path
    facts: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()
        print(line(row), flush=True)

    def write(self) -> None:
        text = ",\n".join(
            f"  {json.dumps(row)}" for row in [*self.rows, *({"part": "goals", **g} for g in goals(self.rows))]
        )
        atomic_write(self.path, f'{{"environment": {json.dumps(self.facts, indent=1)},\n"rows": [\n{text}\n]}}\n')


def main() -> None:
    options = parse(sys.argv[1:])
    if options.write_weights:
        gpu_models.write_weights(options.weights, options.write_weights, list(TEXTS))
        return
    device = torch.device(options.device)
    settings = Settings(2, 3) if options.dry else Settings()
    journal = Journal(options.out, facts(device, options, settings))
    if options.resume:
        kept = json.loads(options.out.read_text(encoding="utf-8"))
        journal = Journal(options.out, kept["environment"], [row for row in kept["rows"] if row["part"] != "goals"])
    bench = Bench(device, options, settings, journal)
    for i, part in enumerate(options.parts):
        try:
            bench.run(part)
        except Exception as error:  # noqa: BLE001  what is done is kept, and the other parts have their own chance
            journal.add({"part": part, "skipped": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})
            if gpu_checks.lost_device(error):
                restart(options, options.parts[i + 1 :], bench.left)
    journal.write()
    for goal in goals(journal.rows):
        print(goal_line(goal))
    print(json.dumps(summary(journal)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, for the way and not for the numbers")
    parser.add_argument("--minutes", type=float, default=8.0, help="cells that would end later are skipped by name")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_bench.json"))
    parser.add_argument("--weights", type=Path, help="a file for true acceptance (--write-weights makes it)")
    parser.add_argument(
        "--write-weights", metavar="MODEL", help="make --weights, on a machine with all of qspec; then end"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out")
    options = parser.parse_args(arguments)
    if odd := set(options.parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(odd))}: choose of {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --dry shows the way without one")
    if options.device == "cpu" and not (options.dry or options.write_weights):
        parser.error("--device cpu: only with --dry, large shapes take hours")
    if options.write_weights and options.weights is None:
        parser.error("--write-weights: name the file with --weights")
    return options


class Bench:
    """The parts, in what is left of the time."""

    def __init__(self, device: torch.device, options: argparse.Namespace, settings: Settings, journal: Journal) -> None:
        self._device, self._options, self._settings, self._journal = device, options, settings, journal
        self._end = monotonic() + 60 * options.minutes
        self._ceilings: gpu_ceilings.Ceilings | None = None
        self._guess = FIRST_GUESS

    @property
    def left(self) -> float:
        """Seconds."""
        return float(self._end - monotonic())

    def run(self, part: str) -> None:
        if part == "checks":
            for row in gpu_checks.checks(self._device):
                self._journal.add(row)
        elif part == "ceilings":
            self._measured()
        elif part == "weights":
            self._acceptance()
        else:
            self._target(part)

    def _measured(self) -> gpu_ceilings.Ceilings:
        """Ceilings are measured when they are first needed."""
        if self._ceilings is None:
            self._ceilings = gpu_ceilings.ceilings(self._device, self._options.dry)
            self._journal.add({"part": "ceilings", "name": "ceilings", **asdict(self._ceilings)})
        return self._ceilings

    def _target(self, name: str) -> None:
        target, draft = gpu_models.shape(name), gpu_models.shape("1B")
        kinds = list(gpu_cells.LOOPS)
        size, memory = gpu_models.weight_bytes(target, "BF16"), self._memory()
        if size > USABLE * memory:
            kinds.remove("BF16")
            reason = f"{size / 1e9:.0f} GB of weights, and caches, in {USABLE:.0%} of {memory / 1e9:.0f} GB"
            for arm in (arm for arm in gpu_cells.ARMS if arm.loop == "BF16"):
                self._journal.add({"part": "decode", "target": name, "arm": arm.name, "skipped": reason})
        lengths = [prompt for prompt, _ in LENGTHS]
        cells = [*(Cell(*length, batch) for length in LENGTHS for batch in BATCHES), *LATER]
        if self._options.dry:
            target, draft = gpu_models.small(2), gpu_models.small(1)
            lengths, cells = [40], [Cell(40, 8, 1), Cell(40, 8, 2)]
        rig = Rig(name, target, draft, kinds, self._device, self._measured(), self._settings)
        for length in lengths:
            self._cell(f"{name} prompt {length}", partial(rig.prefill, length))
        for cell in cells:
            label = f"{name} {cell.prompt}-{cell.new} batch {cell.batch}"
            self._cell(label, partial(rig.decode, cell), rig.cache_bytes(cell))

    def _cell(self, name: str, measure: Callable[[], list[Row]], size: float = 0.0) -> None:
        """One cell, if there is time, and memory for caches of `size` bytes; its rows, or why there are none."""
        reason, free = "", self._free()
        if self.left < self._guess:
            reason = f"time: {max(self.left, 0):.0f} s left, about {self._guess:.0f} s needed"
        elif size > USABLE * free:
            reason = f"memory: {size / 1e9:.0f} GB of caches, {free / 1e9:.0f} GB are free"
        if reason:
            self._journal.add({"part": "cells", "name": name, "skipped": reason})
            return
        begin = monotonic()
        try:
            for row in measure():
                self._journal.add(row)
        except torch.OutOfMemoryError as error:
            self._journal.add({"part": "cells", "name": name, "skipped": f"memory: {str(error).partition('.')[0]}"})
        self._guess = 1.2 * (monotonic() - begin)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _acceptance(self) -> None:
        if self._options.weights is None:
            reason = "no --weights: acceptance on real weights was not measured"
            self._journal.add({"part": "acceptance", "skipped": reason})
            return
        kept = gpu_models.read_weights(self._options.weights)
        rows = gpu_cells.acceptance(kept, 8 if self._options.dry else 128, self._device)
        self._cell("acceptance on real weights", lambda: list(rows))

    def _memory(self) -> float:
        """Bytes of the device; of a dry run those of an H200, so that the same rows are skipped."""
        if self._device.type == "cuda":
            return float(torch.cuda.get_device_properties(self._device).total_memory)
        return 150e9

    def _free(self) -> float:
        return float(torch.cuda.mem_get_info()[0]) if self._device.type == "cuda" else self._memory()


def restart(options: argparse.Namespace, parts: list[str], left: float) -> None:
    """A process whose device has failed computes nothing more: another one goes on with the other parts."""
    if not parts:
        return
    again = [
        "--device",
        options.device,
        "--parts",
        ",".join(parts),
        "--minutes",
        str(left / 60),
        "--out",
        str(options.out),
    ]
    again += ["--resume", *(["--dry"] if options.dry else [])]
    again += ["--weights", str(options.weights)] if options.weights else []
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, sys.argv[0], *again])


def facts(device: torch.device, options: argparse.Namespace, settings: Settings) -> dict[str, str]:
    """The machine, its clocks now, and how things were timed."""
    try:
        import triton

        version = str(triton.__version__)
    except ImportError:
        version = "none"
    known = {**environment(), "triton": version, "device": str(device), "repeats": str(settings.repeats)}
    known |= {
        "steps": str(settings.steps),
        "alpha": f"{gpu_cells.ALPHA}, synthetic",
        "weights": "random, made on the device",
    }
    if options.dry:
        known["dry"] = "tiny shapes: these numbers say nothing about speed"
    names = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    if device.type == "cuda" and (tool := shutil.which("nvidia-smi")):
        done = subprocess.run(
            [tool, f"--query-gpu={names}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        known |= dict(zip(names.split(","), done.stdout.strip().partition("\n")[0].split(", "), strict=False))
    return known


def line(row: Row) -> str:
    """A row for people."""
    name = row.get("name") or " ".join(str(row[key]) for key in ("target", "arm") if key in row)
    where = f" {row['prompt']}-{row.get('new', 0)} batch {row['batch']}" if "prompt" in row else ""
    if "skipped" in row:
        return f"{row['part']:10} {name}{where}: skipped, {row['skipped']}"
    return f"{row['part']:10} {name}{where}: {', '.join(_facts(row))}"


def _facts(row: Row) -> Iterator[str]:
    if row["part"] == "checks":
        yield f"{'ok' if row['ok'] else 'WRONG'}, error {row['error']:.2g} of {row['tolerance']:.2g}"
        if "raised" in row:
            yield row["raised"].partition("\n")[0]
    elif row["part"] == "ceilings":
        yield f"read {row['read'] / 1e12:.2f} TB/s, copy {row['copy'] / 1e12:.2f} TB/s"
        for name, rate in row["products"].items():
            yield f"{name} {rate / 1e12:.0f} TFLOPS" if rate else f"{name} none"
    elif row["part"] == "acceptance":
        yield f"alpha {row['alpha']:.3f}, {row['tokens_per_step']:.2f} tokens a step, {row['tokens_s']:.0f} tokens/s"
    else:
        speed, ratio = row["tokens_s"], row["speedup"]
        if "ttft_ms" in row:
            yield f"first token {row['ttft_ms']['median']:.1f} ms"
        yield f"{speed['median']:.0f} tokens/s ({speed['low']:.0f} to {speed['high']:.0f})"
        yield f"{ratio['median']:.2f}x {row['over']}, {row['of_ceiling']:.0%} of the ceiling"
        if row.get("drafts"):
            yield f"{row['drafts']} drafts, {row['tokens_per_step']:.2f} tokens a step (synthetic)"


def goal_line(goal: Row) -> str:
    verdict = {True: "MET", False: "NOT MET", None: "not measured"}[goal["met"]]
    worst = "" if goal["found"] is None else f" {goal['found']:.2f}"
    return f"goal: {goal['goal']} at least {goal['least']}:{worst} {verdict} ({goal['where']})"


def summary(journal: Journal) -> Row:
    """All in one line that a log's tail holds; the file has every number."""
    checks = [row for row in journal.rows if row["part"] == "checks" and "skipped" not in row]
    timed = [row for row in journal.rows if row["part"] in ("decode", "prefill") and "skipped" not in row]
    keys = ("target", "arm", "prompt", "new", "batch", "drafts")
    return {
        "file": str(journal.path),
        "environment": {
            key: journal.facts[key] for key in ("gpu", "torch", "triton", "device") if key in journal.facts
        },
        "checks": {"n": len(checks), "wrong": [row["name"] for row in checks if not row["ok"]]},
        "goals": [[g["goal"], g["least"], g["found"], g["met"]] for g in goals(journal.rows)],
        "skipped": [row.get("name", row.get("arm", row["part"])) for row in journal.rows if "skipped" in row],
        "rows": [
            [
                *(row.get(key) for key in keys),
                *(round(row[key]["median"], 3) for key in ("tokens_s", "speedup")),
                round(row["of_ceiling"], 3),
            ]
            for row in timed
        ],
    }


if __name__ == "__main__":
    main()
