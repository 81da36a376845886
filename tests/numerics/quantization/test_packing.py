"""INT4 words are those of compressed-tensors, bit for bit."""

from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, strategies as st
import pytest
import torch
from torch import Tensor

from qspec.numerics.quantization.packing import pack_int4, unpack_int4


def codes(n: int, k: int, seed: int) -> Tensor:
    return torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 4), st.integers(1, 70), st.integers(0, 2**31))
def test_words_equal_compressed_tensors(n: int, k: int, seed: int) -> None:
    """Catches another nibble order, offset or filler of the last word, which a round trip alone cannot see."""
    codes_NK = codes(n, k, seed)
    packed = pack_int4(codes_NK)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(codes_NK, 4))
    assert torch.equal(unpack_int4(packed, k), codes_NK)
    assert torch.equal(unpack_from_int32(packed, 4, torch.Size((n, k))), codes_NK)


@pytest.mark.parametrize("code", range(-8, 8))
def test_every_code_in_every_place(code: int) -> None:
    """Catches sign extension when the top nibble sets the sign bit of its word."""
    for place in range(8):
        codes_NK = torch.zeros(1, 8, dtype=torch.int8)
        codes_NK[0, place] = code
        assert torch.equal(unpack_int4(pack_int4(codes_NK), 8), codes_NK)


def test_layout_by_hand() -> None:
    """Catches a change of the layout on both sides at once."""
    word = pack_int4(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]], dtype=torch.int8))
    assert word.tolist() == [[0x76543210]]
    assert pack_int4(torch.full((1, 8), 7, dtype=torch.int8)).tolist() == [[-1]]
