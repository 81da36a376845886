"""What measuring a finished pair anew begins with: its recipe under other measurements, and what it was made from."""

from pathlib import Path

from qspec.errors import OutputError, RecipeError, SourceError
from qspec.provenance import require_writable
from qspec.records import LoadedModel
from qspec.schema.manifest import Half
from qspec.schema.recipe import ModelSpec, Recipe
from qspec.stages.load import load, locate


def asked(made: Recipe, overrides: tuple[str, ...], *sections: str) -> Recipe:
    """A pair's recipe under `overrides`; raises `RecipeError` where they change more than these sections of it."""
    recipe = Recipe.of(made.as_dict(), overrides, made.name)
    if recipe != made.model_copy(update={section: getattr(recipe, section) for section in sections}):
        rule = f"changes more than the {' and the '.join(sections)}"
        raise RecipeError(", ".join(overrides), rule, "make another pair with qspec run --set")
    return recipe


def require_new(out: Path) -> None:
    """Refuse an output folder that is there, or cannot be made: results of an earlier measurement are kept."""
    if out.exists():
        raise OutputError(str(out), "exists already", "choose another --out")
    require_writable(out)


def load_original(spec: ModelSpec, half: Half) -> LoadedModel:
    """The model that a half was made from, of the Hub in that revision; raises `SourceError` for other weights."""
    made_from = half.source
    if locate(spec).path is None:
        spec = spec.model_copy(update={"revision": made_from.get("revision") or spec.revision})
    model = load(spec)
    if made_from.get("sha256") != model.source["sha256"]:
        rule = f"has weights with sha256 {model.source['sha256']}, the pair was made from {made_from.get('sha256')}"
        raise SourceError(spec.model, rule, "bring back the weights that its pair.json names")
    return model
