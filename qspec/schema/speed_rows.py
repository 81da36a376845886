"""A speed study's file, as `scripts/study speed` writes it: arms by lengths and batch, and their largest batches."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from qspec.errors import IntegrityError
from qspec.schema.results import Record

Spread = tuple[float, float, float]
"""Median and quartiles."""
Ratio = tuple[float] | tuple[float, float, float]
"""Geometric mean, and its 95 % interval where there are several groups of prompts."""


class TimedRow(Record):
    """An arm at one pair of lengths and one batch. `target`: the model, as a recipe names it; sizes in MB; ratios: over
    the first arm, where it was timed.

    `groups` of different prompts are behind the ratios. None: all repeats asked the same ones, which is one group, and
    says nothing of other prompts.
    `engine`: `qspec`, or `server`, which says nothing of what it grew by.
    """

    model: str
    arm: str
    shape: str
    batch: int = Field(ge=1)
    prompt: int
    new: int
    engine: str
    repeats: int
    groups: int | None = None
    ttft_s: Spread
    ttft_worst_s: float
    within_ttft: bool
    tpot_ms: Spread
    tokens_s: Spread
    speedup: Ratio | None = None
    tpot_speedup: Ratio | None = None
    grown_mb: float
    weights_mb: float
    draft_mb: float
    synthetic: float | None = None
    target: str | None = None
    tokens_per_step: float | None = None
    drafted_per_step: float | None = None
    nodes_per_step: float | None = None
    draft_ms: float | None = None
    ceiling_tpot_ms: float | None = None
    of_ceiling: float | None = None


class LargestRow(Record):
    """The largest batch that was tried whose worst first token came within the limit; 0: none did."""

    model: str
    arm: str
    shape: str
    ttft_limit_s: float
    largest_batch: int = Field(ge=0)


class SpeedRows(Record):
    """The file. `environment`: where it was measured."""

    environment: dict[str, str]
    rows: Annotated[tuple[TimedRow | LargestRow, ...], Field(min_length=1)]

    @classmethod
    def read(cls, path: Path) -> "SpeedRows":
        """Raises `IntegrityError` when the file is not one."""
        fix = "give what scripts/study speed wrote to --out"
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise IntegrityError(str(path), f"cannot be read ({error.strerror})", fix) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join(map(str, first["loc"])) or "the whole file"
            raise IntegrityError(str(path), f"is no speed study ({at}: {first['msg']})", fix) from error
