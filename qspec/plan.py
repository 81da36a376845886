"""The quantization plan: which linear layer gets which formats. Frozen data, resolved before any compute."""

from collections.abc import Iterable
from dataclasses import dataclass, field
import re
from typing import Literal

from qspec.errors import RecipeError
from qspec.numerics.blocks import Granularity
from qspec.numerics.clipping import Clip
from qspec.numerics.formats import NumFormat


@dataclass(frozen=True)
class TensorScheme:
    """How one tensor is quantized. `dynamic` scales are computed at run time and never stored."""

    fmt: NumFormat
    granularity: Granularity
    symmetric: bool = True
    dynamic: bool = False
    clip: Clip = field(default_factory=Clip)


@dataclass(frozen=True)
class LayerScheme:
    """Formats of one linear layer; `activation` None means that its input stays in the compute dtype."""

    name: str
    weight: TensorScheme
    activation: TensorScheme | None = None

    @property
    def static_input(self) -> bool:
        """Whether its input has a stored scale, which only calibration can give."""
        return self.activation is not None and not self.activation.dynamic


@dataclass(frozen=True)
class KVScheme:
    """KV-cache format.

    `tensor` and `head` are static scales stored with the model; `token_head` is one dynamic scale per token and head.
    `scales`: `calibrated` from data, or `cast` (1.0).
    """

    fmt: NumFormat
    granularity: Literal["tensor", "head", "token_head"]
    scales: Literal["calibrated", "cast"] = "calibrated"

    @property
    def stored(self) -> bool:
        """Whether scales are stored with the model; else each token gets its own at run time."""
        return self.granularity != "token_head"

    @property
    def calibrated(self) -> bool:
        """Whether stored scales come from data."""
        return self.stored and self.scales == "calibrated"


@dataclass(frozen=True)
class Rule:
    """`match` is a full layer name, its last part (`down_proj`), or `re:` and a regular expression."""

    match: str
    scheme: LayerScheme | None

    def matches(self, layer: str) -> bool:
        if self.match.startswith("re:"):
            return re.match(self.match[3:], layer) is not None
        return layer == self.match or layer.rpartition(".")[2] == self.match


@dataclass(frozen=True)
class QuantPlan:
    """Rules in order, first match wins; a layer that no rule matches gets `default`. Scheme None keeps the layer."""

    default: LayerScheme | None
    rules: tuple[Rule, ...] = ()
    kv: KVScheme | None = None

    def resolve(self, layers: Iterable[str]) -> dict[str, LayerScheme | None]:
        """Scheme of every layer. A rule that decides nothing is a mistake and raises `RecipeError`."""
        layers = list(layers)
        for index, rule in enumerate(self.rules):
            self._check(index, rule, layers)
        return {layer: self._first(layer) for layer in layers}

    def _first(self, layer: str) -> LayerScheme | None:
        return next((rule.scheme for rule in self.rules if rule.matches(layer)), self.default)

    def _check(self, index: int, rule: Rule, layers: list[str]) -> None:
        matched = [layer for layer in layers if rule.matches(layer)]
        if not matched:
            raise RecipeError(
                f"rule {rule.match!r}",
                "matches no linear layer of the model",
                f"use a name such as {layers[0]!r}, its last part, or re:<pattern>",
            )
        earlier = [next((r for r in self.rules[:index] if r.matches(layer)), rule) for layer in matched]
        if all(first is not rule and first.scheme != rule.scheme for first in earlier):
            raise RecipeError(
                f"rule {rule.match!r}",
                f"never applies: {earlier[0].match!r} comes first for all that it matches",
                "remove one of them (`ignore` comes before `rules`)",
            )
