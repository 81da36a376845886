"""A float model's parts: the ranges and outliers of every linear layer, and what each scheme would cost there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from qspec.numerics.quantization.affine import tensor_amax
from qspec.numerics.quantization.distribution import (
    OUTLIER_RATIO,
    channel_amax,
    kurtosis,
    median,
    outlier_channels,
    weight_sqnr_db,
)
from qspec.numerics.quantization.formats import INT8
from qspec.progress import Progress
from qspec.quantization.rtn import finite_weight
from qspec.records import LayerStats, LoadedModel
from qspec.scheme_table import SCHEMES as TABLE

SCHEMES = ("W8A8", "FP8_DYNAMIC", "W4A16")
GROUPS = (128, 64, 32, 16)
"""Group sizes of W4A16 in order of preference: the first that divides a layer's inputs is taken."""


@dataclass(frozen=True)
class Distribution:
    """Largest magnitude, kurtosis (3: normal), and how many of the input channels are outliers among them.

    lost: channels that one INT8 scale for all rounds to 0, however many others set it: outliers need a calm majority.
    """

    amax: float
    kurtosis: float
    channels: int
    outliers: int
    lost: int

    @property
    def outlier_share(self) -> float:
        return self.outliers / self.channels


@dataclass(frozen=True)
class LayerView:
    """One linear layer. `sqnr_db` by scheme name; W4A16 is absent (and `group_size` None) where no group divides.

    `input` needs calibration: amax and outliers over all tokens, kurtosis over the rows that calibration keeps.
    """

    name: str
    shape: tuple[int, int]
    weight: Distribution
    group_size: int | None
    sqnr_db: Mapping[str, float]
    input: Distribution | None


@dataclass(frozen=True)
class KVView:
    """Largest key (after rotation) and value of every KV head of one layer."""

    name: str
    k_amax: tuple[float, ...]
    v_amax: tuple[float, ...]


@dataclass(frozen=True)
class KeyBias:
    """Bias of one `k_proj`, by KV head: largest magnitude, and how many channels it makes outliers of.

    weights: what the weights add to the median channel, the deviation of keys for normed, independent inputs.
    """

    name: str
    weights: float
    amax: tuple[float, ...]
    outliers: tuple[int, ...]


@dataclass(frozen=True)
class CalibrationText:
    """The text that activations were measured on."""

    data: str
    texts: int
    tokens: int


@dataclass(frozen=True)
class ModelView:
    """A float model. `kv` is empty, and `calibration` None, unless activations were measured."""

    model: str
    source: Mapping[str, str]
    model_type: str
    decoder_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerView, ...]
    kv: tuple[KVView, ...]
    k_bias: tuple[KeyBias, ...]
    calibration: CalibrationText | None


def view_model(
    model: LoadedModel,
    name: str,
    progress: Progress,
    stats: LayerStats | None = None,
    calibration: CalibrationText | None = None,
) -> ModelView:
    """Look at every linear layer, one at a time. Raises `SourceError` for weights that are not finite."""
    arch = model.arch
    names = arch.linears()
    return ModelView(
        model=name,
        source=dict(model.source),
        model_type=arch.model_type,
        decoder_layers=arch.n_layers,
        hidden_size=arch.hidden_size,
        heads=arch.n_heads,
        kv_heads=arch.n_kv_heads,
        head_dim=arch.head_dim,
        vocabulary=arch.vocab_size,
        tied=arch.tied,
        layers=tuple(_layer(model, layer, stats) for layer in progress.track(names, "inspect", len(names), "layers")),
        kv=() if stats is None else _kv(stats),
        k_bias=tuple(_key_bias(model, layer) for layer in names if _has_bias(model, layer)),
        calibration=calibration,
    )


def fitting_group(columns: int) -> int | None:
    """Largest of `GROUPS` that divides `columns`; None where none does."""
    return next((size for size in GROUPS if columns % size == 0), None)


def _layer(model: LoadedModel, name: str, stats: LayerStats | None) -> LayerView:
    w_NK = finite_weight(model, name)
    rows, columns = w_NK.shape
    group = fitting_group(columns)
    return LayerView(
        name,
        (rows, columns),
        _distribution(w_NK, channel_amax(w_NK)),
        group,
        {scheme: _cost(w_NK, scheme, group) for scheme in SCHEMES if group or TABLE[scheme].blocks is not None},
        None if stats is None else _distribution(stats.inputs_TK[name], stats.amax_K[name]),
    )


def _distribution(x: Tensor, amax_K: Tensor) -> Distribution:
    amax, outliers = tensor_amax(amax_K), int(outlier_channels(amax_K).sum())
    lost = int(((amax_K > 0) & (amax_K < amax / INT8.qmax / 2)).sum())
    return Distribution(float(amax), kurtosis(x), amax_K.numel(), outliers, lost)


def _cost(w_NK: Tensor, name: str, group: int | None) -> float:
    scheme = TABLE[name].layer(group or GROUPS[0])
    assert scheme is not None
    return weight_sqnr_db(w_NK, scheme.weight.fmt, scheme.weight.granularity)


def _kv(stats: LayerStats) -> tuple[KVView, ...]:
    return tuple(KVView(name, _floats(k_H), _floats(stats.v_amax_H[name])) for name, k_H in stats.k_amax_H.items())


def _has_bias(model: LoadedModel, layer: str) -> bool:
    return layer.endswith(".k_proj") and f"{layer}.bias" in model.tensors


def _key_bias(model: LoadedModel, layer: str) -> KeyBias:
    """Biases are compared with what the weights add, not with each other: all of them may be large."""
    heads, bias_N = model.arch.n_kv_heads, model.tensors[f"{layer}.bias"].float().abs()
    norm_K = model.tensors[f"{layer.rpartition('.self_attn.')[0]}.input_layernorm.weight"].float()
    w_NK = model.tensors[f"{layer}.weight"].float() * (norm_K + model.arch.norm_offset)
    weights = median(w_NK.norm(dim=1))
    biased = (bias_N > OUTLIER_RATIO * weights).reshape(heads, -1).sum(1)
    return KeyBias(layer, weights, _floats(bias_N.reshape(heads, -1).amax(1)), tuple(int(n) for n in biased))


def _floats(values: Tensor | Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
