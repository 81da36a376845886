"""Open a packaged pair: the engine runs exactly the files that were packaged."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from qspec.bridges import compressed
from qspec.bridges.text import prompt_tokens
from qspec.errors import IntegrityError, RecipeError
from qspec.nn.engines import AnyDecoder, open_decoder
from qspec.ops.select import Kernels
from qspec.records import ArchMap, QuantizedModel
from qspec.schema.manifest import NAME, Manifest
from qspec.schema.problems import validate
from qspec.schema.recipe import (
    MOST_SEED,
    DraftLengthSpec,
    Dtype,
    LookupDraft,
    ModelDraft,
    NgramDraft,
    Recipe,
    SelfDraft,
    SuffixDraft,
)
from qspec.spec import draft_length, engine
from qspec.spec.drafters.combined import CombinedDrafter
from qspec.spec.drafters.model import ModelDrafter
from qspec.spec.drafters.ngram import NgramDrafter
from qspec.spec.drafters.suffix import SuffixDrafter
from qspec.spec.stats import SpecStats
from qspec.spec.types import Drafter, DraftLength, Generation, Sampling
from qspec.stages.check import real_vocab

_TIMED_STEPS = 5
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Completion:
    """Answer to one prompt. `stats` is None when nothing was decoded speculatively."""

    text: str
    generation: Generation
    stats: SpecStats | None

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token."""
        return (len(self.generation.tokens) - 1) / self.generation.seconds if self.generation.seconds else 0.0


@dataclass(frozen=True)
class LoadedPair:
    """A target, its drafter and the draft-length policy, ready to run on this machine."""

    folder: Path
    manifest: Manifest
    recipe: Recipe
    model: QuantizedModel
    draft_model: QuantizedModel | None
    target: AnyDecoder
    drafter: Drafter
    policy: DraftLength

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        speculative: bool = True,
        on_text: Callable[[str], None] | None = None,
        domain: str = "",
    ) -> Completion:
        """Answer `prompt` (through the chat template, if there is one); the law is the target's, drafts or not.

        Sampling defaults are the recipe's. `on_text` receives text as soon as it is certain. `domain` names the kind of
        request, for draft lengths that learn (`confidence`, `optimal`); under these the same seed may give another
        sample of the same law.
        """
        if not 0 <= seed <= MOST_SEED:
            raise RecipeError(f"seed {seed}", f"must lie in 0 to {MOST_SEED}", "choose another")
        law = self.recipe.speculation
        sampling = Sampling(
            law.temperature if temperature is None else temperature,
            law.top_k if top_k is None else top_k,
            law.top_p if top_p is None else top_p,
        )
        stream = _TextStream(self.model.tokenizer.decode, on_text)
        generation = engine.generate(
            self.target,
            self.drafter if speculative else None,
            self.policy,
            prompt_tokens(self.model.tokenizer, prompt)[0],
            max_new_tokens,
            sampling,
            self.model.arch.eos_ids,
            torch.Generator().manual_seed(seed),
            stream.add,
            domain,
        )
        stats = None
        if any(step.drafted for step in generation.steps):
            stats = SpecStats.from_steps(generation.steps, self._plain_step_seconds())
        return Completion(stream.finish(), generation, stats)

    def new_drafter(self) -> Drafter:
        """A drafter on the same draft model, with a memory of its own."""
        if isinstance(self.recipe.draft, LookupDraft):
            return lookup_drafter(self.recipe.draft)
        assert isinstance(self.recipe.draft, ModelDraft | SelfDraft)
        model = self.drafter.model if isinstance(self.drafter, CombinedDrafter) else self.drafter
        return with_lookup(model, self.recipe.draft)

    def _plain_step_seconds(self) -> float:
        """Median time of one plain decoding step at the present context length."""
        seconds = []
        for _ in range(_TIMED_STEPS):
            self.target.truncate(self.target.length - 1)
            begin = perf_counter()
            self.target.forward(torch.tensor([0]))
            seconds.append(perf_counter() - begin)
        return median(seconds)


def open_pair(folder: str | Path, kernels: Kernels = "auto") -> LoadedPair:
    """Load a pair from its folder. Raises `IntegrityError` if there is none; `stages.check` verifies every byte."""
    folder = Path(folder)
    try:
        manifest = Manifest.parse((folder / NAME).read_bytes())
    except OSError as error:
        raise IntegrityError(str(folder), f"holds no readable {NAME}", "give the folder of a pair") from error
    recipe = validate(Recipe, manifest.recipe, f"{folder}/{NAME}: recipe", IntegrityError)
    target = compressed.read(folder / "target")
    draft = None if isinstance(recipe.draft, LookupDraft) else compressed.read(folder / "draft")
    length = recipe.speculation.max_length or target.arch.max_positions
    options: dict[str, Any] = {"dtype": compute_dtype(recipe.dtype), "kernels": kernels}
    return LoadedPair(
        folder,
        manifest,
        recipe,
        target,
        draft,
        open_decoder(target, max_length=length, **options),
        _drafter(recipe, target.arch, draft, length, options),
        draft_policy(recipe.speculation.draft_length),
    )


def draft_policy(spec: DraftLengthSpec) -> DraftLength:
    """A policy of its own: one that learns must not be shared by different pairs."""
    return draft_length.build(spec.policy, spec.k, spec.max_k, spec.threshold, spec.by_batch)


def lookup_drafter(spec: NgramDraft | SuffixDraft) -> Drafter:
    """The drafter of a draft without weights."""
    if isinstance(spec, NgramDraft):
        return NgramDrafter(spec.min_ngram, spec.max_ngram)
    return SuffixDrafter(spec.min_match, spec.max_match, spec.memory_mb, spec.across_requests)


def with_lookup(model: Drafter, draft: ModelDraft | SelfDraft) -> Drafter:
    """A draft model behind the lookup that its recipe asks for, at that kind's defaults."""
    if draft.lookup == "none":
        return model
    lookup = NgramDraft(kind="ngram") if draft.lookup == "ngram" else SuffixDraft(kind="suffix")
    return CombinedDrafter(lookup_drafter(lookup), model)


def compute_dtype(name: Dtype) -> torch.dtype:
    """The dtype that activations have; `auto` is float32, the fastest exact choice of a CPU without bfloat16 units."""
    return torch.float32 if name == "auto" else getattr(torch, name)


def _drafter(
    recipe: Recipe, arch: ArchMap, draft: QuantizedModel | None, length: int, options: dict[str, Any]
) -> Drafter:
    if isinstance(recipe.draft, LookupDraft):
        return lookup_drafter(recipe.draft)
    assert draft is not None
    assert isinstance(recipe.draft, ModelDraft | SelfDraft)
    decoder = open_decoder(draft, max_length=min(length, draft.arch.max_positions), **options)
    tokens = real_vocab(draft.tokenizer)
    return with_lookup(ModelDrafter(decoder, arch.vocab_size, arch.eos_ids, tokens), recipe.draft)


class _TextStream:
    """Turns tokens into text, holding back characters whose bytes are not all there."""

    def __init__(self, decode: Callable[[list[int]], str], on_text: Callable[[str], None] | None) -> None:
        self._decode, self._on_text = decode, on_text
        self._tokens: list[int] = []
        self._shown = 0

    def add(self, tokens: list[int]) -> None:
        self._tokens += tokens
        if self._on_text is not None and not (text := self._decode(self._tokens)).endswith(_UNFINISHED):
            self._emit(text)

    def finish(self) -> str:
        text = self._decode(self._tokens)
        self._emit(text)
        return text

    def _emit(self, text: str) -> None:
        if self._on_text is not None and len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)
