"""From the recipe's draft to drafters and policies of the engine."""

from collections.abc import Callable
from typing import assert_never

from qspec.models.vocab import real_vocab
from qspec.nn.engines import AnyDecoder
from qspec.nn.lm import LM
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.pair.head import head_folder, open_head
from qspec.provenance import digest_of
from qspec.records import ArchMap, LoadedModel, QuantizedModel
from qspec.schema.recipe import (
    Draft,
    DraftLengthSpec,
    Lookup,
    LookupDraft,
    MlpDraft,
    ModelDraft,
    NgramDraft,
    SelfDraft,
    SuffixDraft,
)
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.length import policies as draft_length
from qspec.speculation.types import Drafter, DraftLength

_NO_WEIGHTS = {"lookup", "tree", "candidates", "top_k", "training"}
"""Fields of drafts that say how weights are used or made, and not which."""


def draft_policy(spec: DraftLengthSpec) -> DraftLength:
    """A policy of its own: one that learns must not be shared by different pairs."""
    return draft_length.build(spec.policy, spec.k, spec.max_k, spec.threshold, spec.by_batch)


def request_policy(spec: DraftLengthSpec) -> DraftLength:
    """A policy for one request of a batch, which `generate_batch` caps by the number of requests."""
    return draft_policy(spec.model_copy(update={"by_batch": ()}))


class Drafters:
    """Drafters for one target; drafts of equal weights share their model."""

    def __init__(self, target: LoadedModel | QuantizedModel) -> None:
        self._target, self._tokens = target, real_vocab(target.tokenizer)
        self._decoders: dict[str, AnyDecoder] = {}
        self._heads: dict[str, MLPSpeculator] = {}

    def new(self, draft: Draft, open_draft: Callable[[], AnyDecoder]) -> Drafter:
        """One that has learned nothing yet, with a cache of its own; `open_draft` opens a draft model once."""
        if isinstance(draft, LookupDraft):
            return lookup_drafter(draft)
        arch, weights = self._target.arch, digest_of(draft.model_dump(mode="json", exclude=_NO_WEIGHTS))
        if isinstance(draft, MlpDraft):
            if weights not in self._heads:
                self._heads[weights] = open_head(head_folder(draft, arch), self._target)
            return mlp_drafter(self._heads[weights], draft, arch, self._tokens)
        if weights not in self._decoders:
            self._decoders[weights] = open_draft()
        return model_drafter(self._decoders[weights].fork(), draft, arch, self._tokens)


def lookup_drafter(spec: LookupDraft) -> Drafter:
    """The drafter of a draft without weights."""
    match spec:
        case NgramDraft():
            return NgramDrafter(spec.min_ngram, spec.max_ngram, spec.branches)
        case SuffixDraft():
            return SuffixDrafter(spec.min_match, spec.max_match, spec.memory_mb, spec.across_requests, spec.branches)
    assert_never(spec)


def model_drafter(decoder: AnyDecoder, draft: ModelDraft | SelfDraft, target: ArchMap, tokens: int) -> Drafter:
    """The drafter of a draft model, behind the lookup that its recipe asks for, at that kind's defaults.

    tokens: ids of the target's vocabulary that are no padding.
    """
    model: Drafter = ModelDrafter(decoder, target.vocab_size, target.eos_ids, tokens)
    if draft.tree is not None:
        tree = draft.tree
        model = TreeDrafter(decoder, tree.width, tree.depth, tree.nodes, target.eos_ids, tokens)
    return _behind(draft.lookup, model)


def mlp_drafter(head: MLPSpeculator, draft: MlpDraft, target: ArchMap, tokens: int) -> Drafter:
    """The drafter of a speculator head, behind the lookup that its recipe asks for."""
    return _behind(draft.lookup, MlpDrafter(head, target.eos_ids, tokens, draft.candidates, draft.top_k))


def _behind(lookup: Lookup, model: Drafter) -> Drafter:
    """A drafter behind a lookup at that kind's defaults, if there is to be one."""
    if lookup == "none":
        return model
    first = NgramDraft(kind="ngram") if lookup == "ngram" else SuffixDraft(kind="suffix")
    return CombinedDrafter(lookup_drafter(first), model)


def draft_lm(drafter: Drafter | None) -> LM | None:
    """The draft model that a drafter asks; None for one without."""
    inner = drafter.model if isinstance(drafter, CombinedDrafter) else drafter
    return inner.lm if isinstance(inner, ModelDrafter | TreeDrafter) else None
