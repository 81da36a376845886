"""Operations of the CUDA engine: a kernel on a GPU (or in Triton's interpreter), its eager twin on the CPU.

Shapes and distributions are those of the twins in `ops.reference_cuda`. The first call that needs Triton imports it.
"""

import torch
from torch import Tensor

from qspec.numerics.quantization.formats import INT4, NumFormat
from qspec.ops import reference_cuda as twins
from qspec.ops.cuda.device import interpreted
from qspec.ops.reference_cuda import CudaWeight, KVLayer, Rows, pack, verify_greedy, verify_sampling

__all__ = [
    "CudaWeight",
    "KVLayer",
    "add_rms_norm",
    "attend",
    "linear",
    "pack",
    "quantize_rows",
    "rope_write",
    "silu_mul",
    "verify_greedy",
    "verify_sampling",
]


def takes_kernels(x: Tensor) -> bool:
    """Whether operations on `x` are kernels: on a GPU, or anywhere in Triton's interpreter."""
    return x.is_cuda or interpreted()


def quantize_rows(x_NH: Tensor, fmt: NumFormat, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes `[N, H]` and scales `[N]`, from each row's range or one given number. Reads `x` once."""
    _check("x_NH", x_NH, 2)
    if not takes_kernels(x_NH):
        return twins.quantize_rows(x_NH, fmt, scale)
    from qspec.ops.cuda import rows

    return rows.quantize_rows(x_NH, fmt, scale)


def add_rms_norm(
    x_NH: Tensor,
    residual_NH: Tensor | None,
    weight_H: Tensor,
    eps: float,
    fmt: NumFormat | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes, scales (None without `fmt`) and the new residual. One pass instead of three: saves 4 N H values."""
    _check("x_NH", x_NH, 2)
    if weight_H.shape != x_NH.shape[1:] or (residual_NH is not None and residual_NH.shape != x_NH.shape):
        raise ValueError(f"weight {tuple(weight_H.shape)} or residual: they must fit x {tuple(x_NH.shape)}; check both")
    if not takes_kernels(x_NH):
        return twins.add_rms_norm(x_NH, residual_NH, weight_H, eps, fmt, scale)
    from qspec.ops.cuda import rows

    return rows.add_rms_norm(x_NH, residual_NH, weight_H, eps, fmt, scale)


def silu_mul(gate_up_N2I: Tensor, fmt: NumFormat | None, scale: Tensor | None = None) -> Rows:
    """Codes `[N, I]` and scales of SiLU(gate) * up, gate first. One pass instead of three: saves 4 N I values."""
    _check("gate_up_N2I", gate_up_N2I, 2)
    if gate_up_N2I.shape[1] % 2:
        raise ValueError(f"{gate_up_N2I.shape[1]} columns: gate and up are of equal width; give 2 I columns")
    if not takes_kernels(gate_up_N2I):
        return twins.silu_mul(gate_up_N2I, fmt, scale)
    from qspec.ops.cuda import rows

    return rows.silu_mul(gate_up_N2I, fmt, scale)


def linear(x: Rows, weight: CudaWeight) -> Tensor:
    """`[N, O]` in `weight.dtype`. Codes are multiplied as stored; of up to 16 rows, every weight is read once."""
    _check("codes_NK", x[0], 2)
    stored = x[0].shape[1] // (2 if weight.fmt == INT4 else 1)
    if stored != weight.codes.shape[1]:
        raise ValueError(
            f"{x[0].shape[1]} inputs, stored weight {tuple(weight.codes.shape)}: they must fit; check both"
        )
    if not takes_kernels(x[0]):
        return twins.linear(x, weight)
    from qspec.ops.cuda import matmul

    return matmul.linear(x, weight)


def rope_write(
    q_BRQD: Tensor,
    k_BRGD: Tensor,
    v_BRGD: Tensor,
    cos_LD: Tensor,
    sin_LD: Tensor,
    positions_BR: Tensor,
    slots_BR: Tensor,
    cache: KVLayer,
) -> Tensor:
    """Rotated queries; keys and values are rounded as the cache stores them and written at `slots`, in one pass."""
    _check("q_BRQD", q_BRQD, 4)
    if slots_BR.shape != q_BRQD.shape[:2] or positions_BR.shape != q_BRQD.shape[:2]:
        raise ValueError(f"slots {tuple(slots_BR.shape)} or positions: one for each row {tuple(q_BRQD.shape[:2])}")
    if takes_kernels(q_BRQD):
        from qspec.ops.cuda import attention, rope

        if attention.takes(q_BRQD, cache):
            return rope.rope_write(q_BRQD, k_BRGD, v_BRGD, cos_LD, sin_LD, positions_BR, slots_BR, cache)
    return twins.rope_write(q_BRQD, k_BRGD, v_BRGD, cos_LD, sin_LD, positions_BR, slots_BR, cache)


def attend(q_BRQD: Tensor, cache: KVLayer, lengths_B: Tensor, ancestors_BR: Tensor, scale: float) -> Tensor:
    """Decode and tree attention `[B, R, Q, D]` over codes as they are stored; see the twin for what a row sees."""
    _check("q_BRQD", q_BRQD, 4)
    if q_BRQD.shape[2] % cache.k_BGLD.shape[1] or ancestors_BR.dtype != torch.int64:
        raise ValueError(f"{q_BRQD.shape[2]} query heads, ancestors {ancestors_BR.dtype}: a multiple of G, and int64")
    if takes_kernels(q_BRQD):
        from qspec.ops.cuda import attention

        if attention.takes(q_BRQD, cache):
            return attention.attend(q_BRQD, cache, lengths_B, ancestors_BR, scale)
    return twins.attend(q_BRQD, cache, lengths_B, ancestors_BR, scale)


def _check(name: str, x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise ValueError(f"{name} {tuple(x.shape)}: it must have {dims} dimensions; reshape it")
