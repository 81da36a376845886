"""What a speed study keeps: every arm of every cell, under a digest of all that decides it; and the rows of that."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
import json
from pathlib import Path
from typing import Any

from qspec.planning.planned import PlannedPair, resolve
from qspec.progress import Progress
from scripts.common import digest
from scripts.speed.matrix import Lengths, SpeedSubject
from scripts.speed.study import Row, Timed, ceiling, row

WORK = Path("runs/bench_speed")
Measure = Callable[[str, Lengths, int, int], Timed]
"""By arm, lengths, batch and repeat: every repeat asks prompts of its own, since the same ones would say the same."""


@dataclass(frozen=True)
class Cell:
    shape: str
    batch: int
    repeat: int


@dataclass(frozen=True)
class Study:
    """A subject and what is kept of it: a line for every arm of a cell, under a digest of all that decides it."""

    name: str
    subject: SpeedSubject
    arms: tuple[str, ...]
    place: str

    @property
    def path(self) -> Path:
        return WORK / f"{self.name}.jsonl"

    @property
    def cells(self) -> list[Cell]:
        s = self.subject
        return [Cell(shape, batch, i) for i in range(s.repeats) for shape in s.shapes for batch in s.batches]

    def key(self, arm: str, cell: Cell) -> str:
        s = self.subject
        told = [s.prompts, s.arms[arm], s.shapes[cell.shape]]
        fixed = [self.place, s.model, s.seed, cell.batch, {"prompts of repeat": cell.repeat}]
        return digest([*fixed, *(part.model_dump(mode="json") for part in told)])

    def entries(self) -> list[dict[str, Any]]:
        """Lines that hold under the present settings."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        known = {(self.key(arm, cell), arm, cell) for arm in self.subject.arms for cell in self.cells}
        return [e for e in map(json.loads, lines) if (e["key"], e["arm"], Cell(**e["cell"])) in known]

    def kept(self) -> dict[tuple[str, Cell], Timed]:
        return {(e["arm"], Cell(**e["cell"])): Timed(**e["run"]) for e in self.entries()}

    @property
    def todo(self) -> list[tuple[str, Cell]]:
        """Arms of each cell in turns, the first one rotating, without what is kept."""
        kept, n = self.kept(), len(self.arms)
        every = [(self.arms[(cell.repeat + i) % n], cell) for cell in self.cells for i in range(n)]
        return [one for one in every if one not in kept]

    def run(self, measure: Measure, engine: str, progress: Progress) -> None:
        todo = self.todo
        for arm, cell in progress.track(todo, self.name, len(todo), "cell"):
            found = measure(arm, self.subject.shapes[cell.shape], cell.batch, cell.repeat)
            told = {"cell": asdict(cell), "arm": arm, "key": self.key(arm, cell), "engine": engine}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told | {"run": asdict(found)}) + "\n")

    def rows(self, speed: float | None) -> Iterator[Row]:
        """By shape, batch and arm; speed: bytes per second of this machine, None: the device's data sheet."""
        kept, subject = self.kept(), self.subject
        for shape, lengths in subject.shapes.items():
            for batch in subject.batches:
                by_arm: dict[str, dict[int, Timed]] = {arm: {} for arm in subject.arms}
                for (arm, cell), run in kept.items():
                    if (cell.shape, cell.batch) == (shape, batch):
                        by_arm[arm][cell.repeat] = run
                base = next(iter(by_arm.values()))
                for arm, mine in by_arm.items():
                    if mine:
                        head = {"model": self.name, "arm": arm, "shape": shape, "batch": batch}
                        head |= {"prompt": lengths.prompt, "new": lengths.new, "engine": self.place}
                        head |= {"target": subject.model}
                        found = head | row(mine, base, subject.ttft_s)
                        yield found | self._against_ceiling(arm, found, lengths, speed)

    def _against_ceiling(self, arm: str, found: Row, lengths: Lengths, speed: float | None) -> Row:
        spec, planned = self.subject.arms[arm], self.planned(arm)
        sheet = planned.sheet.bandwidth_tb_s
        rate = speed if speed is not None else sheet and sheet * 1e12
        drafting = planned.drafting if spec.draft is not None else None
        size = {"weights_mb": round(planned.target.bytes.resident / 1e6, 1), "synthetic": spec.synthetic}
        size["draft_mb"] = round(drafting.resident / 1e6, 1) if drafting else 0.0
        if not rate:
            return size
        draft_bytes = drafting.cost.weight_bytes if drafting else 0.0
        least = ceiling(planned.target.bytes.cost, rate, found["batch"], lengths, draft_bytes, found)
        return size | {"ceiling_tpot_ms": round(least, 4), "of_ceiling": round(least / found["tpot_ms"][0], 3)}

    def planned(self, arm: str) -> PlannedPair:
        return resolve(self.subject.recipe(arm))
