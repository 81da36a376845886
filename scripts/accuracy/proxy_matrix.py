"""A matrix of proxies: quick measures and tasks over several schemes of one model (`eval/matrices/proxies.yaml`)."""

from pathlib import Path

from pydantic import Field

from qspec.schema.problems import validate
from qspec.schema.quantization import QuantSpec, Strict
from qspec.schema.recipe import FidelitySpec, NeedleSpec
from qspec.schema.text import parse_yaml, read_text


class ProxyMatrix(Strict):
    """Tasks are `questions` of MMLU-Pro and last words of `stories`; the original is measured beside the schemes."""

    model: str
    seed: int = 0
    fidelity: FidelitySpec
    needle: NeedleSpec
    questions: int = Field(ge=1)
    stories: int = Field(ge=1)
    schemes: dict[str, QuantSpec] = Field(min_length=2)


def read_proxy_matrix(path: Path) -> ProxyMatrix:
    """Raises `RecipeError` for what is no matrix."""
    return validate(ProxyMatrix, parse_yaml(read_text(path, "matrix"), str(path)), str(path))
