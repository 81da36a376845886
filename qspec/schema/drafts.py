"""Drafts as recipes name them: one class per kind, and what every kind says of itself.

What a kind does stands in `pair.drafters`.
"""

from itertools import pairwise
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from qspec.schema.problems import rule
from qspec.schema.quantization import MOST, ModelSpec, QuantSpec, Strict
from qspec.schema.training import DistillSpec, Eagle3Spec, HeadSpec, TrainingSpec

MOST_PATHS = 4096
"""Paths of a tree of which the likeliest are taken; their states are in memory together."""
Lookup = Literal["none", "ngram", "suffix"]
"""The lookup that drafts before a draft model; the model drafts where the lookup finds nothing or does worse."""


class DraftSpec(Strict):
    """The fields that all kinds of drafts share; other rooms read the properties of any draft.

    drafts_from: what a proposal follows from: the text alone, the target's hidden states, or a model of its own.
    trained_as: the folder that `train-draft` makes, below its output. beside_lookup: whether prompt lookup is measured
    beside it.
    """

    kind: str
    drafts_from: ClassVar[Literal["text", "states", "model"]] = "text"
    trained_as: ClassVar[str] = ""
    beside_lookup: ClassVar[bool] = True

    @classmethod
    def choices(cls) -> list[type["DraftSpec"]]:
        """The classes of all kinds."""
        return list(DRAFTS.values())

    @property
    def folder(self) -> str | None:
        """Where its files lie in a pair; None for a draft without weights."""
        return None if self.drafts_from == "text" else "draft"

    @property
    def quantized(self) -> QuantSpec | None:
        """How its model is quantized; None for a draft that is no model."""
        return None

    @property
    def source(self) -> ModelSpec | None:
        """Where its own files come from; None for one that needs none."""
        return None

    @property
    def trains(self) -> TrainingSpec | None:
        """How `train-draft` makes it."""
        return None

    @property
    def first(self) -> Lookup:
        """The lookup that it drafts behind."""
        return "none"

    @property
    def head_rows(self) -> int:
        """Ids that a draft model's head is run for; 0: all, or no such draft."""
        return 0

    @property
    def longest(self) -> int | None:
        """Tokens that it can draft at once; None without a limit of its own."""
        return None

    @property
    def branching(self) -> bool:
        """Whether it may propose several candidates for one position."""
        return False


USES = {"lookup", "tree", "candidates", "top_k"}
"""Fields of drafts that say how weights are used, and not which."""


class _AnyKind:
    """The schema of a draft: that of the class which its field `kind` names, among those that are known by then."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[Any, CoreSchema] = {kind: handler(cls) for kind, cls in DRAFTS.items()}
        return core_schema.tagged_union_schema(choices, discriminator="kind")


Draft = Annotated[DraftSpec, _AnyKind()]


class TreeSpec(Strict):
    """Several continuations at once, verified in one pass: the `nodes` likeliest within `depth` tokens.

    `width`: nodes that each pass of the draft reads, and candidates behind each. The draft length caps the depth.
    """

    width: int = Field(default=4, ge=1, le=64)
    depth: int = Field(default=4, ge=1, le=64)
    nodes: int = Field(default=16, ge=1, le=256)


class DraftModel(DraftSpec):
    """Drafts that are transformers themselves.

    `draft_vocab`: ids that it can draft, those that the calibration text holds most often; 0 for all.
    """

    drafts_from = "model"
    draft_vocab: int = Field(default=0, ge=0, le=MOST)
    lookup: Lookup = "none"
    tree: TreeSpec | None = None
    quantization: QuantSpec = QuantSpec()

    @property
    def quantized(self) -> QuantSpec:
        return self.quantization

    @property
    def first(self) -> Lookup:
        return self.lookup

    @property
    def head_rows(self) -> int:
        return self.draft_vocab

    @property
    def branching(self) -> bool:
        return self.tree is not None


class ModelDraft(DraftModel):
    """A smaller model with the same tokenizer. `training`: how `qspec train-draft` makes it of the target's layers."""

    trained_as = "draft"
    kind: Literal["model"]
    model: str = Field(min_length=1)
    revision: str | None = None
    training: DistillSpec | None = None

    @property
    def source(self) -> ModelSpec:
        return ModelSpec(model=self.model, revision=self.revision, quantization=self.quantization)

    @property
    def trains(self) -> DistillSpec | None:
        return self.training


class SelfDraft(DraftModel):
    """A copy of the target under its own plan; `layers` keeps only the first so many."""

    kind: Literal["self"]
    layers: int | None = Field(default=None, ge=1)
    quantization: QuantSpec = QuantSpec(scheme="W4A16", group_size=64)


class LookupDraft(DraftSpec):
    """Drafts that continue the text as it went on before."""

    branches: int = Field(default=1, ge=1, le=64, description="continuations at once; above 1 a tree")

    @property
    def branching(self) -> bool:
        return self.branches > 1


