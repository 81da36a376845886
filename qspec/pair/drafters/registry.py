"""All kinds of drafts, and drafters and draft-length policies from a recipe's settings."""

from collections.abc import Callable
from typing import Any

from qspec.models.vocab import real_vocab
from qspec.nn.engines import AnyDecoder
from qspec.nn.lm import LM
from qspec.pair.drafters.eagle3 import Eagle3Head
from qspec.pair.drafters.kind import DraftKind, Weights
from qspec.pair.drafters.lookup import Ngram, Suffix
from qspec.pair.drafters.mlp import SpeculatorHead
from qspec.pair.drafters.model import SelfCopy, SmallerModel
from qspec.provenance import digest_of
from qspec.records import LoadedModel, QuantizedModel
from qspec.schema.drafts import USES, DraftSpec
from qspec.schema.recipe import DraftLengthSpec
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.length import policies
from qspec.speculation.types import Drafter, DraftLength, HeadDrafter

KINDS: dict[type[DraftSpec], type[DraftKind[Any]]] = {
    kind.of: kind for kind in (SmallerModel, SelfCopy, Ngram, Suffix, SpeculatorHead, Eagle3Head)
}


def kind_of(spec: DraftSpec) -> DraftKind[Any]:
    """The object of a recipe's draft."""
    return KINDS[type(spec)](spec)


def draft_policy(spec: DraftLengthSpec) -> DraftLength:
    """A policy of its own: one that learns must not be shared by different pairs."""
    return policies.build(spec.policy, spec.k, spec.max_k, spec.threshold, spec.by_batch)


def request_policy(spec: DraftLengthSpec) -> DraftLength:
    """A policy for one request of a batch, which `generate_batch` caps by the number of requests."""
    return draft_policy(spec.model_copy(update={"by_batch": ()}))


class Drafters:
    """Drafters for one target; drafts of equal weights share their model."""

    def __init__(self, target: LoadedModel | QuantizedModel) -> None:
        self._target, self._tokens = target, real_vocab(target.tokenizer)
        self._weights: dict[str, Weights] = {}

    def new(self, draft: DraftSpec, open_draft: Callable[[], AnyDecoder]) -> Drafter:
        """One that has learned nothing yet, with a cache of its own; `open_draft` opens a draft model once."""
        kind, key = kind_of(draft), digest_of(draft.model_dump(mode="json", exclude=USES | {"training"}))
        if key not in self._weights:
            self._weights[key] = kind.load(self._target, open_draft)
        return kind.drafter(self._weights[key].fork(), self._target.arch, self._tokens)


def head_drafter(kind: DraftKind[Any], weights: Weights, target: QuantizedModel) -> HeadDrafter:
    """The drafter of a head, without the lookup in front of it."""
    drafter = kind.drafter(weights, target.arch, real_vocab(target.tokenizer))
    inner = drafter.model if isinstance(drafter, CombinedDrafter) else drafter
    assert isinstance(inner, HeadDrafter), "a head has states to read"
    return inner


def draft_lm(drafter: Drafter | None) -> LM | None:
    """The draft model that a drafter asks; None for one without."""
    inner = drafter.model if isinstance(drafter, CombinedDrafter) else drafter
    return inner.lm if isinstance(inner, ModelDrafter | TreeDrafter) else None
