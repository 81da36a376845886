"""Drafts by a speculator's heads, which read the target's hidden states."""

from collections.abc import Callable, Iterator
import json
from pathlib import Path
from typing import Any

from qspec.bridges.heads import speculator
from qspec.bridges.vllm.heads import FOLDER_KEY, PROPOSER
from qspec.nn.engines import AnyDecoder
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.pair.drafters.kind import DraftKind, Weights
from qspec.pair.drafters.lookup import behind
from qspec.pair.head import check_head, head_folder, open_head, require_shape, target_rows
from qspec.records import ArchMap, LoadedModel, QuantizedModel
from qspec.schema.devices import DeviceSheet
from qspec.schema.drafts import MlpDraft
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import PlanFinding
from qspec.schemes.exports import by_batch
from qspec.schemes.footprint import Footprint, mlp_footprint
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.speculation.types import Drafter


class SpeculatorHead(DraftKind[MlpDraft]):
    """A combined token/embedding speculator."""

    of = MlpDraft

    @property
    def measured_as(self) -> str:
        return "mlp + suffix" if self.spec.lookup == "suffix" else "mlp"

    def require_files(self, target: ArchMap) -> Path:
        folder = head_folder(self.spec.source)
        require_shape(folder, self.spec, target)
        return folder

    def footprint(self, target: ArchMap, width: int) -> Footprint:
        return mlp_footprint(self.spec, target, width)

    def findings(self, sheet: DeviceSheet, recipe: Recipe) -> Iterator[PlanFinding]:
        yield PlanFinding(
            "note",
            "draft.kind 'mlp_speculator'",
            "vLLM serves it by qspec's plugin alone, with greedy drafts, proven on its CPU build",
            "install qspec in vLLM's environment too: pip install --no-deps qspec",
        )

    def write(self, folder: Path, target: QuantizedModel, source: Path | None) -> None:
        assert source is not None, "a head is copied from its folder"
        speculator.write(open_head(source, target), folder, speculator.read_config(source).get("qspec"))

    def require_fit(self, folder: Path, target: ArchMap) -> None:
        require_shape(folder, self.spec, target)

    def check(self, folder: Path, target: QuantizedModel) -> str:
        return check_head(folder, target)

    def open(self, folder: Path, target: QuantizedModel, model: QuantizedModel | None, decoder: Any) -> Weights:
        return Weights(head=open_head(folder, target))

    def load(self, target: LoadedModel | QuantizedModel, open_draft: Callable[[], AnyDecoder]) -> Weights:
        return Weights(head=open_head(self.require_files(target.arch), target))

    def unrounded(self, folder: Path, target: QuantizedModel) -> Weights:
        return Weights(head=speculator.read(folder, *target_rows(target)))

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        assert isinstance(weights.head, MLPSpeculator)
        head = MlpDrafter(weights.head, target.eos_ids, tokens, self.spec.candidates, self.spec.top_k)
        return behind(self.spec.lookup, head)

    def vllm_config(self, recipe: Recipe, folder: str) -> dict[str, Any]:
        length = recipe.speculation.draft_length
        k = min(length.k, self.spec.n_predict)
        return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": k} | by_batch(length)

    def vllm_arguments(self, folder: str) -> list[str]:
        return ["--additional-config", json.dumps({FOLDER_KEY: folder})]

    def in_vllm(self, recipe: Recipe, sheet: DeviceSheet) -> tuple[bool, str]:
        detail = "by qspec's plugin only (custom_class; `pip install --no-deps qspec` beside vLLM), greedy drafts"
        if recipe.speculation.draft_length.by_batch:
            detail += "; by_batch through the plugin, the method itself does not know it"
        return True, detail

    def in_transformers(self) -> tuple[bool, str]:
        return False, "has no MLP speculator"
