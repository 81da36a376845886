"""Drafts that follow from the text alone: prompt lookup, and suffixes of this and earlier requests."""

from typing import Any, Generic, TypeVar

from qspec.pair.drafters.kind import DraftKind, Snippet, Weights
from qspec.records import ArchMap
from qspec.schema.devices import DeviceSheet
from qspec.schema.drafts import Lookup, NgramDraft, SuffixDraft
from qspec.schema.recipe import Recipe
from qspec.schemes.exports import by_batch
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.types import Drafter

L = TypeVar("L", NgramDraft, SuffixDraft)


class LookupKind(DraftKind[L], Generic[L]):
    """A draft without weights."""

    @property
    def measured_as(self) -> str:
        return self.spec.kind

    def settings(self) -> dict[str, Any]:
        return {self.spec.kind: self.spec.model_dump(mode="json", exclude={"kind"})}


class Ngram(LookupKind[NgramDraft]):
    """Prompt lookup."""

    of = NgramDraft

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        return NgramDrafter(self.spec.min_ngram, self.spec.max_ngram, self.spec.branches)

    def vllm_config(self, recipe: Recipe, folder: str) -> dict[str, Any]:
        length = recipe.speculation.draft_length
        bounds = {"prompt_lookup_min": self.spec.min_ngram, "prompt_lookup_max": self.spec.max_ngram}
        return {"method": "ngram", "num_speculative_tokens": length.k} | bounds | by_batch(length)

    def in_vllm(self, recipe: Recipe, sheet: DeviceSheet) -> tuple[bool, str]:
        return True, "method ngram: needs no draft files"

    def in_transformers(self) -> tuple[bool, str]:
        return True, "prompt_lookup_num_tokens"

    def snippet(self, recipe: Recipe, pair: str) -> Snippet:
        return Snippet(argument=f"prompt_lookup_num_tokens={recipe.speculation.draft_length.k}")


class Suffix(LookupKind[SuffixDraft]):
    """Suffix lookup."""

    of = SuffixDraft

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        spec = self.spec
        return SuffixDrafter(spec.min_match, spec.max_match, spec.memory_mb, spec.across_requests, spec.branches)

    def vllm_config(self, recipe: Recipe, folder: str) -> dict[str, Any]:
        k = recipe.speculation.draft_length.k
        depth = {"num_speculative_tokens": k, "suffix_decoding_max_tree_depth": self.spec.max_match + k}
        alone = {} if self.spec.across_requests else {"suffix_decoding_max_cached_requests": 0}
        return {"method": "suffix", **depth, **alone}

    def in_vllm(self, recipe: Recipe, sheet: DeviceSheet) -> tuple[bool, str]:
        detail = "method suffix: needs no draft files, but `pip install --no-deps arctic-inference==0.1.1`"
        if recipe.speculation.draft_length.by_batch:
            detail += "; by_batch is left out, it is not proven with this method"
        return True, detail

    def in_transformers(self) -> tuple[bool, str]:
        return False, "has no suffix lookup; prompt_lookup_num_tokens is nearest to it"


def behind(lookup: Lookup, model: Drafter) -> Drafter:
    """A drafter behind a lookup at that kind's defaults, if there is to be one."""
    match lookup:
        case "none":
            return model
        case "ngram":
            return CombinedDrafter(NgramDrafter(), model)
        case "suffix":
            return CombinedDrafter(SuffixDrafter(), model)
