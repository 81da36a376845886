"""The matrix of drafts and policies."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from qspec.errors import RecipeError
from qspec.eval_files import eval_dir
from scripts.drafts.matrix import OffloadSubject, SpecSubject, read_spec_matrix


def test_the_shipped_matrices_read_and_every_cell_is_a_recipe() -> None:
    """Catches a draft or policy that the schema has outgrown, found only after hours of other cells."""
    for name, kind in (("spec_bench", SpecSubject), ("draft_length", SpecSubject), ("offload", OffloadSubject)):
        cells_are_recipes(read_spec_matrix(eval_dir() / f"matrices/{name}.yaml", kind))


def cells_are_recipes(matrix: Mapping[str, SpecSubject]) -> None:
    for subject in matrix.values():
        for draft in subject.drafts:
            for policy in subject.policies:
                recipe = subject.recipe(draft, policy)
                assert recipe.draft == subject.drafts[draft]
                assert recipe.speculation.draft_length == subject.policies[policy]
                assert recipe.benchmark == subject.benchmark


def test_a_mistyped_field_is_named(tmp_path: Path) -> None:
    """Catches a setting that is ignored because its name is wrong."""
    path = tmp_path / "matrix.yaml"
    path.write_text("m: {target: {model: org/m}, benchmark: {}, drafts: {a: {kind: ngram}}, policy: {b: {}}}")
    with pytest.raises(RecipeError, match="policies"):
        read_spec_matrix(path, SpecSubject)
