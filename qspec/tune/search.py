"""The best pair for a budget: pieces measured once, every combination predicted, the best ones run to confirm it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
import json
from pathlib import Path

from qspec.errors import OutputError, RecipeError
from qspec.kept import Kept
from qspec.measure.arm import TokenizedPrompt
from qspec.measure.bench import load_requests
from qspec.pair.drafters.registry import kind_of
from qspec.planning.tune_space import space_of
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment, sole_writer
from qspec.report.render import html as report_html
from qspec.schema.recipe import Recipe
from qspec.speculation.types import Sampling
from qspec.tune.answer import Predictions, answer, pick
from qspec.tune.confirm import Rate, confirm, finalists, speed_of
from qspec.tune.halves import Halves
from qspec.tune.layers import Lowered, Lowering, ladders
from qspec.tune.measure import Pieces
from qspec.tune.page import Confirmed, SearchResult, as_data, confirmed, document
from qspec.tune.predict import SeparableModel

SECONDS = "seconds"
"""The folder of all that was timed: without it a search predicts and runs in one sitting, and keeps the rest."""


class Study:
    """One search in a folder: quantized halves, measured pieces and confirming runs are kept there and never redone."""

    def __init__(self, recipe: Recipe, out: Path, progress: Progress | None = None) -> None:
        self.space, self.out, self.progress = space_of(recipe), out, progress or Progress()
        self.recipe, self.spec = recipe, self.space.spec
        for planned in self.space.drafts.values():
            kind_of(planned.recipe.draft).require_trained()
        self.halves = Halves(self.space, out / "halves", self.progress)
        self._timed = Kept(out / SECONDS)

    @cached_property
    def pieces(self) -> Pieces:
        speculation = self.recipe.speculation
        sampling = Sampling(speculation.temperature, speculation.top_k, speculation.top_p)
        prompts = [request.tokens for request in self._requests[0]]
        return Pieces(self.halves, prompts, sampling, Kept(self.out / "pieces"), self._timed, self.progress)

    def search(self) -> tuple[Predictions, list[Lowered]]:
        """All pieces, every prediction; with drafts lowered layer by layer, all forms are timed again beside them."""
        model, budget = self.pieces.model(), self.recipe.budget
        first = answer(self.space, model, budget)
        lowered = self.lower_layers(model, first)
        return (answer(self.space, self.pieces.model(), budget) if lowered else first), lowered

    def lower_layers(self, model: SeparableModel, first: Predictions) -> list[Lowered]:
        """Drafts lowered layer by layer, each beside the target that it is best with; they join the space."""
        every = []
        for ladder in ladders(self.space) if self.spec.layers is not None else []:
            labels = {form.label for form in (*ladder.layers, *ladder.heads)}
            rows = [p for p in first.every if p.draft in labels]
            if rows and self.spec.layers is not None:
                target = pick(rows, self.recipe.budget)[0].target
                every.append(Lowering(self.pieces, model, ladder, target).search(self.spec.layers))
        for lowered in every:
            self.space = self.halves.space = self.space.with_draft(lowered.ladder.name, lowered.draft)
        return every

    def confirm(
        self, predicted: Predictions, lowered: Sequence[Lowered], beside: Mapping[str, tuple[str, str]] | None = None
    ) -> tuple[tuple[Confirmed, ...], dict[str, Rate]]:
        """The best pairs answer the prompts that acceptance was not measured on, and the speeds of other arms beside.

        beside: targets and drafts by name, drafting by the recipe's own policy.
        """
        chosen = finalists(predicted, self.spec.confirm, [(one.target, one.ladder.name) for one in lowered])
        arms = {p.name: self.halves.arm(p.target, p.draft, p.gamma) for p in chosen}
        arms |= {name: self.halves.arm(*of, 0) for name, of in (beside or {}).items()}
        eos_ids = self.halves.target.arch.eos_ids
        runs = confirm(arms, self._requests[1], self.recipe, eos_ids, self._timed, self.progress)
        speeds = {name: speed_of(mine) for name, mine in runs.items()}
        return tuple(confirmed(p, runs[p.name]) for p in chosen), {name: speeds[name] for name in beside or {}}

    @cached_property
    def _requests(self) -> tuple[list[TokenizedPrompt], list[TokenizedPrompt]]:
        """The first prompts of every category, for acceptance, and the others, which confirm."""
        spec, mine = self.recipe.timing, self.spec.per_category
        whole = spec.model_copy(update={"per_category": spec.per_category and mine + spec.per_category})
        room = self.halves.max_length - max(spec.max_new_tokens, self.spec.tokens)
        requests, _ = load_requests(whole, self.halves.target.tokenizer, room)
        parts: tuple[list[TokenizedPrompt], list[TokenizedPrompt]] = ([], [])
        for _, same in groupby(requests, lambda r: r.category):
            listed = list(same)
            parts[0].extend(listed[:mine])
            parts[1].extend(listed[mine:])
        return parts


def tune(recipe: Recipe, out: Path, progress: Progress | None = None) -> SearchResult:
    """Search, confirm, and write `out/tune.json`, `out/tune.html` and `out/recipe.yaml`, the job of the chosen pair.

    A call that was killed goes on. Raises `RecipeError` for a device that is not here.
    """
    if recipe.device != "cpu":
        rule = "is not here, and passes are timed where they will run"
        fix = "measure here with --set device=cpu; qspec plan predicts from data sheets"
        raise RecipeError(f"device {recipe.device}", rule, fix)
    if (out / "run.log").exists():
        raise OutputError(str(out), "holds a run, whose recipe.yaml would be replaced", "choose another --out")
    study = Study(recipe, out, progress)
    with sole_writer(out):
        predicted, lowered = study.search()
        runs, _ = study.confirm(predicted, lowered)
        result = SearchResult(predicted, runs, study.space.pruned, tuple(lowered))
        _write(study, result)
    study.progress.close()
    return result


def _write(study: Study, result: SearchResult) -> None:
    best, predicted, out = result.chosen.prediction, result.answer, study.out
    job = study.space.recipe_of(best.target, best.draft, best.gamma)
    atomic_write(out / "recipe.yaml", scheduled(job, predicted.schedule if best == predicted.chosen else []).dump())
    atomic_write(out / "tune.json", json.dumps(as_data(result) | {"environment": environment()}, indent=1) + "\n")
    page = report_html.render(document(result, study.recipe.name), ["tune.json", "recipe.yaml"])
    atomic_write(out / "tune.html", page)


def scheduled(job: Recipe, by_batch: Sequence[tuple[int, int, int]]) -> Recipe:
    """The job with its draft length by batch size, as engines take it."""
    if not by_batch:
        return job
    fields = job.as_dict()
    fields["speculation"]["draft_length"] |= {"by_batch": by_batch}
    return Recipe.model_validate(fields)
