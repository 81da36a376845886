"""A tiny pair, quantized and ready to be packaged."""

from pathlib import Path
from typing import Any, get_args

from qspec.bridges.tensors import read_tensors, write_tensors
from qspec.models.layers import truncate_layers
from qspec.pair.check import Subject, provenance, read_manifest
from qspec.pair.package import seal
from qspec.provenance import sha256_file
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.report.page import report
from qspec.schema.manifest import NAME
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schema.results import Results
from qspec.schemes.build import build_plan
from tests.example_results import example
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
    target = quantize(model, stats, build_plan(recipe().target.quantization))
    return target, quantize(truncate_layers(model, 1), stats, build_plan(draft))


def measured_of(pair: Path, made: Recipe) -> Results:
    """Made-up results that say they are of a pair: accuracy of its target, draft and speed of both halves."""
    manifest, results = read_manifest(pair), example()
    assert results.speed is not None
    target, beside, both = (provenance(manifest, made, of) for of in get_args(Subject))
    assert results.accuracy.draft is not None
    draft = results.accuracy.draft.model_copy(update={"provenance": beside})
    accuracy = results.accuracy.measured_on(target).model_copy(update={"draft": draft})
    parts = {"accuracy": accuracy, "recipe": made.as_dict()}
    return results.model_copy(update={**parts, "speed": results.speed.model_copy(update={"provenance": both})})


def put(results: Results, pair: Path, folder: Path) -> None:
    """Seal a pair with results."""
    report(results, folder)
    seal(pair, results.model_dump(mode="json"), folder)


def change(pair: Path, half: str, ending: str, factor: float) -> None:
    """Multiply the first tensor of a half whose name ends so, and write digest and manifest anew, as a forger would."""
    path = pair / half / "model.safetensors"
    tensors = dict(read_tensors(path))
    name = min(name for name in tensors if name.endswith(ending))
    write_tensors(path, {**tensors, name: tensors[name] * factor})
    redo(pair)


def redo(pair: Path) -> None:
    """A manifest with the digests of the files as they are."""
    manifest = read_manifest(pair)
    found = ((entry, pair / entry.path) for entry in manifest.files)
    files = [e.model_copy(update={"sha256": sha256_file(p), "bytes": p.stat().st_size}) for e, p in found]
    (pair / NAME).write_bytes(manifest.model_copy(update={"files": tuple(files)}).dump())
