"""KV codes: static scales broadcast over the right axis, dynamic ones depend on nothing but their own token."""

from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.codes import symmetric_scale
from qspec.numerics.quantization.formats import FP8_E4M3, INT8, SCALE_FLOOR, NumFormat
from qspec.numerics.quantization.kv_blocks import BlockCode, dequantize, quantize_static

formats = pytest.mark.parametrize("fmt", [FP8_E4M3, INT8], ids=lambda f: f.name)


def keys(heads: int = 3, tokens: int = 5, width: int = 8) -> Tensor:
    """Keys whose heads differ tenfold in size."""
    x_HTD = torch.randn(heads, tokens, width, generator=torch.Generator().manual_seed(0))
    return x_HTD * 10.0 ** torch.arange(heads)[:, None, None]


@formats
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_static_values_equal_compressed_tensors(fmt: NumFormat, strategy: str) -> None:
    """Catches a per-head scale that broadcasts over tokens or channels."""
    x_HTD = keys()
    amax = x_HTD.abs().amax((1, 2)) if strategy == "attn_head" else x_HTD.abs().amax().reshape(1)
    scale = symmetric_scale(amax, fmt)
    assert scale.shape == amax.shape
    args = QuantizationArgs(num_bits=8, type="float" if fmt.is_float else "int", symmetric=True, strategy=strategy)
    theirs = fake_quantize(x_HTD[None], scale.reshape(-1, 1, 1), torch.zeros(len(scale), 1, 1), args)[0]
    assert torch.equal(dequantize(quantize_static(x_HTD, scale, fmt), scale), theirs)


@formats
def test_heads_as_many_as_tokens(fmt: NumFormat) -> None:
    """Catches broadcasting that is right only while shapes differ: heads, tokens and channels are all 4 here."""
    x_HTD = keys(4, 4, 4)
    codes = quantize_static(x_HTD, symmetric_scale(x_HTD.abs().amax((1, 2)), fmt), fmt)
    assert codes.float().abs().amax((1, 2)).tolist() == [fmt.qmax] * 4


@formats
def test_values_past_the_calibrated_range_saturate(fmt: NumFormat) -> None:
    """Catches an outlier that wraps its sign or poisons the cache with NaN."""
    x_HTD = torch.tensor([[[-50.0, 50.0]]])
    scale = symmetric_scale(torch.tensor([2.0]), fmt)
    values = dequantize(quantize_static(x_HTD, scale, fmt), scale).flatten()
    # -128 steps of 2/127 for INT8; 1e-6: one float32 rounding.
    assert values.tolist() == pytest.approx([2 * fmt.qmin / fmt.qmax, 2], rel=1e-6)


@formats
def test_token_scales_do_not_depend_on_append_order(fmt: NumFormat) -> None:
    """Catches scales shared over tokens: after draft and reject the cache must equal one that never drafted."""
    x_HTD = keys()
    codes, scale_HT1 = BlockCode(fmt).encode(x_HTD)
    steps = [BlockCode(fmt).encode(x_HTD[:, t : t + 1]) for t in range(5)]
    assert torch.equal(torch.cat([c for c, _ in steps], 1).float(), codes.float())
    assert torch.equal(torch.cat([s for _, s in steps], 1), scale_HT1)
    assert scale_HT1.shape == (3, 5, 1)


@formats
def test_token_scales_use_the_whole_range(fmt: NumFormat) -> None:
    """Catches one scale over all heads of a token: small heads would lose their bits."""
    codes, scale_HT1 = BlockCode(fmt).encode(keys())
    assert (codes.float().abs().amax(-1) == fmt.qmax).all()
    half_step = 2**-4 if fmt.is_float else 0.5 / 127
    bound = keys().abs().amax(-1, keepdim=True) * half_step * (1 + 1e-5)  # float32 rounding may cross a tie
    assert ((dequantize(codes, scale_HT1) - keys()).abs() <= bound).all()


@formats
def test_empty_and_zero_tokens(fmt: NumFormat) -> None:
    """Catches a maximum over no tokens, and a zero scale."""
    codes, scale_HT1 = BlockCode(fmt).encode(torch.zeros(2, 0, 4))
    assert (codes.shape, scale_HT1.shape) == ((2, 0, 4), (2, 0, 1))
    _, scale_HT1 = BlockCode(fmt).encode(torch.zeros(2, 1, 4))
    assert (scale_HT1 >= SCALE_FLOOR).all()
    assert symmetric_scale(torch.zeros(1), fmt).item() >= SCALE_FLOOR
