"""INT4 codes, eight to a word on disk, and two to a byte in the C++ core and in KV caches.

Words are the `pack-quantized` layout of compressed-tensors: code `k` of a row sits in bits `4*(k % 8) … +3` of word
`k // 8`, as `code + 8`. A short last word is filled with zero bits.
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


def pack_nibbles(codes: Tensor) -> Tensor:
    """INT4 codes `[…, D]` (int8 in [-8, 7], D even) to bytes `[…, D / 2]`: channel 2i low, 2i + 1 high."""
    low, high = codes[..., ::2], codes[..., 1::2]
    return ((high << 4) | (low & 0xF)).view(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The int8 codes `[…, D]` of `pack_nibbles`' bytes; shifts of int8 carry the sign."""
    pair = packed.view(torch.int8)
    return torch.stack(((pair << 4) >> 4, pair >> 4), -1).flatten(-2)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)
