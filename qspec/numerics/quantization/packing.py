"""INT4 codes, eight to an int32: the `pack-quantized` layout of compressed-tensors.

Code `k` of a row sits in bits `4*(k % 8) … +3` of word `k // 8`, as `code + 8`. A short last word is filled with
zero bits.
"""

import torch
from torch import Tensor
import torch.nn.functional as F

PER_WORD = 8
OFFSET = 8


def pack_int4(codes_NK: Tensor) -> Tensor:
    """Pack codes in `[-8, 7]` (any integer dtype) to int32 `[N, ceil(K / 8)]`."""
    n, k = codes_NK.shape
    nibbles = F.pad(codes_NK.to(torch.int32) + OFFSET, (0, -k % PER_WORD))
    shifts = _shifts(codes_NK.device)
    # Nibbles do not overlap, so their sum is their union; int32 wraps the top one into the sign bit.
    return (nibbles.reshape(n, -1, PER_WORD) << shifts).sum(-1, dtype=torch.int32)


def unpack_int4(packed: Tensor, k: int) -> Tensor:
    """The int8 codes `[N, k]` of `pack_int4`'s words."""
    nibbles = (packed.unsqueeze(-1) >> _shifts(packed.device)) & 0xF
    return (nibbles.reshape(packed.shape[0], -1)[:, :k] - OFFSET).to(torch.int8)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)
