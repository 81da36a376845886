"""The best pair for a budget: pieces measured once, every combination predicted, the best ones run to confirm it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import groupby
import json
import math
from pathlib import Path
from typing import Any

import torch

from qspec.errors import RecipeError
from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.numerics.student import ratio_interval
from qspec.pipeline import Calibration, Originals, load_originals, quantized_half
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import LookupDraft, MlpDraft, ModelDraft, Recipe, SelfDraft
from qspec.spec.engine import generate
from qspec.spec.types import Drafter, Generation, Sampling, StepRecord
from qspec.stages import report_html
from qspec.stages.bench import load_requests, measure
from qspec.stages.bench_arm import Arm, Request, Run
from qspec.stages.check import real_vocab
from qspec.stages.drafting import draft_policy, lookup_drafter, mlp_drafter, model_drafter
from qspec.stages.fidelity import measure_fidelity
from qspec.stages.open_pair import compute_dtype
from qspec.stages.speculator_head import head_folder, open_head
from qspec.stages.tune_page import Confirmed, Outcome, as_data, document
from qspec.stages.tune_pieces import Journal, Json, head_runs, laws, lookup_runs, pass_times, prompt_seconds
from qspec.stages.tune_predict import Answer, DraftPiece, Model, Prediction, Rounds, TargetPiece, passes_of
from qspec.stages.tune_rounds import bookkeeping
from qspec.stages.tune_space import PLAIN, space_of

ORIGINAL = "original"
ROUNDS = 30
"""Rounds of every draft length whose bookkeeping is timed."""


class Study:
    """One search in a folder: quantized halves, measured pieces and confirming runs are kept there and never redone."""

    def __init__(self, recipe: Recipe, out: Path, progress: Progress | None = None) -> None:
        self.space, self.out, self.progress = space_of(recipe), out, progress or Progress()
        self.recipe, self.spec = recipe, self.space.spec
        self.journal = Journal(out / "pieces")
        sampling = recipe.speculation
        self.sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p)
        self._decoders: dict[str, AnyDecoder] = {}
        self._drafts: dict[str, LoadedModel] = {}
        self._models: dict[str, QuantizedModel] = {}

    @cached_property
    def originals(self) -> Originals:
        return load_originals(self.recipe, self.progress)

    @cached_property
    def _requests(self) -> tuple[list[Request], list[Request]]:
        """Of every category the first prompts are for acceptance, the others confirm."""
        spec, mine = self.recipe.benchmark, self.spec.per_category
        whole = spec.model_copy(update={"per_category": mine + spec.per_category})
        room = self.max_length - max(spec.max_new_tokens, self.spec.tokens)
        found, _ = load_requests(whole, self.originals.target.tokenizer, room)
        parts: tuple[list[Request], list[Request]] = ([], [])
        for _, same in groupby(found, lambda r: r.category):
            listed = list(same)
            parts[0].extend(listed[:mine])
            parts[1].extend(listed[mine:] or listed)
        return parts

    @property
    def max_length(self) -> int:
        return min(self.recipe.speculation.max_length or 10**9, self.originals.target.arch.max_positions)

    @cached_property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """The original's greedy answers, which every half is asked about."""
        prompts = [request.tokens for request in self._requests[0]]

        def make() -> Json:
            answers = []
            for prompt in self.progress.track(prompts, "answers of the original", len(prompts)):
                generator = torch.Generator().manual_seed(self.recipe.seed)
                said = generate(self.original, None, None, prompt, self.spec.tokens, Sampling(), (), generator)
                answers.append(said.tokens)
            return {"answers": answers}

        settings = [dict(self.originals.target.source), prompts, self.spec.tokens]
        return list(zip(prompts, self.journal.kept("answers", settings, make)["answers"], strict=True))

    @cached_property
    def original(self) -> AnyDecoder:
        return open_decoder(self.originals.target, compute_dtype(self.recipe.dtype), self.max_length)

    def model(self) -> Model:
        """All pieces, measured or kept."""
        names = [*self._targets(), *self._with_weights()]
        rows = sorted({1, 2, *(length + 1 for length in self.spec.lengths)})
        settings = [self._setting(names), rows, self.spec.batches, self.spec.context, self.spec.repeats]
        times = self.journal.kept("times", settings, lambda: self._times(names, rows))
        targets = {name: self._target_piece(name, times) for name in self._targets()}
        drafts = {name: self._draft_piece(name, times) for name in self.space.drafts if name != PLAIN}
        return Model(targets, drafts, self._rounds())

    def answer(self, model: Model) -> Answer:
        """Every combination predicted: additive pieces make that cheap, so nothing has to be sampled."""
        every = []
        for target, draft in self.space.pairs:
            for gamma in (0,) if draft == PLAIN else (g for g in self.spec.lengths if model.usable(draft, g)):
                every.append(model.predict(target, draft, gamma, self.space.resident(target, draft)))
        found = Answer(tuple(every), self.recipe.budget, {1: 0})
        if found.chosen.gamma == 0:
            return found
        pair = found.chosen.target, found.chosen.draft
        return replace(found, by_batch=model.schedule(*pair, self.spec.lengths, self.spec.batches))

    def finalists(self, answer: Answer) -> list[Prediction]:
        """Whom to run: the choice, the front, then the best draft length of each pair, the fastest first."""
        listed = dict.fromkeys([answer.chosen, *(p for p in answer.front if p.seconds <= 2 * answer.chosen.seconds)])
        best = sorted(answer.every, key=lambda p: p.seconds)
        seen: set[tuple[str, str]] = {(p.target, p.draft) for p in listed}
        for p in best:
            if (p.target, p.draft) not in seen:
                seen.add((p.target, p.draft))
                listed[p] = None
        return list(listed)[: self.spec.confirm]

    def arm(self, target: str, draft: str, gamma: int) -> Arm:
        """A combination to run, with a drafter and a policy of its own."""
        lm = self.original if target == ORIGINAL else self.decoder(target)
        if draft == PLAIN:
            return Arm(lm)
        recipe = self.space.recipe_of(next(iter(self.space.targets)) if target == ORIGINAL else target, draft, gamma)
        return Arm(lm, self._drafter(target, draft, recipe), draft_policy(recipe.speculation.draft_length))

    def confirm(self, arms: Mapping[str, Arm]) -> dict[str, list[Run]]:
        """Every arm answers the confirming prompts, in turns; what is kept is not asked again."""
        requests, path = self._requests[1], self.out / "confirm.jsonl"
        facts = [sorted(arms), [r.tokens for r in requests], self.recipe.benchmark.model_dump(mode="json")]
        key = json.dumps(facts, sort_keys=True)
        kept = _read_runs(path, key)
        done = {(r.temperature, r.repeat, r.prompt) for r in kept}
        spec = self.recipe.benchmark.model_copy(update={"temperatures": (self.sampling.temperature,)})
        job = self.recipe.model_copy(update={"benchmark": spec})
        runs = measure(arms, requests, job, self.originals.target.arch.eos_ids, self.progress, done)
        with path.open("a", encoding="utf-8") as file:
            for _, group in groupby(runs, lambda r: (r.temperature, r.repeat, r.prompt)):
                same = list(group)
                file.write(json.dumps({"key": key, "runs": [asdict(run) for run in same]}) + "\n")
                file.flush()
                kept += same
        return {name: [run for run in kept if run.arm == name] for name in arms}

    def decoder(self, name: str) -> AnyDecoder:
        """A half in memory; all stay there, since they take turns."""
        if name not in self._decoders:
            model = self._quantized(name)
            length = min(self.max_length, model.arch.max_positions)
            self._decoders[name] = open_decoder(model, compute_dtype(self.recipe.dtype), length)
        return self._decoders[name]

    @property
    def engine(self) -> str:
        return engine_name(self.original)

    def _targets(self) -> list[str]:
        return list(self.space.targets)

    def _with_weights(self) -> list[str]:
        drafts = self.space.drafts.items()
        return [
            name for name, pair in drafts if name != PLAIN and isinstance(pair.recipe.draft, ModelDraft | SelfDraft)
        ]

    def _setting(self, names: Sequence[str]) -> Any:
        """What decides a piece of these halves."""
        halves = {name: self._half(name)[1].model_dump(mode="json") for name in names}
        return [dict(self.originals.target.source), halves, self._machine(), self.engine]

    def _machine(self) -> Json:
        return {key: environment()[key] for key in ("cpu", "threads", "qspec", "torch")}

    def _half(self, name: str) -> tuple[LoadedModel, QuantSpec]:
        if name in self.space.targets:
            return self.originals.target, self.space.targets[name].recipe.target.quantization
        draft = self.space.drafts[name].recipe.draft
        assert isinstance(draft, ModelDraft | SelfDraft)
        if isinstance(draft, SelfDraft) and draft.layers is None:
            return self.originals.target, draft.quantization
        if name not in self._drafts:
            model = load_originals(self.space.drafts[name].recipe, self.progress).draft
            assert model is not None
            self._drafts[name] = model
        return self._drafts[name], draft.quantization

    def _quantized(self, name: str) -> QuantizedModel:
        if name not in self._models:
            model, spec = self._half(name)
            recipe = self.recipe
            text = Calibration(recipe.calibration, self.originals.target.tokenizer, recipe.seed, self.progress)
            folder = self.out / "halves" / "".join(c if c.isalnum() else "-" for c in name)
            self._models[name] = quantized_half(recipe, spec, model, text, folder)
        return self._models[name]

    def _times(self, names: list[str], rows: list[int]) -> Json:
        lms = {name: self.decoder(name) for name in names}
        s = self.spec
        return pass_times(lms, rows, s.batches, s.context, s.repeats, self.progress)

    def _rounds(self) -> Rounds:
        machine, vocab = self._machine(), self.originals.target.arch.vocab_size
        facts = [machine, vocab, self.spec.lengths, self.spec.context, asdict(self.sampling)]

        def make() -> Json:
            return bookkeeping(vocab, self.spec.lengths, self.spec.context, self.sampling, ROUNDS)

        kept = self.journal.kept("rounds", facts, make)
        return Rounds(*({int(d): s for d, s in kept[part].items()} for part in ("engine", "draft")))

    def _target_piece(self, name: str, times: Json) -> TargetPiece:
        fidelity, text = self.recipe.evaluation.fidelity, self.texts

        def make() -> Json:
            self.progress.stage(f"accuracy of {name}")
            lm, told = self.decoder(name), {"kl": float("nan"), "kl_ci": None, "top1": float("nan")}
            if fidelity is not None:
                found = measure_fidelity(self.original, lm, self.originals.target.tokenizer, fidelity, self.progress)[0]
                told = {"kl": found.kl.value, "kl_ci": found.kl.ci, "top1": found.top1_agreement.value}
            return told | {"prompts": prompt_seconds(lm, text), "law": laws(lm, text, self.sampling)}

        settings = [self._setting([name]), fidelity and fidelity.model_dump(mode="json"), text, asdict(self.sampling)]
        kept = self.journal.kept("target", settings, make)
        ci = kept["kl_ci"] and tuple(kept["kl_ci"])
        return TargetPiece(passes_of(times[name]), kept["kl"], ci, kept["top1"], max(kept["prompts"]), kept["law"])

    def _draft_piece(self, name: str, times: Json) -> DraftPiece:
        draft, text, most = self.space.drafts[name].recipe.draft, self.texts, max(self.spec.lengths)
        settings = [
            draft.model_dump(mode="json"),
            dict(self.originals.target.source),
            text,
            most,
            asdict(self.sampling),
        ]
        if isinstance(draft, LookupDraft):
            kept = self.journal.kept("lookup", settings, lambda: lookup_runs(lookup_drafter(draft), text, most))
            return DraftPiece(runs={"": kept}, seconds=kept["seconds"])
        if isinstance(draft, MlpDraft):
            most = draft.n_predict
            pairs = [target for target, drafts in self.space.pairs if drafts == name]
            told = {
                t: self.journal.kept("head", [*settings, self._setting([t])], self._head_runs(t, name)) for t in pairs
            }
            return DraftPiece(runs=told, seconds=_mean(k["seconds"] for k in told.values()), per_token=True, most=most)

        def make() -> Json:
            lm = self.decoder(name)
            begun = [([*prompt, *answer[:1]], answer) for prompt, answer in text]
            return laws(lm, text, self.sampling) | {"prompts": prompt_seconds(lm, begun)}

        law = self.journal.kept("draft", [*settings, self._setting([name])], make)
        return DraftPiece(passes_of(times[name]), law, law["prompts"])

    def _head_runs(self, target: str, name: str) -> Any:
        def make() -> Json:
            draft = self.space.drafts[name].recipe.draft
            assert isinstance(draft, MlpDraft)
            drafter = self._mlp(target, draft)
            return head_runs(self.decoder(target), drafter, self.texts, draft.n_predict)

        return make

    def _mlp(self, target: str, draft: MlpDraft) -> Drafter:
        model = self.originals.target if target == ORIGINAL else self._quantized(target)
        head = open_head(head_folder(draft, model.arch), model)
        return mlp_drafter(head, draft, model.arch, real_vocab(model.tokenizer))

    def _drafter(self, target: str, name: str, recipe: Recipe) -> Drafter:
        draft, model = recipe.draft, self.originals.target
        if isinstance(draft, LookupDraft):
            return lookup_drafter(draft)
        if isinstance(draft, MlpDraft):
            return self._mlp(target, draft)
        lm = self.decoder(name)
        return model_drafter(lm.fork(), draft, model.arch, real_vocab(model.tokenizer))


