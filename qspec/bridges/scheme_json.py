"""A layer's scheme as JSON, complete by itself: where it is kept before there is a `config.json` for it to live in."""

from dataclasses import asdict
from typing import Any

from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.formats import FORMATS
from qspec.plan import LayerScheme, TensorScheme

_GRANULARITIES = {kind.__name__: kind for kind in (PerTensor, PerChannel, PerToken, PerGroup, PerBlock)}


def encode(scheme: LayerScheme) -> dict[str, Any]:
    """Plain values; `decode` gives back an equal scheme."""
    activation = None if scheme.activation is None else _encode(scheme.activation)
    return {
        "name": scheme.name,
        "weight": _encode(scheme.weight),
        "activation": activation,
        "outliers": scheme.outliers,
    }


def decode(body: dict[str, Any]) -> LayerScheme:
    """Inverse of `encode`."""
    activation = None if body["activation"] is None else _decode(body["activation"])
    return LayerScheme(body["name"], _decode(body["weight"]), activation, body["outliers"])


def _encode(tensor: TensorScheme) -> dict[str, Any]:
    granularity = {"kind": type(tensor.granularity).__name__, **asdict(tensor.granularity)}
    return {
        "format": tensor.fmt.name,
        "granularity": granularity,
        "symmetric": tensor.symmetric,
        "dynamic": tensor.dynamic,
        "clip": asdict(tensor.clip),
    }


def _decode(body: dict[str, Any]) -> TensorScheme:
    sizes = dict(body["granularity"])
    granularity: Granularity = _GRANULARITIES[sizes.pop("kind")](**sizes)
    clip = Clip(**body["clip"])
    return TensorScheme(FORMATS[body["format"]], granularity, body["symmetric"], body["dynamic"], clip)
