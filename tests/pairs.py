"""A tiny pair, quantized and ready to be packaged."""

from pathlib import Path
from typing import Any

from qspec.models.layers import truncate_layers
from qspec.quantization.job import fuse
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.tiny import tiny_model

KV = {"format": "fp8_e4m3"}
DRAFTS: dict[str, dict[str, Any]] = {
    "self": {"kind": "self", "layers": 1, "quantization": {"scheme": "W4A16", "group_size": 32, "kv": KV}},
    "ngram": {"kind": "ngram", "min_ngram": 2, "max_ngram": 4},
}


def recipe(draft: str = "self", **fields: Any) -> Recipe:
    target = {"model": "tiny", "quantization": {"scheme": "W8A8", "kv": KV}}
    speculation = {"draft_length": {"policy": "fixed", "k": 3}, "max_length": 128}
    return Recipe.model_validate(
        {"name": "tiny", "target": target, "draft": DRAFTS[draft], "speculation": speculation, **fields}
    )


def halves(folder: Path) -> tuple[QuantizedModel, QuantizedModel]:
    """Target and one-layer draft, as `recipe()` asks for them; the model is built in `folder`."""
    model, stats = load(tiny_model("llama", folder)), observe(folder)
    draft = QuantSpec.model_validate(DRAFTS["self"]["quantization"])
    target = fuse(quantize(model, stats, build_plan(recipe().target.quantization)))
    return target, fuse(quantize(truncate_layers(model, 1), stats, build_plan(draft)))
