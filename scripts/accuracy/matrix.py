"""A matrix of recipes to compare on equal terms (`eval/matrices/*.yaml`): same format, calibration text, windows."""

from pathlib import Path
from typing import Any

from pydantic import Field

from qspec.schema.problems import validate
from qspec.schema.quantization import ModelSpec, QuantSpec, Strict
from qspec.schema.recipe import CalibrationSpec
from qspec.schema.text import parse_yaml, read_text

Part = dict[str, Any]
"""Fields of a `QuantSpec`, checked when the arm is read: one that the schema refuses is a result too."""


class Contest(Strict):
    """One exported format. `base` holds for every arm; `peers` run in llm-compressor, `ours` in qspec."""

    base: Part
    peers: dict[str, Part] = Field(default_factory=dict)
    ours: dict[str, Part] = Field(default_factory=dict)

    def quantization(self, engine: str, method: str) -> QuantSpec:
        """The settings of one arm. Raises `RecipeError` for what the schema refuses."""
        own = (self.peers if engine == "llmcompressor" else self.ours)[method]
        return validate(QuantSpec, self.base | {"engine": engine} | own, method)


class Subject(Strict):
    """A model, the text it is calibrated and judged on, and what it takes part in."""

    model: str
    llama2c: tuple[str, str] | None = Field(
        default=None, description="model and tokenizer of llama2.c, in the data folder, that `model` is converted from"
    )
    calibration: CalibrationSpec
    corpora: tuple[str, ...] = Field(min_length=1)
    windows: int = Field(ge=2)
    length: int = Field(ge=16)
    seed: int = 0
    contests: dict[str, Contest] = Field(min_length=1)

    @property
    def source(self) -> ModelSpec:
        return ModelSpec(model=self.model)


def read_matrix(path: Path) -> dict[str, Subject]:
    """The subjects of a matrix file by name; raises `RecipeError` for what is no matrix."""
    data = parse_yaml(read_text(path, "matrix"), str(path))
    return {name: validate(Subject, subject, f"{path}: {name}") for name, subject in data.items()}
