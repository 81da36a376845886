"""Fast kernels against their eager twins."""

import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.affine import QTensor, quantize_weight
from qspec.numerics.quantization.blocks import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8
from qspec.ops import cpu, reference
from qspec.ops.select import prepare
from qspec.plan import TensorScheme

SHAPES = [(64, 64), (96, 160), (48, 192)]
ROWS = [1, 2, 5, 17]
INT8_DYNAMIC = TensorScheme(INT8, PerToken(), dynamic=True)


def _weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k) * torch.rand(n, 1).add(0.1)


def _int8(n: int, k: int) -> QTensor:
    return quantize_weight(_weight(n, k), INT8, PerChannel())


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_int8_kernel_equals_its_twin(n: int, k: int, rows: int) -> None:
    """Catches int16 saturation, a wrong zero point, or scales applied to the wrong axis."""
    weight, x = _int8(n, k), torch.randn(rows, k) * 10
    fast = prepare(weight, INT8_DYNAMIC, None, torch.float32)
    assert isinstance(fast, cpu.Int8Linear)
    # integer sums are exact in both; only the two float multiplications may round in another order
    torch.testing.assert_close(fast(x), reference.int8_linear(x, weight.codes, weight.scale), rtol=1e-6, atol=1e-6)


def test_int8_kernel_is_exact_where_int16_would_saturate() -> None:
    """Catches the silent AVX2 overflow: every activation and weight at its largest code."""
    k = 256
    weight = QTensor(torch.full((16, k), 127, dtype=torch.int8), torch.ones(16, 1), None, INT8, PerChannel())
    x = torch.full((3, k), 127.0)
    x[1] = -127.0
    want = torch.tensor([[1.0], [-1.0], [1.0]]) * (127.0 * 127.0 * k)
    assert torch.equal(cpu.Int8Linear(weight.codes, weight.scale)(x), want.expand(3, 16))


def test_int8_row_does_not_depend_on_the_other_rows() -> None:
    """Catches activation scales shared between rows: verifying K+1 tokens would then differ from decoding one."""
    weight, x = _int8(64, 96), torch.randn(6, 96)
    x[3] *= 1000
    fast = cpu.Int8Linear(weight.codes, weight.scale)
    alone = torch.cat([fast(row[None]) for row in x])
    assert torch.equal(fast(x), alone)


def test_int8_zero_input_gives_zero() -> None:
    """Catches a division by a zero scale."""
    weight = _int8(16, 64)
    assert torch.equal(cpu.Int8Linear(weight.codes, weight.scale)(torch.zeros(2, 64)), torch.zeros(2, 16))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_int4_kernel_equals_its_twin(group: int, rows: int) -> None:
    """Catches nibbles in the wrong order, a missing offset of 8, or scales of the wrong group."""
    weight = quantize_weight(_weight(64, 192), INT4, PerGroup(group))
    x = torch.randn(rows, 192)
    fast = prepare(weight, None, None, torch.float32)
    assert isinstance(fast, cpu.Int4Linear)
    want = x.bfloat16().float() @ weight.dequantize().bfloat16().float().T
    # bfloat16 output: 8 bits of mantissa, plus bfloat16 scales on 192 summands
    torch.testing.assert_close(fast(x), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.parametrize(
    ("granularity", "activation"),
    [
        (PerTensor(), TensorScheme(FP8_E4M3, PerTensor())),
        (PerChannel(), TensorScheme(FP8_E4M3, PerToken(), dynamic=True)),
        (PerBlock(32, 32), TensorScheme(FP8_E4M3, PerGroup(32), dynamic=True)),
    ],
)
def test_fp8_decoded_weights_equal_their_twin(
    granularity: PerTensor | PerChannel | PerBlock, activation: TensorScheme
) -> None:
    """Catches activations left unrounded, or a static scale that is ignored."""
    weight, x = quantize_weight(_weight(96, 160), FP8_E4M3, granularity), torch.randn(5, 160)
    scale = None if activation.dynamic else (x.abs().amax() / 448).reshape(1)
    fast, twin = (prepare(weight, activation, scale, torch.float32, kernels) for kernels in ("auto", "reference"))
    # the same float32 products in another order of summation
    torch.testing.assert_close(fast(x), twin(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(twin(x), x @ weight.dequantize().T, rtol=1e-5, atol=1e-5)


def test_fp8_decode_equals_torch_for_every_code() -> None:
    """Catches a wrong bit in any of the 254 finite codes, subnormals and both zeros included."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    want = codes.float()
    finite = want.isfinite()
    assert int(finite.sum()) == 254
    assert torch.equal(cpu.decode_fp8_e4m3(codes)[finite], want[finite])


def test_odd_shapes_fall_back_to_decoded_weights() -> None:
    """Catches an INT4 kernel called with a width it silently mishandles."""
    weight = quantize_weight(_weight(40, 96), INT4, PerGroup(48))
    fast, x = prepare(weight, None, None, torch.float32), torch.randn(3, 96)
    assert isinstance(fast, cpu.DecodedLinear)
    # the same float32 products in another order of summation
    torch.testing.assert_close(fast(x), x @ weight.dequantize().T, rtol=1e-5, atol=1e-5)