class NgramDraft(LookupDraft):
    """Prompt lookup: continue the longest recent match of the last tokens. No weights."""

    beside_lookup = False
    kind: Literal["ngram"]
    min_ngram: int = Field(default=1, ge=1)
    max_ngram: int = Field(default=3, ge=1, le=64)

    @rule
    def _ordered(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; swap them")


class SuffixDraft(LookupDraft):
    """Suffix lookup: continue the longest match in the running text and in earlier requests, by votes. No weights."""

    kind: Literal["suffix"]
    min_match: int = Field(default=2, ge=1, le=64)
    max_match: int = Field(default=32, ge=1, le=1024)
    across_requests: bool = True
    memory_mb: float = Field(default=64, ge=0.1, le=1e6, description="10^6 bytes, for earlier requests and this one")

    @rule
    def _ordered(self) -> None:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}; swap them")


class MlpDraft(DraftSpec):
    """A combined token/embedding speculator (arXiv 2404.19124), trained before; sizes as in its `config.json`.

    `model`: a folder, `package:…` or Hub id, as of a target. `draft_vocab`: ids that it can draft, 0 for all. `shared`:
    embedding and output rows are the target's. `candidates` above 1: a tree of so many likeliest paths, `top_k` of
    each head being looked at. `training`: how `qspec train-draft` makes it.
    """

    drafts_from = "states"
    trained_as = "head"
    kind: Literal["mlp_speculator"]
    model: str = Field(min_length=1)
    revision: str | None = None
    n_predict: int = Field(default=3, ge=1, le=64)
    inner_dim: int = Field(default=0, ge=0, le=MOST, description="0: the target's hidden size")
    tie_weights: bool = False
    scale_input: bool = False
    draft_vocab: int = Field(default=0, ge=0, le=MOST)
    shared: bool = False
    candidates: int = Field(default=1, ge=1, le=64)
    top_k: tuple[Annotated[int, Field(ge=1, le=64)], ...] = ()
    lookup: Lookup = "none"
    training: HeadSpec | None = None

    @property
    def source(self) -> ModelSpec:
        return ModelSpec(model=self.model, revision=self.revision)

    @property
    def trains(self) -> HeadSpec | None:
        return self.training

    @property
    def first(self) -> Lookup:
        return self.lookup

    @property
    def longest(self) -> int:
        return self.n_predict

    @property
    def branching(self) -> bool:
        return self.candidates > 1

    @rule
    def _top_k_of_every_head(self) -> None:
        if self.top_k and len(self.top_k) != self.n_predict:
            raise ValueError(f"top_k has {len(self.top_k)} entries for {self.n_predict} heads; give one for each")
        if self.candidates > 1 and (paths := math.prod(self.top_k)) > MOST_PATHS:
            raise ValueError(f"top_k {list(self.top_k)} looks at {paths} paths, {MOST_PATHS} at most; give less")

    @rule
    def _own_rows_to_begin_with(self) -> None:
        if self.shared and self.training is not None and self.training.start == "target":
            raise ValueError("training.start: target is for rows of its own, shared ones are the target's; omit it")


class Eagle3Draft(DraftSpec):
    """An EAGLE-3 head (arXiv 2503.01840), whose sizes and switches are those of its `config.json`.

    `model`: a folder, `package:…` or Hub id, as of a target. `taps`: the target's layers whose entering residuals it
    reads, as vLLM counts; empty for those that its file names (of heads whose ids are layers' outputs, one more than
    there). `draft_vocab`: ids that it can draft; 0 for whatever the file says, of a new head for all. `training`: how
    `qspec train-draft` makes a new one.
    """

    drafts_from = "states"
    trained_as = "head"
    kind: Literal["eagle3"]
    model: str = Field(min_length=1)
    revision: str | None = None
    taps: tuple[Annotated[int, Field(ge=0, le=MOST)], ...] = ()
    draft_vocab: int = Field(default=0, ge=0, le=MOST)
    lookup: Lookup = "none"
    training: Eagle3Spec | None = None

    @property
    def source(self) -> ModelSpec:
        return ModelSpec(model=self.model, revision=self.revision)

    @property
    def trains(self) -> Eagle3Spec | None:
        return self.training

    @property
    def first(self) -> Lookup:
        return self.lookup

    @rule
    def _rising(self) -> None:
        if any(low >= high for low, high in pairwise(self.taps)):
            raise ValueError(f"taps {list(self.taps)} must name different layers in rising order; sort them")


DRAFTS: dict[str, type[DraftSpec]] = {
    "model": ModelDraft,
    "self": SelfDraft,
    "ngram": NgramDraft,
    "suffix": SuffixDraft,
    "mlp_speculator": MlpDraft,
    "eagle3": Eagle3Draft,
}
"""The class of every kind. One that is added is known to recipes from `Recipe.model_rebuild(force=True)` on."""
