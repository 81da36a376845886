"""All pieces of a joint search, each measured once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
import math
from typing import Any

import torch

from qspec.kept import Kept
from qspec.measure.fidelity import measure_fidelity
from qspec.nn.lm import GreedyLM
from qspec.pair.drafters.kind import Weights
from qspec.pair.drafters.registry import kind_of
from qspec.planning.tune_space import PLAIN
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.schema.drafts import Draft, DraftSpec
from qspec.schema.tuning import TuneSpec
from qspec.speculation.engine import generate
from qspec.speculation.types import Sampling
from qspec.tune.halves import Halves
from qspec.tune.pieces import (
    Json,
    Texts,
    answer_logits,
    bookkeeping,
    distributions,
    draft_runs,
    pass_times,
    prompt_seconds,
)
from qspec.tune.predict import DraftPiece, Passes, Rounds, SeparableModel, TargetPiece, passes_of

ROUNDS = 30
"""Rounds of every draft length whose bookkeeping is timed."""


class Pieces:
    """Measures what `SeparableModel` is made of, on `prompts`, once.

    kept: what halves say, on whatever machine. timed: what holds seconds.
    """

    def __init__(
        self,
        halves: Halves,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        kept: Kept,
        timed: Kept,
        progress: Progress,
    ) -> None:
        self.halves, self._prompts, self.sampling = halves, prompts, sampling
        self.kept, self._timed, self.progress = kept, timed, progress
        self._recipe = halves.space.recipe
        self._spec: TuneSpec[Draft] = halves.space.spec

    def model(self) -> SeparableModel:
        """Everything timed here."""
        times = self._times()
        targets = {name: self.target(name, passes_of(times[name])) for name in self.halves.space.targets}
        passes = {name: passes_of(times[name]) for name in self.halves.with_weights}
        drafts = {name: self.draft(name, passes.get(name, {})) for name in self.halves.space.drafts if name != PLAIN}
        return SeparableModel(targets, drafts, self._rounds())

    @cached_property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """The original's greedy answers, which every half is asked about."""

        def make() -> Json:
            answers = []
            for prompt in self.progress.track(self._prompts, "answers of the original", len(self._prompts)):
                generator = torch.Generator().manual_seed(self._recipe.seed)
                original = self.halves.original
                generation = generate(original, None, None, prompt, self._spec.tokens, Sampling(), (), generator)
                answers.append(generation.tokens)
            return {"answers": answers}

        settings = [self._source, self._prompts, self._spec.tokens]
        return list(zip(self._prompts, self.kept.value("answers", settings, make)["answers"], strict=True))

    @property
    def rows(self) -> list[int]:
        """Rows of a sequence that passes are timed at."""
        return sorted({1, 2, *(length + 1 for length in self._spec.lengths)})

    @property
    def _greedy(self) -> bool:
        """Whether targets choose tokens in their passes."""
        targets = map(self.halves.decoder, self.halves.space.targets)
        return self.sampling.greedy and all(isinstance(lm, GreedyLM) for lm in targets)

    @property
    def _source(self) -> Json:
        return dict(self.halves.target.source)

    @property
    def _machine(self) -> Json:
        return {key: environment()[key] for key in ("cpu", "threads", "qspec", "torch")}

    def setting(self, names: Iterable[str]) -> Any:
        """Settings that decide a piece of these halves."""

        def facts(name: str) -> Any:
            model, size = self.halves.model(name), self.halves.draft_vocab(name)
            own = [self.halves.spec(name).model_dump(mode="json"), dict(model.source), model.arch.n_layers]
            ids = [size, self._recipe.calibration.model_dump(mode="json"), self._recipe.seed]
            return [*own, ids] if size else own

        specs = {name: facts(name) for name in names}
        return [self._source, specs, self._machine, self.halves.engine]

    def _times(self) -> Json:
        spec, names = self._spec, [*self.halves.space.targets, *self.halves.with_weights]
        rows = self.rows

        def make() -> Json:
            lms = {name: self.halves.decoder(name) for name in names}
            greedy = list(self.halves.space.targets) if self._greedy else []
            return pass_times(lms, rows, spec.batches, spec.context, spec.repeats, self.progress, greedy)

        facts = [self.setting(names), rows, spec.batches, spec.context, spec.repeats]
        return dict(self._timed.value("times", facts, make))

    def _rounds(self) -> Rounds:
        spec, vocab = self._spec, self.halves.target.arch.vocab_size
        facts = [self._machine, vocab, spec.lengths, spec.context, asdict(self.sampling)]

        def make() -> Json:
            return bookkeeping(vocab, spec.lengths, spec.context, self.sampling, ROUNDS, self._greedy)

        kept = self._timed.value("rounds", facts, make)
        return Rounds(*({int(d): s for d, s in kept[part].items()} for part in ("engine", "draft")))

    def target(self, name: str, passes: Passes) -> TargetPiece:
        """Harm, prompts and distributions of a target, whose passes take what is given."""
        fidelity, text = self._recipe.evaluation.fidelity, self.texts

        def make() -> Json:
            self.progress.stage(f"accuracy of {name}")
            halves = self.halves
            lm, harm = halves.decoder(name), Json(kl=math.nan, kl_ci=None, top1=math.nan)
            if fidelity is not None:
                measured = measure_fidelity(halves.original, lm, halves.target.tokenizer, fidelity, self.progress)[0]
                harm = {"kl": measured.kl.value, "kl_ci": measured.kl.ci, "top1": measured.top1_agreement.value}
            return harm | {"distributions": distributions(answer_logits(lm, text), self.sampling)}

        settings = [self.setting([name]), fidelity and fidelity.model_dump(mode="json"), text, asdict(self.sampling)]
        kept = self.kept.value("target", settings, make)
        ci, ttft = kept["kl_ci"] and tuple(kept["kl_ci"]), max(self._prompt_seconds(name, text))
        return TargetPiece(passes, kept["kl"], ci, kept["top1"], ttft, kept["distributions"])

    def draft(self, name: str, passes: Passes) -> DraftPiece:
        """Distributions of a draft, and its prompts or calls; passes: of a draft with weights."""
        draft, text, most = self.halves.space.drafts[name].recipe.draft, self.texts, max(self._spec.lengths)
        settings = [draft.model_dump(mode="json"), self._source, text, most, asdict(self.sampling)]
        if draft.drafts_from == "text":
            arch = self.halves.target.arch
            drafter = kind_of(draft).drafter(Weights(), arch, arch.vocab_size)
            kept = self._timed.value("lookup", settings, lambda: draft_runs(drafter, text, most))
            return DraftPiece(runs={"": kept}, seconds=kept["seconds"])
        if draft.drafts_from == "states":
            targets = [target for target, drafts in self.halves.space.pairs if drafts == name]
            runs = {t: self._timed.value("head", [*settings, self.setting([t])], self._head(t, draft)) for t in targets}
            seconds = sum(kept["seconds"] for kept in runs.values()) / max(1, len(runs))
            return DraftPiece(runs=runs, seconds=seconds, per_token=True)

        def make() -> Json:
            self.progress.stage(f"answers of {name}")
            return distributions(answer_logits(self.halves.decoder(name), text), self.sampling)

        probs = self.kept.value("draft", [*settings, self.setting([name])], make)
        begun = [([*prompt, *answer[:1]], answer) for prompt, answer in text]
        return DraftPiece(passes, probs, self._prompt_seconds(name, begun))

    def _prompt_seconds(self, name: str, texts: Texts) -> list[float]:
        def make() -> Json:
            return {"seconds": prompt_seconds(self.halves.decoder(name), texts)}

        facts = [self.setting([name]), [prompt for prompt, _ in texts]]
        seconds: list[float] = self._timed.value("prompts", facts, make)["seconds"]
        return seconds

    def _head(self, target: str, draft: DraftSpec) -> Callable[[], Json]:
        most = draft.longest or max(self._spec.lengths)
        return lambda: draft_runs(self.halves.head(target, draft), self.texts, most, self.halves.decoder(target))
