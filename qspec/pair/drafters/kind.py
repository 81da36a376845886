"""Kinds of drafts, at every stage of their life; each kind is one subclass.

A draft that follows from the text alone needs a `drafter`; the rest has defaults, of a draft that no server knows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from qspec.errors import RecipeError, SourceError
from qspec.models.load import Header, Location, locate
from qspec.nn.eagle3 import Eagle3
from qspec.nn.engines import AnyDecoder
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.records import ArchMap, LoadedModel, QuantizedModel
from qspec.schema.devices import DeviceSheet
from qspec.schema.drafts import DraftSpec
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import PlanFinding
from qspec.schemes.footprint import Footprint
from qspec.speculation.types import Drafter

S = TypeVar("S", bound=DraftSpec)


@dataclass(frozen=True)
class Weights:
    """Weights of a draft, ready to run: a quantized model and its decoder, or a head; nothing for a lookup."""

    model: QuantizedModel | None = None
    decoder: AnyDecoder | None = None
    head: MLPSpeculator | Eagle3 | None = None

    def fork(self) -> "Weights":
        """The same weights, a cache of their own."""
        return self if self.decoder is None else replace(self, decoder=self.decoder.fork())


@dataclass(frozen=True)
class DraftShape:
    """A draft that is a model, before it is loaded. own_rows: of its head before it gets as many as the target's.

    width: bytes of a stored float; None: as the target's.
    """

    model: str
    arch: ArchMap
    quantization: QuantSpec
    own_rows: int
    width: int | None = None


@dataclass(frozen=True)
class Snippet:
    """How transformers is told of a draft: lines that load it, and the argument of `generate`."""

    lines: tuple[str, ...] = ()
    argument: str = ""


class DraftKind(Generic[S]):
    """One draft of a recipe; `of`: the class of its fields there."""

    of: ClassVar[type[DraftSpec]]
    separate: ClassVar[bool] = False
    """Whether its original is a model of its own, which runs beside the original target."""

    def __init__(self, spec: S) -> None:
        self.spec = spec

    @property
    def measured_as(self) -> str:
        """Its name in `eval/baselines/spec_bench.json`, if such drafts were measured."""
        return ""

    # what it is made of

    @property
    def untrained(self) -> bool:
        """Whether it is to be made by training, and has not been; it is planned by the sizes that it will have.

        What ends as `train-draft` names its result is no Hub id without a revision, though `out/draft` looks like one.
        """
        source = self.spec.source
        if self.spec.trains is None or source is None or source.model.startswith("package:"):
            return False
        try:
            where = self._located()
        except SourceError:
            return True
        hub = where is not None and where.kind == "hub"
        return hub and not source.revision and source.model.endswith(f"/{self.spec.trained_as}")

    def require_trained(self) -> None:
        """Raise `RecipeError` for a draft that is yet to be trained, `SourceError` for one whose files are absent."""
        if self.untrained and self.spec.source is not None:
            value, fix = f"draft {self.spec.source.model}", "run `qspec train-draft` on the recipe"
            raise RecipeError(value, "is not trained yet", fix)
        self._located()

    def _located(self) -> Location | None:
        return None if self.spec.source is None else locate(self.spec.source)

    def require_files(self, target: ArchMap) -> Path | None:
        """The folder of a head that is copied into the pair, fetched if need be; None for others."""
        return None

    def original(self, target: LoadedModel) -> LoadedModel | None:
        """The draft model before it is quantized; None for a draft that is none."""
        return None

    # before compute

    def shape(self, recipe: Recipe, target: ArchMap, own: Header | None) -> DraftShape | None:
        """Shape and plan of a draft model; None for a draft that is none. own: header of its source, if it exists."""
        return None

    def footprint(self, target: ArchMap, width: int) -> Footprint | None:
        """Bytes of a head; width: of a float as computed with. None for others: a model's follow from its shape."""
        return None

    def findings(self, sheet: DeviceSheet, recipe: Recipe) -> Iterator[PlanFinding]:
        """Remarks about target and draft together, on a device."""
        yield from ()

    # in a pair

    def write(self, folder: Path, target: QuantizedModel, source: Path | None) -> None:
        """Put a head into the pair; models are written as targets are."""

    def require_fit(self, folder: Path, target: ArchMap) -> None:
        """Raise a `QspecError` for a head of other sizes than the recipe says."""

    def check(self, folder: Path, target: QuantizedModel) -> str | None:
        """Read what `write` wrote and look at every number in it; one line of what was found."""
        return None

    def settings(self) -> dict[str, Any]:
        """Fields of a lookup as the manifest tells them to other runtimes."""
        return {}

    def open(self, folder: Path, target: QuantizedModel, model: QuantizedModel | None, decoder: Any) -> Weights:
        """The draft of a pair, ready to run. model, decoder: of a draft that is a model."""
        return Weights(model, decoder)

    def load(self, target: LoadedModel | QuantizedModel, open_draft: Callable[[], AnyDecoder]) -> Weights:
        """The draft from its source, for any target. open_draft: opens a draft model."""
        return Weights()

    def unrounded(self, folder: Path, target: QuantizedModel) -> Weights:
        """A head as it came in its own folder, to be compared with the one in the pair."""
        return Weights()

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        """A drafter that has learned nothing yet. tokens: ids of the vocabulary that are no padding."""
        raise NotImplementedError

    # for other runtimes

    def vllm_config(self, recipe: Recipe, folder: str) -> dict[str, Any]:
        """The value of vLLM's --speculative-config, empty where vLLM knows no such draft. folder: the draft's."""
        return {}

    def vllm_arguments(self, folder: str) -> list[str]:
        """Further arguments of vLLM's server."""
        return []

    def in_vllm(self, recipe: Recipe, sheet: DeviceSheet) -> tuple[bool, str]:
        """Whether vLLM serves it on a device, and how or why not."""
        return False, f"vLLM knows no draft of kind {self.spec.kind}"

    def in_transformers(self) -> tuple[bool, str]:
        """Whether transformers runs it, and how or why not."""
        return False, f"has no draft of kind {self.spec.kind}"

    def snippet(self, recipe: Recipe, pair: str) -> Snippet:
        """How transformers runs it, in Python."""
        return Snippet()
