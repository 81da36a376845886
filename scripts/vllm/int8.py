"""vLLM's INT8 matmul of a checkpoint's layers on this CPU beside exact integers, as JSON.

Run by the interpreter of an environment with vLLM; the argument is the checkpoint's folder. Without VNNI, oneDNN adds
pairs of products in 16 bits, which overflow where codes are large.
"""

import json
from pathlib import Path
from statistics import median
import sys
from typing import Any

from safetensors import safe_open
import torch
from torch import Tensor

ROWS = 16


def errors(w_NK: Tensor, kernels: Any) -> tuple[float, float]:
    """Of sums with normal inputs, rounded per row: relative root mean square error, and the share of wrong ones."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(ROWS, w_NK.shape[1], generator=generator)
    x_TK = (127 * x_TK / x_TK.abs().amax(1, keepdim=True)).round().to(torch.int8)
    sums_TN = torch.empty(ROWS, len(w_NK))
    x_scale_T1, w_scale_1N = torch.ones(ROWS, 1), torch.ones(1, len(w_NK))
    handler = kernels.create_onednn_scaled_mm(w_NK.t(), w_scale_1N, torch.float32, True, False)
    kernels.onednn_scaled_mm(handler, x_TK, sums_TN, x_scale_T1, None, None, None)
    exact_TN = x_TK.double() @ w_NK.double().t()
    off_TN = (sums_TN - exact_TN).abs()
    return float(off_TN.norm() / exact_TN.norm()), float((off_TN > 0.5).double().mean())


def main() -> None:
    from vllm import _custom_ops

    by_layer = list[tuple[float, float]]()
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            layers = (file.get_tensor(name) for name in file.keys())  # noqa: SIM118 (not a mapping)
            by_layer += [errors(w, _custom_ops) for w in layers if w.dtype == torch.int8 and w.dim() == 2]
    sizes, shares = zip(*by_layer, strict=True)
    numbers = {"error": median(sizes), "worst": max(sizes), "wrong": median(shares)}
    print(json.dumps({"layers": len(by_layer)} | {name: round(value, 5) for name, value in numbers.items()}))


if __name__ == "__main__":
    main()
