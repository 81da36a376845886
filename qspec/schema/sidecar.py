"""Types of `qspec.json`, the file beside a half's `config.json`: what a reader may rely on before it looks closer."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from qspec.schema.quantization import Strict

VERSION: Literal[1] = 1


class SavedScheme(Strict):
    """What a config group cannot say of its scheme."""

    name: str = Field(min_length=1)
    weight_clip: dict[str, Any] | None = None
    activation_clip: dict[str, Any] | None = None
    outliers: float = Field(default=0.0, ge=0, le=5)


class Sidecar(Strict):
    """`schemes` by config group, to which `default` and `rules` (pattern, group or None) refer.

    head_ids: those that a draft's head is run for, rising; none: all.
    """

    format_version: Literal[1]
    schemes: dict[str, SavedScheme]
    default: str | None
    rules: tuple[tuple[str, str | None], ...]
    kv: dict[str, Any] | None
    source: dict[str, str]
    merged: tuple[tuple[str, ...], ...]
    folded_norms: tuple[str, ...]
    notes: tuple[str, ...]
    down_hadamard: bool = False
    head_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @field_validator("head_ids")
    @classmethod
    def _rising(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in pairwise(ids)):
            raise ValueError("head_ids do not rise; give each once, in order")
        return ids