def tune(recipe: Recipe, out: Path, progress: Progress | None = None) -> Outcome:
    """Search, confirm, and write `out/tune.json`, `out/tune.html` and `out/recipe.yaml`, the job of the chosen pair.

    A call that was killed goes on. Raises `RecipeError` for a device that is not here.
    """
    if recipe.device != "cpu":
        rule = "is not here, and passes are timed where they will run"
        raise RecipeError(
            f"device {recipe.device}", rule, "set device: cpu, or see what `qspec plan` predicts from data sheets"
        )
    study = Study(recipe, out, progress)
    answer = study.answer(study.model())
    finalists = study.finalists(answer)
    runs = study.confirm({p.name: study.arm(p.target, p.draft, p.gamma) for p in finalists})
    confirmed = tuple(Confirmed(p, *speed_of(runs[p.name])) for p in finalists)
    found = Outcome(answer, confirmed, study.space.pruned)
    chosen = found.chosen.prediction
    job = study.space.recipe_of(chosen.target, chosen.draft, chosen.gamma)
    atomic_write(out / "recipe.yaml", scheduled(job, answer.schedule if chosen == answer.chosen else []).dump())
    atomic_write(out / "tune.json", json.dumps(as_data(found) | {"environment": environment()}, indent=1) + "\n")
    atomic_write(out / "tune.html", report_html.render(document(found, recipe.name)))
    study.progress.close()
    return found


