"""The contents of a pair's files: formats, scales and saturated codes of every layer, and the KV scales' origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.errors import QspecError
from qspec.inspection.model import CalibrationText
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization.blocks import granularity_name
from qspec.numerics.quantization.distribution import Extent, beyond_share, extent, saturated_share
from qspec.numerics.quantization.packing import PER_WORD
from qspec.pair.check import lint
from qspec.plan import LayerScheme, TensorScheme
from qspec.progress import Progress
from qspec.records import QLinear, QuantizedModel, layer_number
from qspec.schemes.build import scheme_label

Origin = Literal["calibrated", "cast", "never calibrated", "at run time"]


@dataclass(frozen=True)
class StoredLayer:
    """One linear layer as stored. A layer that is kept has no scale; a tied head takes no bytes of its own.

    `saturated`: share of codes at the ends of the range. `input_scale`: static activation schemes only. `sparse`: share
    of weights that are kept apart in float.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    format: str
    granularity: str
    activation: str
    scales: int
    scale: Extent | None
    saturated: float | None
    input_scale: float | None
    bytes: int
    sparse: float = 0.0


@dataclass(frozen=True)
class SeenKV:
    """KV that text produced: the largest magnitude by KV head, and the share of values beyond the stored range."""

    amax: tuple[float, ...]
    saturated: float | None


@dataclass(frozen=True)
class StoredKV:
    """Keys or values of one layer. `scale` and `amax`, the magnitude it stands for: one, or one per KV head."""

    name: str
    scale: tuple[float, ...]
    amax: tuple[float, ...]
    seen: SeenKV | None = None


@dataclass(frozen=True)
class KVCacheView:
    """Format of the KV cache and, by layer, its keys and values (empty where scales come at run time)."""

    format: str
    granularity: str
    origin: Origin
    keys: tuple[StoredKV, ...]
    values: tuple[StoredKV, ...]


@dataclass(frozen=True)
class HalfView:
    """One checkpoint. `other_bytes`: embeddings, norms and whatever else is no linear layer; `problem`: see `lint`."""

    name: str
    source: Mapping[str, str]
    layers: tuple[StoredLayer, ...]
    kv: KVCacheView | None
    other_bytes: int
    problem: str | None

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers) + self.other_bytes


@dataclass(frozen=True)
class PairView:
    """A pair, or one checkpoint alone. `draft` is its kind; prompt lookup has no half of its own."""

    name: str
    draft: str | None
    halves: tuple[HalfView, ...]
    calibration: CalibrationText | None


def read_half(folder: Path) -> QuantizedModel:
    """The checkpoint in `folder`. Raises `SourceError` or `IntegrityError`."""
    return compressed.read(folder)


def view_half(model: QuantizedModel, name: str, progress: Progress, rows: Sequence[list[int]] = ()) -> HalfView:
    """Look at every layer, one at a time; `rows` of token ids also go through the half to see its KV cache fill."""
    schemes = model.plan.resolve(model.arch.linears())
    items = progress.track(schemes.items(), f"inspect {name}", len(schemes), "layers")
    layers = tuple(_layer(model, layer, scheme) for layer, scheme in items)
    owned = {f"{layer}.{part}" for layer in schemes for part in ("weight", "bias")}
    other = sum(model.tensors[key].nbytes for key in model.tensors if key not in owned)
    seen = _measure(model, rows, progress) if rows and model.plan.kv is not None else {}
    return HalfView(name, dict(model.source), layers, _kv(model, seen), other, _problem(model))


def _layer(model: QuantizedModel, name: str, scheme: LayerScheme | None) -> StoredLayer:
    shape = model.arch.linear_shape(name)
    if scheme is None:
        return _kept(model, name, shape)
    linear = model.linears[name]
    weight = linear.weight
    return StoredLayer(
        name,
        shape,
        scheme_label(scheme),
        weight.fmt.name,
        granularity_name(weight.granularity),
        _activation(scheme.activation),
        weight.scale.numel(),
        extent(weight.scale.abs()),
        saturated_share(weight.codes, weight.fmt, weight.zero_point is None),
        None if linear.input_scale is None else float(linear.input_scale),
        _stored_bytes(linear),
        0.0 if linear.outliers is None else linear.outliers.values.numel() / weight.codes.numel(),
    )


def _kept(model: QuantizedModel, name: str, shape: tuple[int, int]) -> StoredLayer:
    tied = name == "lm_head" and model.arch.tied
    weight = model.tensors["model.embed_tokens.weight" if tied else f"{name}.weight"]
    bias = model.tensors[f"{name}.bias"].nbytes if f"{name}.bias" in model.tensors else 0
    dtype = str(weight.dtype).removeprefix("torch.")
    size = bias if tied else weight.nbytes + bias
    return StoredLayer(name, shape, "none", f"{dtype}, tied" if tied else dtype, "–", "–", 0, None, None, None, size)


