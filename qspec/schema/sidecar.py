"""Types of `qspec.json`, the file beside a half's `config.json`: what a reader may rely on before it looks closer."""

from typing import Any, Literal

from pydantic import Field

from qspec.schema.quantization import Strict

VERSION: Literal[1] = 1


class SavedScheme(Strict):
    """What a config group cannot say of its scheme."""

    name: str = Field(min_length=1)
    weight_clip: dict[str, Any] | None = None
    activation_clip: dict[str, Any] | None = None
    outliers: float = Field(default=0.0, ge=0, le=5)


class Sidecar(Strict):
    """`schemes` by config group, to which `default` and `rules` (pattern, group or None) refer."""

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
