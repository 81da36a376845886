"""Drafts that are transformers: a smaller model of the same tokenizer, or a copy of the target under its own plan."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from qspec.errors import RecipeError
from qspec.models.layers import require_layers, truncate_layers
from qspec.models.load import Header, load
from qspec.models.vocab import check_tokenizers, match_rows
from qspec.nn.engines import AnyDecoder
from qspec.pair.drafters.kind import DraftKind, DraftShape, Snippet, Weights
from qspec.pair.drafters.lookup import behind
from qspec.records import ArchMap, LoadedModel, QuantizedModel
from qspec.schema.devices import DeviceSheet, read_device
from qspec.schema.drafts import ModelDraft, SelfDraft
from qspec.schema.recipe import Recipe
from qspec.scheme_table import ADA, SCHEMES
from qspec.schemes.device_rules import PlanFinding
from qspec.schemes.exports import (
    HEAD,
    WHOLE_HEAD,
    by_batch,
    kv_cache_dtype,
    rounds_head,
    transformers_lacks,
    vllm_weights,
)
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.tree import TreeDrafter
from qspec.speculation.types import Drafter

M = TypeVar("M", ModelDraft, SelfDraft)


class ModelKind(DraftKind[M], Generic[M]):
    """A draft with a forward pass of its own."""

    def load(self, target: LoadedModel | QuantizedModel, open_draft: Callable[[], AnyDecoder]) -> Weights:
        return Weights(decoder=open_draft())

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        assert weights.decoder is not None
        tree = self.spec.tree
        if tree is None:
            model: Drafter = ModelDrafter(weights.decoder, target.vocab_size, target.eos_ids, tokens)
        else:
            model = TreeDrafter(weights.decoder, tree.width, tree.depth, tree.nodes, target.eos_ids, tokens)
        return behind(self.spec.lookup, model)

    def findings(self, sheet: DeviceSheet, recipe: Recipe) -> Iterator[PlanFinding]:
        if self.spec.draft_vocab and sheet.capability is not None:
            rule = "a head for a part of the vocabulary runs in qspec's own engine (CPU) alone"
            yield PlanFinding("refused", f"draft_vocab {self.spec.draft_vocab} on {sheet.name}", rule, "omit it")
        target, draft = recipe.target.quantization.kv, self.spec.quantization.kv
        formats = [kv.format if kv else recipe.dtype for kv in (target, draft)]
        if formats[0] != formats[1] and sheet.capability is None:
            yield PlanFinding(
                "warning",
                f"KV formats {formats[0]} (target) and {formats[1]} (draft)",
                "vLLM on CPU aborts unless both halves have the same (qspec's own engine does not mind)",
                "give the draft the target's kv",
            )
        if draft is not None and draft.format == "fp8_e4m3" and sheet.capability == ADA:
            yield PlanFinding(
                "warning",
                f"draft KV fp8 on {sheet.name} (SM89)",
                "vLLM has crashed with FP8 draft KV on Ada",
                "the export says kv_cache_dtype: auto for the draft; set its kv: null to plan for that",
            )

    def kv_dtype(self, recipe: Recipe) -> str:
        """Its KV dtype for vLLM, always said aloud (unsaid it would be the target's).

        Ada crashes on an FP8 one, and vLLM takes no layers to skip for a draft.
        """
        kv = self.spec.quantization.kv
        dtype = kv_cache_dtype(kv) if kv is None or not kv.skip_layers else "auto"
        return "auto" if dtype == "fp8" and read_device(recipe.device).capability == ADA else dtype

    def vllm_config(self, recipe: Recipe, folder: str) -> dict[str, Any]:
        length = recipe.speculation.draft_length
        config: dict[str, Any] = {"method": "draft_model", "model": folder, "num_speculative_tokens": length.k}
        config |= by_batch(length)
        if SCHEMES[self.spec.quantization.scheme].weight is not None:
            config["quantization"] = "compressed-tensors"
        return config | {"kv_cache_dtype": self.kv_dtype(recipe)}

    def in_vllm(self, recipe: Recipe, sheet: DeviceSheet) -> tuple[bool, str]:
        quantization = self.spec.quantization
        served, detail = vllm_weights(quantization, sheet, "draft")
        if not served:
            return False, detail
        detail = f"method draft_model: draft/ ({quantization.scheme}){self._shortened()}"
        if rounds_head(quantization):
            detail += HEAD
        if sheet.capability is None:
            if kv_cache_dtype(recipe.target.quantization.kv) != self.kv_dtype(recipe):
                return False, "on CPU both halves need the same KV dtype, vLLM aborts otherwise"
            detail += "; on CPU greedy only (temperatures are lost there)"
        return True, detail

    def _shortened(self) -> str:
        return ""

    def in_transformers(self) -> tuple[bool, str]:
        lacks = transformers_lacks(self.spec.quantization)
        if lacks is not None:
            return False, lacks
        detail = "assistant_model, batch 1, dynamic cache: proves function, not speed"
        return True, detail + (WHOLE_HEAD if self.spec.draft_vocab else "")

    def snippet(self, recipe: Recipe, pair: str) -> Snippet:
        length = recipe.speculation.draft_length
        schedule = "heuristic" if length.policy == "heuristic" else "constant"
        first = length.max_k if length.policy == "confidence" else length.k
        lines = [
            f'draft = AutoModelForCausalLM.from_pretrained("{pair}/draft", dtype="auto")',
            f"draft.generation_config.num_assistant_tokens = {first}",
            f'draft.generation_config.num_assistant_tokens_schedule = "{schedule}"',
            "draft.generation_config.do_sample = False",
        ]
        if length.policy == "confidence":
            lines.append(f"draft.generation_config.assistant_confidence_threshold = {length.threshold}")
        return Snippet(tuple(lines), "assistant_model=draft")


class SmallerModel(ModelKind[ModelDraft]):
    """A smaller model, as it came or trained from the target's layers."""

    of = ModelDraft
    separate = True

    def original(self, target: LoadedModel) -> LoadedModel:
        draft = load(self.spec.source)
        check_tokenizers(target.tokenizer, draft.tokenizer)
        return match_rows(draft, target.arch.vocab_size)

    def shape(self, recipe: Recipe, target: ArchMap, own: Header | None) -> DraftShape:
        spec = self.spec
        if own is None:
            assert spec.training is not None
            layers = spec.training.layers
            require_layers(layers, target)
            kept = target.keep(range(layers) if isinstance(layers, int) else layers)
            return DraftShape(spec.model, kept, spec.quantization, target.vocab_size)
        padded = replace(own.arch, vocab_size=target.vocab_size)
        return DraftShape(spec.model, padded, spec.quantization, own.arch.vocab_size, own.width(recipe.dtype))


class SelfCopy(ModelKind[SelfDraft]):
    """The target itself, or its first layers, at lower precision."""

    of = SelfDraft

    @property
    def measured_as(self) -> str:
        if self.spec.layers is not None or self.spec.quantization.scheme != "W4A16":
            return ""
        return "self w4 + suffix" if self.spec.lookup == "suffix" else "self w4"

    def original(self, target: LoadedModel) -> LoadedModel:
        return target if self.spec.layers is None else truncate_layers(target, self.spec.layers)

    def shape(self, recipe: Recipe, target: ArchMap, own: Header | None) -> DraftShape:
        layers = self.spec.layers
        if layers is not None and layers > target.n_layers:
            rule = f"the target has {target.n_layers} layers"
            raise RecipeError(f"draft.layers {layers}", rule, "keep fewer, or omit it")
        kept = target.keep(range(layers or target.n_layers))
        return DraftShape(recipe.target.model, kept, self.spec.quantization, target.vocab_size)

    def _shortened(self) -> str:
        layers = self.spec.layers
        return "" if layers is None else f" is an ordinary checkpoint with {layers} layers"
