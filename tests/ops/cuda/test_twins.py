"""The eager twins of the CUDA operations against the numerics that the other engines use."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qspec.nn.eager.attention import rotate
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerChannel, PerGroup, PerTensor
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.numerics.speculation import verify
from qspec.numerics.speculation.trees import path_to
from qspec.ops import cuda, reference, reference_cuda as twins


class DeviceOnly(TorchDispatchMode):
    """Fails where a GPU would wait for the host: a number that is read, or a shape that depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.WAITS), f"{name} reads the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [(INT8, PerChannel()), (FP8_E4M3, PerTensor()), (FP8_E4M3, PerChannel()), (INT4, PerGroup(16))],
)
def test_packed_weight_stands_for_the_same_matrix(fmt: NumFormat, granularity: Granularity) -> None:
    """Catches nibbles in the wrong order or sign, and scales of the wrong row or group."""
    weight = quantize_weight(torch.randn(24, 48), fmt, granularity)
    assert torch.equal(twins.unpacked(cuda.pack(weight)), weight.dequantize())


def test_int8_linear_equals_the_cpu_twin() -> None:
    """Catches scales on the wrong axis; integer sums are exact, two float products may differ in order."""
    weight, x = quantize_weight(torch.randn(24, 48), INT8, PerChannel()), torch.randn(5, 48)
    got = cuda.linear(cuda.quantize_rows(x, INT8), cuda.pack(weight, torch.float32))
    torch.testing.assert_close(got, reference.int8_linear(x, weight.codes, weight.scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_written_cache_is_attended_as_a_tree(dtype: torch.dtype) -> None:
    """Catches a wrong slot, a sibling or an unwritten position that is read, and heads of the wrong group."""
    b, g, length, d, parents = 2, 2, 24, 16, [-1, 0, 0, 1]
    lengths = torch.tensor([0, 13])
    scale: float | Tensor = torch.zeros(b, g, length) if dtype == torch.int8 else 0.02
    cache = cuda.KVLayer(torch.zeros(b, g, length, d).to(dtype), torch.zeros(b, g, length, d).to(dtype), scale, scale)
    if isinstance(scale, Tensor):
        cache = cuda.KVLayer(cache.k_BGLD, cache.v_BGLD, scale, scale.clone())
    k, v, q = torch.randn(b, 17, g, d), torch.randn(b, 17, g, d), torch.randn(b, 17, 4, d)
    angle = torch.randn(length, d // 2).repeat(1, 2)
    slots = torch.arange(17).expand(b, -1)
    turned = cuda.rope_write(q, k, v, angle.cos(), angle.sin(), slots, slots, cache)
    assert torch.equal(turned[0].transpose(0, 1), rotate(q[0].transpose(0, 1), angle.cos()[:17], angle.sin()[:17]))
    mask_KK = torch.zeros(4, 4, dtype=torch.bool)
    for node in range(4):
        mask_KK[node, path_to(parents, node)] = True
    bits = torch.tensor([sum(1 << j for j in range(4) if row[j]) for row in mask_KK.tolist()]).expand(b, -1)
    got = cuda.attend(turned[:, :4], cache, lengths, bits, d**-0.5)
    for i, n in enumerate(lengths.tolist()):
        sees = torch.cat((torch.ones(4, n, dtype=torch.bool), mask_KK), 1)
        keys, values = (
            twins._values(c, s)[i, :, : n + 4]
            for c, s in ((cache.k_BGLD, cache.k_scale), (cache.v_BGLD, cache.v_scale))
        )
        want = torch.nn.functional.scaled_dot_product_attention(
            turned[i : i + 1, :4].transpose(1, 2), keys[None], values[None], sees, enable_gqa=True
        )
        # float32 sums in another order
        torch.testing.assert_close(got[i], want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    plain = twins._values(cache.v_BGLD, cache.v_scale)[:, :, :17].transpose(1, 2)
    # one step of the coarsest format: 2**-4 of the value (FP8), 1/254 of the range (INT8)
    torch.testing.assert_close(plain, v, rtol=2**-4, atol=0.02)


def test_row_that_sees_nothing_reads_zero() -> None:
    """Catches the NaN of a softmax over nothing, and of memory that was never written."""
    full = torch.full((1, 1, 8, 16), torch.nan)
    got = cuda.attend(torch.randn(1, 1, 2, 16), cuda.KVLayer(full, full), torch.tensor([0]), torch.tensor([[0]]), 0.25)
    assert torch.equal(got, torch.zeros(1, 1, 2, 16))


@pytest.mark.parametrize("k", [0, 1, 5])
def test_verification_of_a_batch_equals_that_of_each_chain(k: int) -> None:
    """Catches another distribution than the engine's: the same uniform numbers must give the same answer."""
    b, v = 40, 7
    p, q = torch.randn(b, k + 1, v).softmax(-1), torch.randn(b, k, v).softmax(-1)
    drafts, uniforms = torch.randint(v, (b, k)), torch.rand(b, k + 1, dtype=torch.float64)
    with DeviceOnly():
        greedy, sampled = cuda.verify_greedy(p, drafts), cuda.verify_sampling(p, drafts, q, uniforms)
        certain = cuda.verify_sampling(p, drafts, None, uniforms)
    for i in range(b):
        assert (int(greedy[0][i]), int(greedy[1][i])) == verify.verify_greedy(drafts[i], p[i])
        for got, probs in ((sampled, q[i]), (certain, None)):
            want = verify.verify_sampling(drafts[i], probs, p[i], uniforms[i])
            assert (int(got[0][i]), int(got[1][i])) == want
