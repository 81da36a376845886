"""vLLM's INT8 matmul on this CPU beside exact integers, as JSON; run by the interpreter of an environment with vLLM.

Without VNNI, oneDNN adds pairs of products in 16 bits, which overflow where codes fill 8 bits.
"""

import json
from typing import Any

import torch

T, K, N = 8, 576, 64
BITS = (7, 8)


def error(bits: int, scaled: Any) -> float:
    """Root mean square of the error of products of random codes, as a share of that of the exact ones."""
    most, generator = 2 ** (bits - 1) - 1, torch.Generator().manual_seed(0)
    x_TK = torch.randint(-most, most + 1, (T, K), generator=generator).to(torch.int8)
    w_NK = torch.randint(-most, most + 1, (N, K), generator=generator).to(torch.int8)
    found_TN, x_scale_T1, w_scale_1N = torch.empty(T, N), torch.ones(T, 1), torch.ones(1, N)
    handler = scaled.create_onednn_scaled_mm(w_NK.t(), w_scale_1N, torch.float32, True, False)
    scaled.onednn_scaled_mm(handler, x_TK, found_TN, x_scale_T1, None, None, None)
    exact_TN = x_TK.double() @ w_NK.double().t()
    return float((found_TN - exact_TN).norm() / exact_TN.norm())


if __name__ == "__main__":
    from vllm import _custom_ops  # type: ignore[import-not-found]

    print(json.dumps({str(bits): round(error(bits, _custom_ops), 6) for bits in BITS}))
