"""The speed of a finished pair, measured anew where it is: acceptance and the proof of equal output too."""

from pathlib import Path

from qspec.errors import PairError, SourceError
from qspec.nn.cuda_decoder import CudaDecoder
from qspec.nn.engines import engine_name
from qspec.pipeline import Arms, Originals, original_runs
from qspec.progress import Progress
from qspec.provenance import environment, staged_dir
from qspec.records import LoadedModel
from qspec.schema.recipe import ModelDraft, Recipe
from qspec.schema.results import Accuracy, Results
from qspec.stages.bench import bench
from qspec.stages.bench_arm import Arm
from qspec.stages.check import check, read_manifest, weight_digests
from qspec.stages.finished import asked, load_original, require_new
from qspec.stages.open_pair import LoadedPair, open_pair
from qspec.stages.package import seal
from qspec.stages.pad import match_rows
from qspec.stages.pair_arms import own_arms
from qspec.stages.report import report
from qspec.stages.stale import measured

NO_ACCURACY = "Accuracy was not measured in this run."
EARLIER = "Accuracy was measured earlier"
NO_ORIGINAL = "The original was not run: nothing here is a speedup over it."


def bench_pair(
    pair: str | Path,
    out: str | Path,
    overrides: tuple[str, ...] = (),
    original: bool = True,
    keep: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Run the benchmark of a pair's recipe under `overrides`; results and report go to `out`.

    original: whether the model that the pair was made from, read where its recipe has it, is measured beside it. keep:
    whether speed and proof take the place of those in the pair's own report and manifest; its accuracy stays there.
    Raises `RecipeError` for overrides of more than benchmark and, without `keep`, speculation, and `PairError` on
    another kind of device than the pair's.
    """
    pair, out, progress = Path(pair), Path(out), progress or Progress()
    manifest = read_manifest(pair)
    sections = ("benchmark",) if keep else ("benchmark", "speculation")
    recipe = asked(Recipe.model_validate(manifest.recipe), overrides, *sections)
    require_new(out)
    check(pair)
    with staged_dir(out) as part:
        progress.stage("load")
        opened = open_pair(pair, recipe=recipe)
        _require_device(opened)
        arms = {**(_originals(opened) if original else {}), **own_arms(opened)}
        progress.stage("benchmark")
        model = opened.model
        speed = bench(arms, model.tokenizer, recipe, progress, eos_ids=model.arch.eos_ids, prove="quantized")
        results = Results(
            name=recipe.name,
            recipe=recipe.as_dict(),
            environment={**environment(), "engine": engine_name(opened.target)},
            digests=weight_digests(manifest),
            speed=speed,
            limits=(NO_ACCURACY, *(() if original else (NO_ORIGINAL,))),
        )
        if keep:
            results = _beside_accuracy(results, measured(pair))
        report(results, part)
    if keep:
        seal(pair, results.model_dump(mode="json"), out)
    progress.close()
    return results


def _beside_accuracy(results: Results, before: Results | None) -> Results:
    """With the accuracy that was measured of the same halves earlier, and where."""
    if before is None or before.digests != results.digests or before.accuracy == Accuracy():
        return results
    where = before.environment.get("cpu", "another machine")
    first = f"{EARLIER} ({where}, qspec {before.environment.get('qspec', 'unknown')})."
    earlier = next((limit for limit in before.limits if limit.startswith(EARLIER)), first)
    limits = (earlier, *(limit for limit in results.limits if limit != NO_ACCURACY))
    told = results.recipe | {"evaluation": before.recipe.get("evaluation")}
    return results.model_copy(
        update={"accuracy": before.accuracy, "notes": before.notes, "limits": limits, "recipe": told}
    )


def _require_device(pair: LoadedPair) -> None:
    device = pair.recipe.device
    if device != "cpu" and not isinstance(pair.target, CudaDecoder):
        rule = "is what the pair is for, and its speed on this machine's CPU would say nothing of it"
        raise PairError(f"device {device}", rule, "measure it on a machine with that device")


def _originals(pair: LoadedPair) -> dict[str, Arm]:
    """The models that the pair was made from. A draft that was trained for it comes as the pair has it."""
    recipe = pair.recipe
    draft: LoadedModel | None = None
    try:
        target = load_original(recipe.target, pair.manifest.target)
        if isinstance(recipe.draft, ModelDraft) and recipe.draft.training is None:
            draft = match_rows(load_original(recipe.draft, pair.manifest.draft), target.arch.vocab_size)
    except SourceError as error:
        raise SourceError(error.value, error.rule, f"{error.fix}, or leave it out: --no-original") from error
    return original_runs(Arms(recipe, Originals(target, draft), pair))
