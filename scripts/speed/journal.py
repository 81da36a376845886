"""What a speed study keeps: every arm of every cell, under a digest of all that decides it; and the rows of that."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from qspec.kept import Kept
from qspec.planning.planned import PlannedPair, resolve
from qspec.progress import Progress
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
    """A subject and what is kept of it: every arm of a cell, under a digest of all that decides it."""

    name: str
    subject: SpeedSubject
    arms: tuple[str, ...]
    place: str

    @property
    def folder(self) -> Path:
        return WORK / self.name

    @property
    def cells(self) -> list[Cell]:
        s = self.subject
        return [Cell(shape, batch, i) for i in range(s.repeats) for shape in s.shapes for batch in s.batches]

    def key(self, arm: str, cell: Cell) -> list[Any]:
        s = self.subject
        settings = [s.prompts, s.arms[arm], s.shapes[cell.shape]]
        fixed = [self.place, s.model, s.seed, asdict(cell), arm]
        return [*fixed, *(part.model_dump(mode="json") for part in settings)]

    def entries(self) -> dict[tuple[str, Cell], dict[str, Any]]:
        """What is kept under the present settings: how an arm did in a cell, and in which engine."""
        kept, every = Kept(self.folder), product(self.subject.arms, self.cells)
        return {one: entry.value for one in every if (entry := kept.find("cell", self.key(*one)))}

    def kept(self) -> dict[tuple[str, Cell], Timed]:
        return {one: Timed(**entry["run"]) for one, entry in self.entries().items()}

    @property
    def todo(self) -> list[tuple[str, Cell]]:
        """Arms of each cell in turns, the first one rotating, without what is kept."""
        kept, n = self.kept(), len(self.arms)
        every = [(self.arms[(cell.repeat + i) % n], cell) for cell in self.cells for i in range(n)]
        return [one for one in every if one not in kept]

    def run(self, measure: Measure, engine: str, progress: Progress) -> None:
        todo, kept = self.todo, Kept(self.folder)
        for arm, cell in progress.track(todo, self.name, len(todo), "cell"):
            shape = self.subject.shapes[cell.shape]
            make = partial(measure, arm, shape, cell.batch, cell.repeat)
            kept.value("cell", self.key(arm, cell), lambda: {"engine": engine, "run": asdict(make())})  # noqa: B023

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
                        measured = head | row(mine, base, subject.ttft_s)
                        yield measured | self._against_ceiling(arm, measured, lengths, speed)

    def _against_ceiling(self, arm: str, measured: Row, lengths: Lengths, speed: float | None) -> Row:
        spec, planned = self.subject.arms[arm], self.planned(arm)
        sheet = planned.sheet.bandwidth_tb_s
        rate = speed if speed is not None else sheet and sheet * 1e12
        drafting = planned.drafting if spec.draft is not None else None
        size = {"weights_mb": round(planned.target.bytes.resident / 1e6, 1), "synthetic": spec.synthetic}
        size["draft_mb"] = round(drafting.resident / 1e6, 1) if drafting else 0.0
        if not rate:
            return size
        draft_bytes = drafting.cost.weight_bytes if drafting else 0.0
        least = ceiling(planned.target.bytes.cost, rate, measured["batch"], lengths, draft_bytes, measured)
        return size | {"ceiling_tpot_ms": round(least, 4), "of_ceiling": round(least / measured["tpot_ms"][0], 3)}

    def planned(self, arm: str) -> PlannedPair:
        return resolve(self.subject.recipe(arm))
