"""A whole pass of a model on the kernels against the same on their eager twins."""

import pytest
import torch
from torch import Tensor

from qspec.nn.cuda.decoder import CudaDecoder, Pool
from qspec.nn.cuda.model import CudaLayer, CudaModel, Matrix
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerChannel, PerGroup
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.ops import cuda
from qspec.records import ArchMap

ARCH = ArchMap(
    "llama", "LlamaForCausalLM", 1, 32, 64, 4, 2, 16, 50, 64, tuple(float(10.0**-i) for i in range(8)), qk_norm=True
)


def model_of(fmt: NumFormat, blocks: Granularity, activation: NumFormat | None, device: torch.device) -> CudaModel:
    def matrix(outputs: int, inputs: int) -> Matrix:
        weight = quantize_weight(torch.randn(outputs, inputs) / inputs**0.5, fmt, blocks)
        packed = cuda.pack(weight, torch.float32)
        assert packed.scale is not None
        moved = cuda.CudaWeight(packed.codes.to(device), packed.scale.to(device), fmt, packed.group_size, packed.dtype)
        return Matrix(moved, activation)

    gain, head_gain = torch.rand(32, device=device), torch.rand(16, device=device)
    layer = CudaLayer(
        gain, matrix(128, 32), head_gain, head_gain, matrix(32, 64), gain, matrix(128, 32), matrix(32, 64)
    )
    embed = torch.randn(50, 32, device=device)
    head = Matrix(cuda.CudaWeight(embed, None, None, None, torch.float32))
    return CudaModel(ARCH, torch.float32, embed, (layer,), gain, head, INT8 if fmt == INT8 else None)


@pytest.mark.parametrize(
    ("fmt", "blocks", "activation"),
    [(INT8, PerChannel(), INT8), (FP8_E4M3, PerChannel(), FP8_E4M3), (INT4, PerGroup(32), None)],
)
def test_pass_of_a_model(
    device: torch.device,
    fmt: NumFormat,
    blocks: Granularity,
    activation: NumFormat | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an operation that does not take what the engine gives it, or gives what the next one does not take."""
    model = model_of(fmt, blocks, activation, device)

    def passes() -> tuple[Tensor, Tensor]:
        decoder = CudaDecoder(Pool(model, 24, 2))
        first = decoder.forward(torch.tensor([3, 14, 15, 9]))
        return first, decoder.forward_tree(torch.tensor([2, 6, 5]), (-1, -1, 0))

    got = passes()
    monkeypatch.setattr(cuda, "takes_kernels", lambda x: False)
    for logits, want in zip(got, passes(), strict=True):
        # a code that rounds the other way moves a logit by its step
        torch.testing.assert_close(logits, want, rtol=0.02, atol=0.02)
