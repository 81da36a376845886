"""Two independent libraries as second opinions: at the same scale their codes and values are ours.

compressed-tensors defines what checkpoints mean (its presets, and the `fake_quantize` that its users calibrate with);
optimum-quanto shares no code with it.
"""

from importlib.util import find_spec
from types import ModuleType
import warnings

from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.affine import quantize_activation_dynamic, quantize_matrix, quantize_weight
from qspec.numerics.quantization.blocks import PerChannel, PerGroup, PerTensor
from qspec.numerics.quantization.codes import symmetric_scale
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.plan import LayerScheme
from qspec.scheme_table import SCHEMES

NAMES = ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A8")


def weight(n: int = 256, k: int = 256) -> Tensor:
    """Two tiles each way; channels that differ tenfold in size, and single outliers."""
    generator = torch.Generator().manual_seed(0)
    w_NK = torch.randn(n, k, generator=generator) * torch.logspace(-2, 0, n)[:, None]
    w_NK[::37, ::41] *= 30
    return w_NK


def scheme(name: str) -> LayerScheme:
    found = SCHEMES[name].layer()
    assert found is not None
    return found


def faked(x: Tensor, scale: Tensor, args: QuantizationArgs) -> Tensor:
    return fake_quantize(x, scale, torch.zeros_like(scale), args)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_a_scheme_are_those_of_the_preset_of_that_name(name: str) -> None:
    """Catches a scheme whose name promises users of compressed-tensors another format, or codes of another value."""
    ours, args = scheme(name).weight, preset_name_to_scheme(name, ["Linear"]).weights
    assert args is not None
    q = quantize_weight(weight(), ours.fmt, ours.granularity, ours.symmetric)
    assert args.symmetric == ours.symmetric
    assert torch.equal(q.dequantize(), faked(weight(), q.scale, args))


@pytest.mark.parametrize("name", ["W8A8", "W4A8", "FP8_DYNAMIC"])
def test_dynamic_inputs_are_those_of_the_preset(name: str) -> None:
    """Catches a scale per tensor, or per channel, where the served model makes one per token."""
    ours, args = scheme(name).activation, preset_name_to_scheme(name, ["Linear"]).input_activations
    assert ours is not None
    assert args is not None
    codes_TK, scale_T1 = quantize_activation_dynamic(weight(), ours.fmt)
    assert args.dynamic
    assert torch.equal(codes_TK.float() * scale_T1, faked(weight(), scale_T1, args))


def test_static_inputs_are_those_of_the_preset() -> None:
    """Catches a static FP8 input that is rounded under anything but one stored scale, or does not saturate."""
    ours, args = scheme("FP8").activation, preset_name_to_scheme("FP8", ["Linear"]).input_activations
    assert ours is not None
    assert args is not None
    scale = symmetric_scale(weight().abs().amax().reshape(1) / 3, ours.fmt)  # a third: later inputs leave the range
    assert not args.dynamic
    assert torch.equal(
        quantize_matrix(weight(), scale, None, ours.fmt, PerTensor()).dequantize(), faked(weight(), scale, args)
    )


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_with_zero_points_equal_compressed_tensors(group: int) -> None:
    """Catches a zero point that is applied to the group beside it."""
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group)
    q = quantize_weight(weight() + 0.05, INT4, PerGroup(group), symmetric=False)
    assert q.zero_point is not None
    assert torch.equal(q.dequantize(), fake_quantize(weight() + 0.05, q.scale, q.zero_point, args))


@pytest.fixture(scope="module")
def quanto() -> ModuleType:
    """optimum-quanto; it probes for compilers and GPUs when imported, and warns of what it does not find."""
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        pytest.skip("needs optimum-quanto: pip install --no-deps optimum-quanto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import optimum.quanto

        return optimum.quanto


@pytest.mark.parametrize(("fmt", "qtype"), [(INT8, "qint8"), (FP8_E4M3, "qfloat8_e4m3fn")], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel()], ids=str)
def test_8_bit_codes_equal_quanto(
    quanto: ModuleType, fmt: NumFormat, qtype: str, granularity: PerTensor | PerChannel
) -> None:
    """Catches a rounding mode, or a saturation, that is only ours."""
    q = quantize_weight(weight(), fmt, granularity)
    per_tensor = isinstance(granularity, PerTensor)
    scale, axis = (q.scale.reshape(()), None) if per_tensor else (q.scale, 0)
    theirs = quanto.WeightQBytesTensor.quantize(weight(), getattr(quanto, qtype), axis, scale, None, False)
    assert torch.equal(q.codes.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(q.dequantize(), theirs.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
def test_4_bit_groups_equal_quanto(quanto: ModuleType, symmetric: bool) -> None:
    """Catches groups that run down a column, a zero point of the wrong sign, or codes outside -8 … 7."""
    w_NK = weight() + (0 if symmetric else 0.05)
    q = quantize_weight(w_NK, INT4, PerGroup(64), symmetric)
    zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point
    shift = (zero + 8).to(torch.uint8).reshape(-1, 1)  # theirs are unsigned
    scale = q.scale.reshape(-1, 1)
    codes = torch.ops.quanto.quantize_affine(w_NK, 4, 0, 64, scale, shift)
    # Their tensor class is not used: it unpacks its codes by a C++ extension that it compiles first.
    theirs = quanto.ungroup(scale * (codes.to(torch.int8) - shift.to(torch.int8)), axis=0, orig_shape=w_NK.shape)
    assert torch.equal(q.codes.float().reshape(-1, 64) + 8, codes.float())
    assert torch.equal(q.dequantize(), theirs)
