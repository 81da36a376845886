"""Schemes as JSON."""

import json

import pytest

from qspec.bridges.scheme_json import decode, encode
from qspec.numerics.quantization.blocks import PerGroup
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.formats import FP8_E5M2, INT4
from qspec.plan import LayerScheme, TensorScheme
from qspec.schemes.build import layer_scheme

NAMES = ("W8A8", "W8A8_STATIC", "FP8", "FP8_STATIC", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A8")
OWN = LayerScheme("OWN", TensorScheme(FP8_E5M2, PerGroup(32), clip=Clip("percentile", 99.5)), None, 0.25)
ZEROS = LayerScheme("ZEROS", TensorScheme(INT4, PerGroup(64), symmetric=False, clip=Clip("mse")))


@pytest.mark.parametrize("scheme", [*map(layer_scheme, NAMES), OWN, ZEROS], ids=lambda scheme: scheme.name)
def test_schemes_survive_json(scheme: LayerScheme) -> None:
    """Would catch a field of a scheme that is lost or takes its default."""
    assert decode(json.loads(json.dumps(encode(scheme)))) == scheme
