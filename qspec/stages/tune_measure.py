"""All pieces of a joint search, measured once or read from its journal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from qspec.progress import Progress
from qspec.provenance import environment
from qspec.schema.recipe import Draft, LookupDraft, MlpDraft
from qspec.schema.tuning import TuneSpec
from qspec.spec.engine import generate
from qspec.spec.types import Sampling
from qspec.stages.drafting import lookup_drafter
from qspec.stages.fidelity import measure_fidelity
from qspec.stages.tune_halves import Halves
from qspec.stages.tune_pieces import Journal, Json, head_runs, laws, lookup_runs, pass_times, prompt_seconds
from qspec.stages.tune_predict import DraftPiece, Model, Rounds, TargetPiece, passes_of
from qspec.stages.tune_rounds import bookkeeping
from qspec.stages.tune_space import PLAIN

ROUNDS = 30
"""Rounds of every draft length whose bookkeeping is timed."""


class Pieces:
    """Measures what `Model` is made of, on `prompts`; what the journal has is not measured again."""

    def __init__(
        self, halves: Halves, prompts: Sequence[list[int]], sampling: Sampling, journal: Journal, progress: Progress
    ) -> None:
        self._halves, self._prompts, self._sampling = halves, prompts, sampling
        self._journal, self._progress = journal, progress
        self._space, self._recipe = halves.space, halves.space.recipe
        self._spec: TuneSpec[Draft] = halves.space.spec

    def model(self) -> Model:
        times = self._times()
        targets = {name: self._target(name, times) for name in self._space.targets}
        drafts = {name: self._draft(name, times) for name in self._space.drafts if name != PLAIN}
        return Model(targets, drafts, self._rounds())

    @cached_property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """The original's greedy answers, which every half is asked about."""

        def make() -> Json:
            answers = []
            for prompt in self._progress.track(self._prompts, "answers of the original", len(self._prompts)):
                generator = torch.Generator().manual_seed(self._recipe.seed)
                original = self._halves.original
                said = generate(original, None, None, prompt, self._spec.tokens, Sampling(), (), generator)
                answers.append(said.tokens)
            return {"answers": answers}

        settings = [self._source, self._prompts, self._spec.tokens]
        return list(zip(self._prompts, self._journal.kept("answers", settings, make)["answers"], strict=True))

    @property
    def _source(self) -> Json:
        return dict(self._halves.target.source)

    @property
    def _machine(self) -> Json:
        return {key: environment()[key] for key in ("cpu", "threads", "qspec", "torch")}

    def _setting(self, names: Iterable[str]) -> Any:
        """What decides a piece of these halves."""
        specs = {name: self._halves.spec(name).model_dump(mode="json") for name in names}
        return [self._source, specs, self._machine, self._halves.engine]

    def _times(self) -> Json:
        spec, names = self._spec, [*self._space.targets, *self._halves.with_weights]
        rows = sorted({1, 2, *(length + 1 for length in spec.lengths)})

        def make() -> Json:
            lms = {name: self._halves.decoder(name) for name in names}
            return pass_times(lms, rows, spec.batches, spec.context, spec.repeats, self._progress)

        return self._journal.kept("times", [self._setting(names), rows, spec.batches, spec.context, spec.repeats], make)

    def _rounds(self) -> Rounds:
        spec, vocab = self._spec, self._halves.target.arch.vocab_size
        facts = [self._machine, vocab, spec.lengths, spec.context, asdict(self._sampling)]

        def make() -> Json:
            return bookkeeping(vocab, spec.lengths, spec.context, self._sampling, ROUNDS)

        kept = self._journal.kept("rounds", facts, make)
        return Rounds(*({int(d): s for d, s in kept[part].items()} for part in ("engine", "draft")))

    def _target(self, name: str, times: Json) -> TargetPiece:
        fidelity, text = self._recipe.evaluation.fidelity, self.texts

        def make() -> Json:
            self._progress.stage(f"accuracy of {name}")
            halves = self._halves
            lm, told = halves.decoder(name), {"kl": float("nan"), "kl_ci": None, "top1": float("nan")}
            if fidelity is not None:
                found = measure_fidelity(halves.original, lm, halves.target.tokenizer, fidelity, self._progress)[0]
                told = {"kl": found.kl.value, "kl_ci": found.kl.ci, "top1": found.top1_agreement.value}
            return told | {"prompts": prompt_seconds(lm, text), "law": laws(lm, text, self._sampling)}

        settings = [self._setting([name]), fidelity and fidelity.model_dump(mode="json"), text, asdict(self._sampling)]
        kept = self._journal.kept("target", settings, make)
        ci = kept["kl_ci"] and tuple(kept["kl_ci"])
        return TargetPiece(passes_of(times[name]), kept["kl"], ci, kept["top1"], max(kept["prompts"]), kept["law"])

    def _draft(self, name: str, times: Json) -> DraftPiece:
        draft, text, most = self._space.drafts[name].recipe.draft, self.texts, max(self._spec.lengths)
        settings = [draft.model_dump(mode="json"), self._source, text, most, asdict(self._sampling)]
        if isinstance(draft, LookupDraft):
            kept = self._journal.kept("lookup", settings, lambda: lookup_runs(lookup_drafter(draft), text, most))
            return DraftPiece(runs={"": kept}, seconds=kept["seconds"])
        if isinstance(draft, MlpDraft):
            targets = [target for target, drafts in self._space.pairs if drafts == name]
            told = {
                t: self._journal.kept("head", [*settings, self._setting([t])], self._head_runs(t, draft))
                for t in targets
            }
            seconds = sum(kept["seconds"] for kept in told.values()) / max(1, len(told))
            return DraftPiece(runs=told, seconds=seconds, per_token=True)

        def make() -> Json:
            lm = self._halves.decoder(name)
            begun = [([*prompt, *answer[:1]], answer) for prompt, answer in text]
            return laws(lm, text, self._sampling) | {"prompts": prompt_seconds(lm, begun)}

        law = self._journal.kept("draft", [*settings, self._setting([name])], make)
        return DraftPiece(passes_of(times[name]), law, law["prompts"])

    def _head_runs(self, target: str, draft: MlpDraft) -> Callable[[], Json]:
        def make() -> Json:
            drafter = self._halves.head(target, draft)
            return head_runs(self._halves.decoder(target), drafter, self.texts, draft.n_predict)

        return make