def _stored_bytes(linear: QLinear) -> int:
    """Bytes in the file: codes (packed: eight to a word), float32 scales, zero points, bias, outliers."""
    weight = linear.weight
    rows, columns = weight.shape
    codes = rows * -(-columns // PER_WORD) * 4 if compressed.packs(linear) else weight.codes.nbytes
    zeros = 0 if weight.zero_point is None else weight.zero_point.numel()
    if compressed.packs(linear) and weight.zero_point is not None:
        zeros = -(-rows // PER_WORD) * 4 * weight.zero_point.shape[1]
    extra = sum(part.nbytes for part in (linear.input_scale, linear.bias, linear.outliers) if part is not None)
    return codes + 4 * weight.scale.numel() + zeros + extra


def _activation(scheme: TensorScheme | None) -> str:
    if scheme is None:
        return "–"
    return f"{scheme.fmt.name} {granularity_name(scheme.granularity)} {'dynamic' if scheme.dynamic else 'static'}"


def _kv(model: QuantizedModel, seen: Mapping[str, SeenKV]) -> KVCacheView | None:
    scheme = model.plan.kv
    if scheme is None:
        return None
    layers = [f"{layer}.self_attn" for layer in model.arch.layers if not scheme.skips(layer_number(layer))]
    sides = zip("kv", (model.k_scale, model.v_scale), scheme.parts, strict=True)
    keys, values = (
        tuple(_stored(layer, scales, part.fmt.qmax, seen.get(f"{layer}.{kind}")) for layer in layers)
        for kind, scales, part in sides
    )
    key, value = scheme.parts
    name = key.fmt.name if key == value and not scheme.residual else scheme.label
    return KVCacheView(name, key.granularity, _origin(model), keys, values)


def _stored(layer: str, scales: Mapping[str, Tensor], qmax: float, seen: SeenKV | None) -> StoredKV:
    scale = tuple(scales[layer].flatten().tolist()) if layer in scales else ()
    return StoredKV(layer, scale, tuple(qmax * s for s in scale), seen)


def _origin(model: QuantizedModel) -> Origin:
    """Where KV scales come from. Scales that are all 1 were never calibrated, whatever the checkpoint says."""
    scheme = model.plan.kv
    if scheme is None or not scheme.stored:
        return "at run time"
    if scheme.scales == "cast":
        return "cast"
    ones = all(bool((scale == 1).all()) for scale in (*model.k_scale.values(), *model.v_scale.values()))
    return "never calibrated" if ones else "calibrated"


def _problem(model: QuantizedModel) -> str | None:
    """The first number that no runtime should use."""
    try:
        lint(model)
    except QspecError as error:
        return str(error)
    return None


def _measure(model: QuantizedModel, rows: Sequence[list[int]], progress: Progress) -> dict[str, SeenKV]:
    """Run the half over `rows` and watch what goes into its cache, by `model.layers.N.self_attn.k` (and `.v`)."""
    decoder = Decoder.from_quantized(model, max_length=max(map(len, rows)))
    watch = _Watch(model)
    decoder.observer = watch
    for row in progress.track(rows, "calibrate", len(rows), "texts"):
        decoder.truncate(0)
        decoder.forward(torch.tensor(row), last=1)
    return watch.seen()


class _Watch:
    """Observer that keeps the largest magnitude per head and counts what lies beyond the stored range."""

    def __init__(self, model: QuantizedModel) -> None:
        assert model.plan.kv is not None
        sides = zip("kv", (model.k_scale, model.v_scale), model.plan.kv.parts, strict=True)
        self._limits = {f"{n}.{kind}": part.fmt.qmax * s for kind, scales, part in sides for n, s in scales.items()}
        self._amax: dict[str, Tensor] = {}
        self._beyond: dict[str, float] = {}
        self._values: dict[str, int] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        if not name.endswith((".k", ".v")):
            return
        amax_H = x.float().abs().amax((1, 2))
        self._amax[name] = torch.maximum(self._amax[name], amax_H) if name in self._amax else amax_H
        if name in self._limits:
            beyond = beyond_share(x, self._limits[name]) * x.numel()
            self._beyond[name] = self._beyond.get(name, 0.0) + beyond
            self._values[name] = self._values.get(name, 0) + x.numel()

    def seen(self) -> dict[str, SeenKV]:
        def share(name: str) -> float | None:
            return self._beyond[name] / self._values[name] if name in self._beyond else None

        return {name: SeenKV(tuple(amax_H.tolist()), share(name)) for name, amax_H in self._amax.items()}
