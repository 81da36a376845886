"""compressed-tensors as the oracle: its arguments for a format and granularity, and the dtype of its codes."""

from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from qspec.numerics.quantization.blocks import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.formats import NumFormat


def quantization_args(fmt: NumFormat, granularity: Granularity, symmetric: bool = True) -> QuantizationArgs:
    """The same scheme in compressed-tensors' words."""
    kind = "float" if fmt.is_float else "int"
    return QuantizationArgs(num_bits=fmt.bits, type=kind, symmetric=symmetric, **_strategy(granularity))


def _strategy(granularity: Granularity) -> dict[str, Any]:
    match granularity:
        case PerTensor():
            return {"strategy": "tensor"}
        case PerChannel():
            return {"strategy": "channel"}
        case PerToken():
            return {"strategy": "token", "dynamic": True}
        case PerGroup(size):
            return {"strategy": "group", "group_size": size}
        case PerBlock(rows, cols):
            return {"strategy": "block", "block_structure": [rows, cols]}
