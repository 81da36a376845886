"""A matrix of CPU engines to compare on one model: who runs what, on which prompts (`matrices/cpu_engines.yaml`)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from qspec.schema.problems import validate
from qspec.schema.quantization import QuantSpec, Strict
from qspec.schema.text import parse_yaml, read_text

Options = dict[str, Any]


class Peer(Strict):
    """Packages of an environment of its own, then those to take out of it again."""

    packages: tuple[str, ...] = Field(min_length=1)
    remove: tuple[str, ...] = ()


class Weights(Strict):
    """The model in one engine's format. `format`: a dtype, llama.cpp's or OpenVINO's or CTranslate2's name of it."""

    kind: Literal["float", "qspec", "gguf", "openvino", "ctranslate2"]
    format: str = ""
    quantization: QuantSpec | None = Field(default=None, description="kind qspec only")

    @model_validator(mode="after")
    def _says_how(self) -> "Weights":
        if (self.kind == "qspec") != (self.quantization is not None):
            raise ValueError(f"kind {self.kind}: quantization belongs to kind qspec, all others give a format")
        if (self.kind == "qspec") == bool(self.format):
            raise ValueError(f"kind {self.kind} with format {self.format!r}; kinds other than qspec need a format")
        return self


class Shape(Strict):
    """Requests of one size: `batch` different prompts of `prompt` tokens each, `new` tokens answered to each.

    category: whose prompts of `prompts` they are, cut to length. new 1 measures reading the prompt.
    """

    category: str
    prompt: int = Field(ge=8)
    new: int = Field(ge=1)
    batch: int = Field(default=1, ge=1)


class EngineSpec(Strict):
    """One loaded model in one process.

    worker: the file `peers/run_<worker>.py`; peer: whose environment runs it, none: this one. speculations:
    by name, what the worker is told; `none` is plain decoding. They are asked for `speculate_on` alone.
    """

    worker: str
    peer: str | None = None
    precision: str
    weights: str | None = None
    options: Options = Field(default={})
    speculations: dict[str, Options] = Field(default={"none": {}})
    shapes: tuple[str, ...] | None = Field(default=None, description="default: every shape")
    logits: bool = Field(default=True, description="whether its distance from the original is measured")


class EngineMatrix(Strict):
    """Everything about the comparison. `fidelity`: the subject of `fidelity.yaml` whose model and text it takes."""

    fidelity: str
    prompts: str = "spec_bench"
    threads: int = Field(default=2, ge=1)
    rounds: int = Field(default=5, ge=1)
    baseline: str
    speculate_on: tuple[str, ...]
    shapes: dict[str, Shape] = Field(min_length=1)
    peers: dict[str, Peer]
    weights: dict[str, Weights]
    engines: dict[str, EngineSpec] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_exist(self) -> "EngineMatrix":
        _known("baseline", [self.baseline], self.engines)
        _known("speculate_on", self.speculate_on, self.shapes)
        for name, engine in self.engines.items():
            _known(f"{name}: shapes", engine.shapes or (), self.shapes)
            _known(f"{name}: peer", [engine.peer] if engine.peer else [], self.peers)
            own = [s["weights"] for s in engine.speculations.values() if "weights" in s]
            _known(f"{name}: weights", [*([engine.weights] if engine.weights else []), *own], self.weights)
        return self


def _known(where: str, names: Iterable[str], among: Mapping[str, object]) -> None:
    for name in names:
        if name not in among:
            raise ValueError(f"{where} names {name!r}; it is none of {', '.join(among)}")


def read_engine_matrix(path: Path) -> EngineMatrix:
    """The comparison of a matrix file; raises `RecipeError` for what is none."""
    return validate(EngineMatrix, parse_yaml(read_text(path, "matrix"), str(path)), str(path))
