"""The quantization plan: which linear layer gets which formats. Frozen data, resolved before any compute."""

from collections.abc import Iterable
from dataclasses import dataclass, field
import re
from typing import Literal

from qspec.errors import RecipeError
from qspec.numerics.quantization.blocks import Granularity
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.formats import FP8_E4M3, NumFormat


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
    """Formats of one linear layer; `activation` None means that its input stays in the compute dtype.

    outliers: percent of its weights that are kept apart in float.
    """

    name: str
    weight: TensorScheme
    activation: TensorScheme | None = None
    outliers: float = 0.0

    @property
    def static_input(self) -> bool:
        """Whether its input has a stored scale, which only calibration can give."""
        return self.activation is not None and not self.activation.dynamic


@dataclass(frozen=True)
class KVPart:
    """How keys, or values, are stored.

    `tensor` and `head` are static scales stored with the model; `token_head` is one dynamic scale per token and head,
    `channel` one per channel and `group` tokens. `outliers`: percent of magnitudes kept in float16.
    """

    fmt: NumFormat
    granularity: Literal["tensor", "head", "token_head", "channel"]
    group: int = 32
    outliers: float = 0.0

    @property
    def stored(self) -> bool:
        """Whether its scales are stored with the model; else they are made at run time."""
        return self.granularity in ("tensor", "head")

    @property
    def label(self) -> str:
        """Short text for people: `int4 channel g32 + 1% outliers`."""
        group = f" g{self.group}" if self.granularity == "channel" else ""
        outliers = f" + {self.outliers:g}% outliers" if self.outliers else ""
        return f"{self.fmt.name} {self.granularity}{group}{outliers}"


@dataclass(frozen=True)
class KVScheme:
    """KV-cache format; `key` and `value` are what differs from `fmt` and `granularity`.

    `scales` of stored ones: `calibrated` from data, `cast` (1.0), or per layer the better one (`auto`, which
    `quantization.kv_choice` resolves into `cast_layers`). Layers are numbers; those of `skip_layers` stay in float.
    granularities: those that a measurement chooses from; `granularity` stands in for the choice until it is made.
    """

    fmt: NumFormat
    granularity: Literal["tensor", "head", "token_head"]
    scales: Literal["calibrated", "cast", "auto"] = "calibrated"
    key: KVPart | None = None
    value: KVPart | None = None
    query: Literal["tensor", "head"] | None = None
    residual: int = 0
    skip_layers: tuple[int, ...] | Literal["auto"] = ()
    cast_layers: tuple[int, ...] = ()
    granularities: tuple[Literal["tensor", "head", "token_head"], ...] = ()

    @property
    def parts(self) -> tuple[KVPart, KVPart]:
        """How keys and values are stored."""
        both = KVPart(self.fmt, self.granularity)
        return self.key or both, self.value or both

    @property
    def stored(self) -> bool:
        """Whether scales are stored with the model; else they are made at run time."""
        return any(part.stored for part in self.parts)

    @property
    def calibrated(self) -> bool:
        """Whether stored scales come from data."""
        return self.stored and self.scales != "cast"

    @property
    def label(self) -> str:
        """Short text for people: `fp8_e4m3 tensor`, `int4 channel / fp8_e4m3 token_head`."""
        key, value = (part.label for part in self.parts)
        return (key if key == value else f"{key} / {value}") + (f", residual {self.residual}" if self.residual else "")

    @property
    def declared(self) -> bool:
        """Whether a checkpoint's `kv_cache_scheme` can say it: stored FP8 E4M3 scales, and no float window."""
        key, value = self.parts
        return key == value and key.stored and key.fmt == FP8_E4M3 and not self.residual

    @property
    def open(self) -> bool:
        """Whether measurements have yet to decide something."""
        return (self.stored and self.scales == "auto") or self.skip_layers == "auto" or bool(self.granularities)

    @property
    def candidates(self) -> int:
        """How many caches are measured to decide that; 0 where nothing is open."""
        return max(1, len(self.granularities)) * (1 + (self.scales == "auto")) if self.open else 0

    @property
    def step(self) -> int:
        """Tokens that leave the float window together; 0 without a window: each token becomes codes at once."""
        groups = [part.group for part in self.parts if part.granularity == "channel"]
        return max(groups, default=WINDOW_STEP if self.residual else 0)

    def boundary(self, start: int) -> int:
        """Positions that are codes for a token at `start`; later ones are in float."""
        return max(0, start - self.residual) // self.step * self.step if self.step else start

    def skips(self, layer: int) -> bool:
        return self.skip_layers != "auto" and layer in self.skip_layers


WINDOW_STEP = 32
"""Tokens that leave a residual window together where no group of channels says so."""


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