def scheduled(job: Recipe, by_batch: Sequence[tuple[int, int, int]]) -> Recipe:
    """The job with its draft length by batch size, as engines take it."""
    if not by_batch:
        return job
    fields = job.as_dict()
    fields["speculation"]["draft_length"] |= {"by_batch": by_batch}
    return Recipe.model_validate(fields)


def speed_of(runs: Sequence[Run]) -> tuple[float, tuple[float, float] | None]:
    """Tokens per second of decoding over all runs, with its 95 % interval over prompts."""
    prompts = sorted({run.prompt for run in runs})
    same = [[run.generation for run in runs if run.prompt == prompt] for prompt in prompts]
    seconds = [sum(g.seconds for g in of) for of in same]
    tokens = [float(sum(len(g.tokens) - 1 for g in of)) for of in same]
    if not sum(seconds):
        return math.nan, None
    ci = ratio_interval(seconds, tokens)
    return sum(tokens) / sum(seconds), ci and (1 / ci[1], 1 / ci[0] if ci[0] > 0 else math.inf)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _read_runs(path: Path, key: str) -> list[Run]:
    """Runs of the same question; a last line that a kill cut short is left out."""
    found: list[Run] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            entry = json.loads(line)
            found += [_run(fields) for fields in entry["runs"] if entry["key"] == key]
    return found


def _run(fields: Json) -> Run:
    told = fields["generation"]
    steps = [StepRecord(**step) for step in told["steps"]]
    return Run(**fields | {"generation": Generation(**told | {"steps": steps})})
