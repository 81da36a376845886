"""A matrix of drafts and draft-length policies to compare on the same prompts (`eval/matrices/spec_bench.yaml`)."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from qspec.schema.drafts import Draft
from qspec.schema.problems import validate
from qspec.schema.quantization import ModelSpec, Strict
from qspec.schema.recipe import BenchmarkSpec, DraftLengthSpec, Recipe, SpeculationSpec
from qspec.schema.text import parse_yaml, read_text


class SpecSubject(Strict):
    """A target, the drafts and policies that are tried on it, and the prompts. Every draft meets every policy.

    `max_length`: cache positions; prompts that leave no room for the answer are passed over.
    """

    target: ModelSpec
    benchmark: BenchmarkSpec
    max_length: int = Field(default=2048, ge=16)
    seed: int = 0
    drafts: dict[str, Draft] = Field(min_length=1)
    policies: dict[str, DraftLengthSpec] = Field(min_length=1)

    def recipe(self, draft: str, policy: str) -> Recipe:
        """The job of one draft under one policy. Raises `RecipeError` for what the schema refuses."""
        return Recipe(
            name="spec-bench",
            seed=self.seed,
            target=self.target,
            draft=self.drafts[draft],
            speculation=SpeculationSpec(draft_length=self.policies[policy], max_length=self.max_length),
            benchmark=self.benchmark,
        )


class OffloadSubject(SpecSubject):
    """The same under limits of memory (`eval/matrices/offload.yaml`).

    `resident`: shares of the target's layers that stay in memory, all of them beside these. `direct_io`: the others are
    read past the system's file cache.
    """

    resident: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(min_length=1)
    direct_io: bool = False


Subject = TypeVar("Subject", bound=SpecSubject)


def read_spec_matrix(path: Path, kind: type[Subject]) -> dict[str, Subject]:
    """The subjects of a matrix file by name; raises `RecipeError` for what is no matrix."""
    data = parse_yaml(read_text(path, "matrix"), str(path))
    return {name: validate(kind, subject, f"{path}: {name}") for name, subject in data.items()}
