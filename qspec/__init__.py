"""qspec: quantize, fuse, package, prove and measure a target and its draft as one speculative pair.

    import qspec

    pair_folder = qspec.run("recipes/smollm2-135m-int8-cpu.yaml", out="runs/first")
    pair = qspec.load_pair(pair_folder)
    print(pair.generate("What is gravity?", max_new_tokens=64).text)

    qspec.quantize("org/model", "out/model-fp8", scheme="FP8_DYNAMIC")

Importing this package loads nothing heavy; each function loads what it needs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qspec.pair.open import LoadedPair
    from qspec.records import QuantizedModel
    from qspec.schema.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["check", "load_pair", "obstacles", "quantize", "read_recipe", "run"]


def read_recipe(path: str | Path, overrides: tuple[str, ...] = ()) -> "Recipe":
    """Parse and check a recipe; `overrides` are `dotted.key=value`. Raises `qspec.errors.RecipeError`."""
    from qspec.schema.recipe import Recipe

    return Recipe.read(path, overrides)


def run(
    recipe: "Recipe | str | Path", out: str | Path, resume: bool = False, long: bool = False, despite: str = ""
) -> Path:
    """Run the main job of a recipe in the folder `out`; returns the pair's folder. Raises `qspec.errors.QspecError`.

    long: whether it may start although its estimate is above `budget.minutes`, a day by default. Ask `obstacles`
    whether the pair is ready. despite: why one that is not is to be used all the same.
    """
    from qspec import pipeline
    from qspec.schema.recipe import Recipe

    job = recipe if isinstance(recipe, Recipe) else Recipe.read(recipe)
    return pipeline.run(job, out, resume, long=long, despite=despite)


def obstacles(folder: str | Path) -> list[str]:
    """Why a pair is not ready to be used or published, a sentence each; empty for one that is."""
    from qspec.report.verdict import obstacles as found

    return found(Path(folder))


def load_pair(folder: str | Path, memory_limit: str | int | None = None, direct_io: bool = False) -> "LoadedPair":
    """Open a pair to generate with it. Raises `qspec.errors.IntegrityError` if the folder is none.

    memory_limit: bytes that the target's weights and caches may take, or `"2GiB"`; layers beyond it are read from disk
    for every pass. direct_io: past the system's file cache.
    """
    from qspec.pair.open import open_pair

    return open_pair(folder, memory_limit=memory_limit, direct_io=direct_io)


def check(folder: str | Path) -> list[str]:
    """Verify every file of a pair; returns remarks, raises `qspec.errors.IntegrityError` naming a file at fault."""
    from qspec.pair.check import check as verify

    return [str(finding) for finding in verify(Path(folder))]


def quantize(
    model: str,
    out: str | Path,
    *,
    revision: str | None = None,
    calibration: dict[str, Any] | None = None,
    **quantization: Any,
) -> "QuantizedModel":
    """Quantize one model and write it to `out` as a compressed-tensors checkpoint.

    model: as in a recipe. quantization, calibration: fields of the recipe's sections of that name (`scheme="W8A8"`,
    `kv={"format": "fp8_e4m3"}`). Raises `qspec.errors.QspecError`.
    """
    from qspec import pipeline
    from qspec.schema.problems import validate
    from qspec.schema.quantization import ModelSpec
    from qspec.schema.recipe import CalibrationSpec

    spec = {"model": model, "revision": revision, "quantization": quantization}
    texts = validate(CalibrationSpec, calibration or {}, "calibration")
    return pipeline.quantize_checkpoint(validate(ModelSpec, spec, "quantize"), out, texts)
