"""The head that comes with the package: what recipes refer to, small enough to be carried along."""

from pathlib import Path

from qspec.bridges.heads import speculator
from qspec.bridges.tensors import read_tensors
from qspec.models.load import locate
from qspec.schema.drafts import MlpDraft
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]


def test_the_shipped_head_is_the_recipes():
    """Would catch weights of other sizes or another training than the recipe that refers to them, or a heavy wheel."""
    draft = Recipe.read(ROOT / "recipes/smollm2-135m-mlp-cpu.yaml").draft
    assert isinstance(draft, MlpDraft)
    assert draft.training is not None
    folder = locate(ModelSpec(model=draft.model)).path
    assert folder is not None
    config, shape = speculator.read_config(folder), speculator.read_shape(folder)
    assert (shape.n_predict, shape.inner, shape.draft_vocab) == (draft.n_predict, draft.inner_dim, draft.draft_vocab)
    assert (shape.tie_weights, shape.scale_input, shape.shared) == (draft.tie_weights, draft.scale_input, draft.shared)
    training = draft.training
    assert type(training).model_validate(config["qspec"]["training"] | {"data": config["qspec"]["data"]}) == training
    assert read_tensors(folder)["speculator.ids"].diff().min() > 0
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6
