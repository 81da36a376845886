"""Bytes against hand counts and published sizes."""

from dataclasses import replace

import pytest

from qspec.models.load import resolve_arch
from qspec.numerics.quantization.formats import FP8_E4M3, INT8
from qspec.plan import KVScheme
from qspec.records import ArchMap
from qspec.schema.drafts import MlpDraft
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.scheme_table import SCHEMES
from qspec.schemes.build import build_plan, resolve_plan
from qspec.schemes.footprint import Footprint, footprint, kv_bytes_per_token, mlp_footprint, weight_bytes

TINY = ArchMap("qwen3_moe", "Qwen3MoeForCausalLM", 2, 8, 16, 2, 1, 4, 10, 32, (1.0, 1.0))


def arch(model: str) -> ArchMap:
    return resolve_arch(ModelSpec(model=model))


def half(model: str, scheme: str, kv: KVScheme | None = None) -> Footprint:
    plan = build_plan(QuantSpec(scheme=scheme))
    return footprint(arch(model), resolve_plan(plan, arch(model)), kv, 2)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("none", 256 * 128 * 2),
        ("W8A8", 256 * 128 + 256 * 4),
        ("FP8", 256 * 128 + 4),
        ("FP8_BLOCK", 256 * 128 + 2 * 4),
        ("W4A16", 256 * 64 + 256 * 2 * 4),
    ],
)
def test_bytes_of_one_matrix(scheme: str, expected: int):
    """Would catch forgotten scales, or 4-bit codes counted as bytes. Matrix 256 x 128, bfloat16, groups of 64."""
    assert weight_bytes((256, 128), SCHEMES[scheme].layer(64), 2) == expected


def test_bytes_read_by_an_8b_model():
    """Would catch embeddings counted as read, or the head forgotten: 15.0 GB in BF16, 8.03 GB in FP8 with BF16 head."""
    model = "meta-llama/Llama-3.1-8B-Instruct"
    # published to three digits; scales and norms are below the last of them
    assert half(model, "none").cost.weight_bytes == pytest.approx(15.0e9, rel=2e-3)
    assert half(model, "FP8_DYNAMIC").cost.weight_bytes == pytest.approx(8.03e9, rel=2e-3)


def test_a_tied_head_is_stored_once_and_read():
    """Would catch a tied head that is stored twice, or not read: 1B model, head 128256 x 2048."""
    tied = half("meta-llama/Llama-3.2-1B-Instruct", "FP8_DYNAMIC")
    head = 128_256 * 2048 * 2
    assert tied.embedding_bytes == 0
    assert tied.groups["none"].bytes == head
    assert tied.resident == tied.cost.weight_bytes
    assert tied.head_share == pytest.approx(0.35, abs=0.005)  # published as 35 %


@pytest.mark.parametrize(
    ("model", "kv", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", None, 128 * 1024),
        ("meta-llama/Llama-3.1-8B-Instruct", KVScheme(FP8_E4M3, "tensor"), 64 * 1024),
        ("meta-llama/Llama-3.1-70B-Instruct", KVScheme(FP8_E4M3, "tensor"), 160 * 1024),
        ("meta-llama/Llama-3.1-8B-Instruct", KVScheme(INT8, "token_head"), 64 * 1024 + 2 * 32 * 8 * 4),
        ("Qwen/Qwen3-0.6B", None, 2 * 28 * 8 * 128 * 2),
    ],
)
def test_kv_bytes_per_token(model: str, kv: KVScheme | None, expected: int):
    """Would catch K without V, all heads instead of KV heads, or scales of per-token formats left out."""
    assert kv_bytes_per_token(arch(model), kv, 2) == expected


def test_mlp_speculator_has_the_published_number_of_parameters():
    """Would catch a projection or table left out: IBM's 13B speculator of 840,982,528 parameters."""
    draft = MlpDraft(kind="mlp_speculator", model="x", n_predict=3, inner_dim=4096)
    found = mlp_footprint(draft, arch("meta-llama/Llama-2-13b-chat-hf"), 2)
    assert found.parameters == 840_982_528
    in_float = 3 * (32000 * 4096 + 2 * 4096)  # embeddings and norms; the others take a byte each
    assert found.resident == found.parameters + in_float


def test_outliers_are_counted_with_their_indices():
    """Would catch a share that looks free: 1 % of 256 x 128 is 327 values of 16 bits with 16-bit indices, 257 ends."""
    scheme = SCHEMES["W4A16"].layer(64)
    assert scheme is not None
    sparse = weight_bytes((256, 128), replace(scheme, outliers=1.0), 2) - weight_bytes((256, 128), scheme, 2)
    assert sparse == 327 * (2 + 2) + 257 * 4


def test_a_token_reads_its_experts_only():
    """Would catch a mixture that reads all it holds. Per layer and expert 3 matrices of 8 x 6; 2 of 4 per token."""
    dense = replace(TINY, n_layers=3)
    mixture = replace(dense, n_experts=4, experts_per_token=2, expert_size=6, dense_layers=(0,))
    found = {}
    for shape in (dense, mixture):
        schemes = build_plan(QuantSpec(scheme="W8A8")).resolve(shape.linears())
        found[shape.n_experts] = footprint(shape, schemes, None, 2)
    expert = 3 * 8 * 6 + (6 + 6 + 8) * 4  # codes, and a scale per row of gate, up and down
    mlp, router = 3 * 8 * 16 + (16 + 16 + 8) * 4, 4 * 8 * 2
    changed = 2 * (router - mlp)  # in two of three layers
    assert found[4].resident - found[0].resident == changed + 2 * 4 * expert
    assert found[4].cost.weight_bytes - found[0].cost.weight_bytes == changed + 2 * 2 * expert
    assert found[4].cost.ops - found[0].cost.ops == 2 * 2 * (2 * 3 * 8 * 6 - 3 * 8 * 16)
    assert found[4].cost.expert_bytes == 2 * 4 * expert
    assert (found[0].cost.expert_bytes, found[0].cost.expert_share, found[4].cost.expert_share) == (0, 0, 0.5)
