"""The decoder against transformers, and its cache against itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from qspec.bridges.hf import load_folder
from qspec.models.layers import truncate_layers
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.quantization.rotation import hadamard_transform
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import LoadedModel
from qspec.schema.quantization import KVSpec, QuantSpec
from qspec.schemes.build import build_plan
from tests.tiny import KINDS, NEWER_KINDS, VOCAB_SIZE, tiny_model

TOKENS = torch.randint(5, VOCAB_SIZE, (48,), generator=torch.Generator().manual_seed(1))

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(kind, {}) for kind in (*KINDS, *NEWER_KINDS)],
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
]


def _hf_logits(folder: Path, tokens_T: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = model(tokens_T[None]).logits[0]
    return logits


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_folder(tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS)
def test_logits_equal_transformers(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Catches a wrong rope, norm offset, embedding scale, window, bias, q/k norm or head order of any kind."""
    folder = tiny_model(kind, tmp_path, **overrides)
    decoder = Decoder.from_float(load_folder(folder))
    # float32, two layers: only the order of summation differs
    torch.testing.assert_close(decoder.forward(TOKENS), _hf_logits(folder, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", *NEWER_KINDS])
def test_pieces_equal_the_whole(kind: str, tmp_path: Path) -> None:
    """Catches a cache or mask that is off by one when a sequence arrives in pieces of 1 and of several tokens."""
    decoder = Decoder.from_float(load_folder(tiny_model(kind, tmp_path)))
    whole = decoder.forward(TOKENS)
    decoder.truncate(0)
    pieces = [decoder.forward(part) for part in TOKENS.split([20, 1, 5, 1, 21])]
    # float32; attention sums in another order
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", NEWER_KINDS)
def test_layers_one_by_one_equal_the_whole(kind: str, tmp_path: Path) -> None:
    """Catches a window, rotary base or mixture that goes by a layer's place in its piece, not by its number."""
    model = load_folder(tiny_model(kind, tmp_path))
    whole = Decoder.from_float(model).forward(TOKENS)
    x_TK = Decoder.from_float(replace(model, arch=replace(model.arch, n_layers=0))).embed(TOKENS)
    for i in range(model.arch.n_layers):
        own = {name: model.tensors[name] for name in model.tensors if name.startswith(f"model.layers.{i}.")}
        arch = replace(model.arch, first_layer=i, n_layers=1, has_head=False)
        x_TK = Decoder.from_float(replace(model, arch=arch, tensors=own)).run_layers(x_TK)
    assert torch.equal(Decoder.from_float(replace(model, arch=replace(model.arch, n_layers=0))).run_head(x_TK), whole)


def test_last_returns_the_tail(llama: LoadedModel) -> None:
    """Catches logits of the wrong rows when only the tail is asked for."""
    decoder = Decoder.from_float(llama)
    whole = decoder.forward(TOKENS)
    decoder.truncate(0)
    # the head multiplies fewer rows: another order of summation
    torch.testing.assert_close(decoder.forward(TOKENS, last=3), whole[-3:], rtol=1e-5, atol=1e-5)


def test_truncate_forgets(llama: LoadedModel) -> None:
    """Catches rejected draft tokens that still influence what follows."""
    decoder = Decoder.from_float(llama)
    decoder.forward(TOKENS[:10])
    want = decoder.forward(TOKENS[10:12])
    decoder.truncate(10)
    decoder.forward(TOKENS[20:30])
    decoder.truncate(10)
    assert torch.equal(decoder.forward(TOKENS[10:12]), want)
    assert decoder.length == 12


def test_observer_sees_every_linear_input(llama: LoadedModel) -> None:
    """Catches a layer that calibration would miss, or inputs of the wrong width."""
    decoder, seen = Decoder.from_float(llama), {}

    def observe(name: str, x: Tensor) -> None:
        seen[name] = tuple(x.shape)

    decoder.observer = observe
    decoder.forward(TOKENS, last=1)
    arch = llama.arch
    for name in arch.linears():
        shared = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        assert seen[shared] == (len(TOKENS), arch.linear_shape(name)[1])
    assert seen["model.layers.1.self_attn.k"] == (arch.n_kv_heads, len(TOKENS), arch.head_dim)


def test_the_input_of_down_proj_is_transformed(tmp_path: Path) -> None:
    """Catches statistics of the input before its Hadamard transform, and rows that depend on their neighbours."""
    model = load_folder(tiny_model("llama", tmp_path, intermediate_size=96, vocab_size=2048))  # 96 = 8 * 12
    name, seen = "model.layers.0.mlp.down_proj", list[Tensor]()
    for down_hadamard in (False, True):
        decoder = Decoder.from_float(replace(model, arch=replace(model.arch, down_hadamard=down_hadamard)))
        decoder.observer = lambda layer, x: seen.append(x) if layer == name else None
        decoder.forward(TOKENS)
    assert torch.equal(seen[1], hadamard_transform(seen[0]))
    rotated = replace(model, arch=replace(model.arch, down_hadamard=True))
    decoder = Decoder.from_quantized(quantize(rotated, None, build_plan(QuantSpec(scheme="W8A8"))))
    decoder.forward(TOKENS[:20])
    together = decoder.forward(TOKENS[20:29])
    decoder.truncate(20)
    assert torch.equal(together, torch.cat([decoder.forward(token[None]) for token in TOKENS[20:29]]))


def test_layers_alone_equal_transformers(tmp_path: Path) -> None:
    """Catches hidden states with the last norm applied, without the embedding's factor, or of another position."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model("gemma", tmp_path)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        embedded_TK, want_TK = served(TOKENS[None], output_hidden_states=True).hidden_states[:2]
    decoder = Decoder.from_float(truncate_layers(load_folder(folder), 1))
    pieces = [decoder.run_layers(part) for part in embedded_TK[0].split([20, 28])]
    # float32, one layer: only the order of summation differs
    torch.testing.assert_close(torch.cat(pieces), want_TK[0], rtol=1e-4, atol=1e-4)
    assert decoder.length == len(TOKENS)


@pytest.mark.parametrize("kind", ["llama", "mistral", *NEWER_KINDS])
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_quantized_rows_are_computed_as_if_alone(kind: str, scheme: Literal["W8A8", "W4A16"], tmp_path: Path) -> None:
    """Catches verification that rounds other codes than decoding: greedy speculation would change the text.

    In a mixture it would also catch experts whose rows depend on how many tokens came to them.
    """
    model = load_folder(tiny_model(kind, tmp_path, vocab_size=2048))
    stats = calibrate(model, [TOKENS.tolist()])
    kv = KVSpec(format="fp8_e4m3")
    quantized = quantize(model, stats, build_plan(QuantSpec(scheme=scheme, group_size=32, kv=kv)))
    decoder = Decoder.from_quantized(quantized)
    decoder.forward(TOKENS[:20])
    together = decoder.forward(TOKENS[20:29])
    decoder.truncate(20)
    alone = torch.cat([decoder.forward(token[None]) for token in TOKENS[20:29]])
    assert torch.equal(together, alone)


KEYS = {"format": "int4", "granularity": "channel", "group": 8}


@pytest.mark.parametrize(
    "kv",
    [
        {"format": "int4", "granularity": "token_head", "key": KEYS, "residual": 8},
        {"format": "int8", "granularity": "token_head", "residual": 3},
        {"format": "fp8_e4m3", "query": None, "skip_layers": (1,)},
        {"granularity": "head", "query": "head", "value": {"format": "int4", "granularity": "token_head"}},
    ],
)
def test_every_cache_verifies_as_it_decodes(kv: dict[str, Any], tmp_path: Path) -> None:
    """Catches rows of one call that read codes where decoding reads floats, and queries that are rounded together."""
    model = load_folder(tiny_model("llama", tmp_path, vocab_size=2048))
    stats = calibrate(model, [TOKENS.tolist()])
    quantized = quantize(model, stats, build_plan(QuantSpec(scheme="W8A8", kv=KVSpec(**kv))))
    decoder = Decoder.from_quantized(quantized, max_length=48)
    decoder.forward(TOKENS[:12])
    together = torch.cat([decoder.forward(part) for part in TOKENS[12:].split(9)])
    decoder.truncate(12)
    alone = torch.cat([decoder.forward(token[None]) for token in TOKENS[12:]])
    assert torch.equal(together, alone)
    exact = Decoder.from_float(model, max_length=48)
    exact.forward(TOKENS[:12])
    assert not torch.equal(exact.forward(TOKENS[12:]), alone)
