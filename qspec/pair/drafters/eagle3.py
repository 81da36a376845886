"""Drafts by an EAGLE-3 head, which reads the target's states of several layers and keeps a cache of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qspec.bridges.heads import eagle3
from qspec.errors import RecipeError, SourceError
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.eagle3 import Eagle3
from qspec.nn.engines import AnyDecoder
from qspec.nn.mlp_speculator import swap_linears
from qspec.pair.drafters.kind import DraftKind, Weights
from qspec.pair.drafters.lookup import behind
from qspec.pair.head import check_numbers, check_scales, eagle3_shape, head_folder, rounded, target_rows
from qspec.records import ArchMap, LoadedModel, QuantizedModel
from qspec.schema.devices import DeviceSheet
from qspec.schema.drafts import Eagle3Draft
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import PlanFinding
from qspec.schemes.exports import by_batch
from qspec.schemes.footprint import Footprint, eagle3_footprint
from qspec.speculation.drafters.eagle3 import Eagle3Drafter
from qspec.speculation.types import Drafter

PUBLISHED_IDS = 32000
"""Ids that published heads draft, nearly all of them."""


class Eagle3Head(DraftKind[Eagle3Draft]):
    """An EAGLE-3 head. In a pair all of it is INT8 but the output rows, which runtimes read in float."""

    of = Eagle3Draft

    def require_files(self, target: ArchMap) -> Path:
        folder = head_folder(self.spec.source)
        self.require_fit(folder, target)
        return folder

    def footprint(self, target: ArchMap, width: int) -> Footprint:
        """By the file's sizes where it lies here, else by those of a new head, or of most that are published."""
        try:
            where = self._located()
        except SourceError:  # not trained yet
            where = None
        if where is None or where.path is None:
            published = 0 if self.untrained else PUBLISHED_IDS
            spec = self.spec.model_copy(update={"draft_vocab": self.spec.draft_vocab or published})
            return eagle3_footprint(eagle3_shape(spec, target), width)
        self.require_fit(where.path, target)
        return eagle3_footprint(eagle3.read_shape(where.path, target, self.spec.taps or None), width)

    def findings(self, sheet: DeviceSheet, recipe: Recipe) -> Iterator[PlanFinding]:
        if recipe.speculation.draft_length.k > 7:
            rule = "heads are trained on 3 to 7 steps; acceptance behind those is that of drafts nobody trained"
            yield PlanFinding("note", f"draft length {recipe.speculation.draft_length.k}", rule, "draft 3 to 5")

    def write(self, folder: Path, target: QuantizedModel, source: Path | None) -> None:
        assert source is not None, "a head is copied from its folder"
        head, config = self._read(source, target), eagle3.read_config(source)
        swap_linears(head, lambda linear: linear if linear is head.lm_head else Int8Map.rounded(linear.weight))
        form: eagle3.Format = "speculators" if head.shape.qk_norm else "native"  # vLLM reads those norms in one alone
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        name = str(verifier.get("name_or_path") or "")
        eagle3.write(head, folder, target.arch, config.get("qspec"), form, name, dtype=torch.bfloat16)

    def require_fit(self, folder: Path, target: ArchMap) -> None:
        shape, wanted = eagle3.read_shape(folder, target, self.spec.taps or None), self.spec.draft_vocab
        if wanted and shape.drafted != min(wanted, target.vocab_size):
            rule = f"but its config.json says {shape.drafted}"
            raise RecipeError(f"draft {self.spec.model}: draft_vocab {wanted}", rule, "omit it, or use another head")

    def check(self, folder: Path, target: QuantizedModel) -> str:
        check_scales(folder)
        head = self._read(folder, target)
        check_numbers(head)
        s = head.shape
        ids = f"{s.drafted} of {s.vocab_size} ids"
        return f"draft: an EAGLE-3 head on layers {', '.join(map(str, s.taps))} for {ids}; every number is usable"

    def open(self, folder: Path, target: QuantizedModel, model: QuantizedModel | None, decoder: Any) -> Weights:
        return Weights(head=rounded(self._read(folder, target)))

    def load(self, target: LoadedModel | QuantizedModel, open_draft: Callable[[], AnyDecoder]) -> Weights:
        return Weights(head=rounded(self._read(self.require_files(target.arch), target)))

    def unrounded(self, folder: Path, target: QuantizedModel) -> Weights:
        return Weights(head=self._read(folder, target))

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        assert isinstance(weights.head, Eagle3)
        return behind(self.spec.lookup, Eagle3Drafter(weights.head, target.eos_ids, tokens))

    def vllm_config(self, recipe: Recipe, folder: str) -> dict[str, Any]:
        length = recipe.speculation.draft_length
        return {"method": "eagle3", "model": folder, "num_speculative_tokens": length.k} | by_batch(length)

    def in_vllm(self, recipe: Recipe, sheet: DeviceSheet) -> tuple[bool, str]:
        k = recipe.speculation.draft_length.k
        sglang = f"--speculative-algorithm EAGLE3 --speculative-num-steps {k} --speculative-eagle-topk 1 "
        sglang += f"--speculative-num-draft-tokens {k + 1}"
        detail = f"method eagle3: draft/ (INT8 but for lm_head), chains of {k}; for SGLang, not run here: {sglang}"
        return True, detail

    def in_transformers(self) -> tuple[bool, str]:
        return False, "has no EAGLE-3 head"

    def _read(self, folder: Path, target: LoadedModel | QuantizedModel) -> Eagle3:
        return eagle3.read(folder, target.arch, *target_rows(target), self.spec.taps or None)
