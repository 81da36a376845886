"""Documents keep step with the code: fields, links, recipes that people will copy."""

from pathlib import Path
import re

import pytest

import qspec
from qspec.cli import app
from qspec.schema.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def fields_of_a_recipe() -> set[str]:
    schema = Recipe.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    return {field for part in parts for field in part.get("properties", {})}


def snippets(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_every_recipe_field_is_documented():
    """Would catch a field that is added, or renamed, without a line in docs/recipes.md."""
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", (ROOT / "docs/recipes.md").read_text("utf-8")))))
    assert fields_of_a_recipe() - words == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_project_resolve(page):
    """Would catch a link to a page or file that was moved."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("page", "text"),
    [pytest.param(page, text, id=page.name) for page in PAGES for text in snippets(page)],
)
def test_recipes_in_documents_are_valid(page, text, tmp_path):
    """Would catch an example that the recipe parser refuses."""
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    assert Recipe.read(tmp_path / "recipe.yaml").name


def test_every_public_function_is_documented():
    """Would catch a public function without a line in docs/python-api.md."""
    page = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
    assert [name for name in qspec.__all__ if f"`{name}(" not in page] == []


def test_every_verb_is_in_the_readme():
    """Would catch a command that nobody finds."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert [verb for verb in verbs if f"| `qspec {verb}" not in page] == []
