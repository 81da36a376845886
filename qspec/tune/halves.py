"""The halves of a joint search in memory: quantized models by name, their decoders, and what drafts for a target."""

from functools import cached_property
from pathlib import Path

from qspec.bridges import compressed
from qspec.measure.arm import Arm
from qspec.models.load import load
from qspec.models.vocab import limited
from qspec.nn.engines import AnyDecoder, engine_name
from qspec.pair.drafters.registry import Drafters, draft_policy, kind_of
from qspec.pair.open import compute_dtype, open_fitting
from qspec.planning.tune_space import PLAIN, Space
from qspec.progress import Progress
from qspec.quantization.job import Calibration, quantized_half
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.drafts import DraftSpec
from qspec.schema.quantization import QuantSpec
from qspec.speculation.types import Drafter

ORIGINAL = "original"


class Halves:
    """Decoders of a space by name; all stay in memory, since they take turns. Quantized ones are kept in `folder`."""

    def __init__(self, space: Space, folder: Path, progress: Progress) -> None:
        self.space, self._folder, self._progress = space, folder, progress
        self._recipe = space.recipe
        self._decoders: dict[str, AnyDecoder] = {}
        self._drafts: dict[str, LoadedModel] = {}
        self._models: dict[str, QuantizedModel] = {}
        self._drafters: dict[str, Drafters] = {}

    @cached_property
    def target(self) -> LoadedModel:
        """The original. Heads of other sizes are refused before it is loaded."""
        self._progress.stage("load")
        for planned in self.space.drafts.values():
            kind_of(planned.recipe.draft).require_files(planned.target.arch)
        return load(self._recipe.target)

    @cached_property
    def _text(self) -> Calibration:
        return Calibration(self._recipe.calibration, self.target.tokenizer, self._recipe.seed, self._progress)

    @property
    def max_length(self) -> int:
        return min(self._recipe.speculation.max_length or 10**9, self.target.arch.max_positions)

    @property
    def original(self) -> AnyDecoder:
        return self.decoder(ORIGINAL)

    @property
    def engine(self) -> str:
        return engine_name(self.original)

    @property
    def with_weights(self) -> list[str]:
        """Drafts that are models."""
        drafts = self.space.drafts.items()
        return [n for n, pair in drafts if n != PLAIN and pair.recipe.draft.quantized is not None]

    def spec(self, name: str) -> QuantSpec:
        """How a half is quantized."""
        if name in self.space.targets:
            return self.space.targets[name].recipe.target.quantization
        quantized = self.space.drafts[name].recipe.draft.quantized
        assert quantized is not None
        return quantized

    def draft_vocab(self, name: str) -> int:
        """Ids that a half can draft; 0: all, as of targets."""
        return 0 if name in self.space.targets else self.space.drafts[name].recipe.draft.head_rows

    def decoder(self, name: str) -> AnyDecoder:
        if name not in self._decoders:
            self._decoders[name] = self.opened(self.target if name == ORIGINAL else self.quantized(name))
        return self._decoders[name]

    def opened(self, model: LoadedModel | QuantizedModel) -> AnyDecoder:
        """A decoder of any model, with room for as much as the others."""
        length = min(self.max_length, model.arch.max_positions)
        return open_fitting("another half of the search", model, length, dtype=compute_dtype(self._recipe.dtype))

    def quantized(self, name: str) -> QuantizedModel:
        if name not in self._models:
            names = [*self.space.targets, *self.with_weights]
            self._progress.say(f"half {names.index(name) + 1} of {len(names)}: {name}")
            self._models[name] = self.made(
                self.model(name), self.spec(name), self.kept_as(name), self.draft_vocab(name)
            )
        return self._models[name]

    def made(self, model: LoadedModel, spec: QuantSpec, name: str, ids: int = 0) -> QuantizedModel:
        """A model under a spec, kept under a name; ids: how many it can draft, 0: all."""
        plain = "".join(c if c.isalnum() else "-" for c in name)
        made = compressed.read(quantized_half(self._recipe, spec, model, self._text, self._folder, plain))
        return limited(made, ids, self._text.rows) if ids else made

    def kept_as(self, name: str) -> str:
        """The name that a half's codes are kept under: one for all forms that differ in their ids alone."""
        return next((form.whole.label for form in self.space.forms if form.label == name), name)

    def model(self, name: str) -> LoadedModel:
        """A half before it is quantized."""
        if name in self.space.targets:
            return self.target
        recipe = self.space.drafts[name].recipe
        if name not in self._drafts:
            draft = kind_of(recipe.draft).original(self.target)
            assert draft is not None, "only drafts that are models are asked for"
            self._drafts[name] = draft
        return self._drafts[name]

    def arm(self, target: str, draft: str, gamma: int) -> Arm:
        """A combination to run, with a drafter and a policy of its own; gamma 0 keeps the recipe's draft length."""
        lm = self.decoder(target)
        if draft == PLAIN:
            return Arm(lm)
        recipe = self.space.recipe_of(next(iter(self.space.targets)) if target == ORIGINAL else target, draft, gamma)
        return Arm(lm, self._drafter(target, recipe.draft, draft), draft_policy(recipe.speculation.draft_length))

    def head(self, target: str, draft: DraftSpec) -> Drafter:
        """The drafter of a speculator head, which reads the states of one target."""
        return self._drafter(target, draft)

    def _drafter(self, target: str, draft: DraftSpec, name: str = "") -> Drafter:
        """name: of a draft model."""
        if target not in self._drafters:
            self._drafters[target] = Drafters(self.target if target == ORIGINAL else self.quantized(target))
        return self._drafters[target].new(draft, lambda: self.decoder(name))
