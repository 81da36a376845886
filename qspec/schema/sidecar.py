"""Types of `qspec.json`, the file beside a half's `config.json`: what a reader may rely on before it looks closer."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator

from qspec.schema.quantization import MOST, Strict

NAME = "qspec.json"
VERSION: Literal[2] = 2


Format = Literal["fp8_e4m3", "int8", "int4"]
Number = Annotated[int, Field(ge=0, le=MOST)]


class SavedClip(Strict):
    """`numerics.clipping.Clip`."""

    method: Literal["absmax", "percentile", "mse"]
    percentile: float = Field(gt=0, le=100)


class SavedScheme(Strict):
    """The fields of a scheme that a config group lacks."""

    name: str = Field(min_length=1)
    weight_clip: SavedClip | None = None
    outliers: float = Field(default=0.0, ge=0, le=5)


class SavedKVPart(Strict):
    """`plan.KVPart`."""

    fmt: Format
    granularity: Literal["tensor", "head", "token_head", "channel"]
    group: int = Field(ge=1, le=1024)
    outliers: float = Field(ge=0, le=5)


class SavedKV(Strict):
    """`plan.KVScheme`."""

    format: Format
    granularity: Literal["tensor", "head", "token_head"]
    scales: Literal["calibrated", "cast", "auto"]
    key: SavedKVPart | None = None
    value: SavedKVPart | None = None
    query: Literal["tensor", "head"] | None = None
    residual: Number = 0
    skip_layers: tuple[Number, ...] = ()
    cast_layers: tuple[Number, ...] = ()


class Sidecar(Strict):
    """`schemes` by config group, to which `default` and `rules` (pattern, group or None) refer.

    head_ids: those that a draft's head is run for, rising; none: all.
    """

    format_version: Literal[2]
    schemes: dict[str, SavedScheme]
    default: str | None
    rules: tuple[tuple[str, str | None], ...]
    kv: SavedKV | None
    source: dict[str, str]
    notes: tuple[str, ...]
    down_hadamard: bool = False
    head_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @field_validator("head_ids")
    @classmethod
    def _rising(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in pairwise(ids)):
            raise ValueError("head_ids do not rise; give each once, in order")
        return ids
