"""Models for `gpu_bench`: known shapes under random weights made on the device, or weights from a file it wrote.

Nothing here needs more than torch and `qspec` itself: shapes are read from `eval/shapes`, never from transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qspec.eval_files import eval_dir
from qspec.nn.cuda.model import CudaModel, Matrix, layer_of, unquantized
from qspec.numerics.quantization.affine import quantize_weight
from qspec.numerics.quantization.blocks import Granularity, PerChannel, PerGroup
from qspec.numerics.quantization.formats import FP8_E4M3, INT4, INT8, NumFormat
from qspec.ops.cuda import pack
from qspec.records import EMBEDDING, HEAD, ArchMap

Source = Callable[[str, tuple[int, ...]], Tensor]
"""A tensor by its name and shape."""

SHAPES = {
    "70B": "meta-llama--Llama-3.1-70B-Instruct",
    "8B": "meta-llama--Llama-3.1-8B-Instruct",
    "1B": "meta-llama--Llama-3.2-1B-Instruct",
}
SCHEMES: dict[str, tuple[NumFormat, Granularity, NumFormat | None] | None] = {
    "BF16": None,
    "FP8": (FP8_E4M3, PerChannel(), FP8_E4M3),
    "W8A8": (INT8, PerChannel(), INT8),
    "W4A16": (INT4, PerGroup(32), None),
}
"""Weight format, its granularity, and the format of inputs (a scale per row); None: floats."""


def shape(name: str) -> ArchMap:
    """The architecture of one of `SHAPES`. Its rotary frequencies are unscaled, which no time depends on."""
    config = json.loads((eval_dir() / "shapes" / f"{SHAPES[name]}.json").read_text(encoding="utf-8"))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    return llama(
        n_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        n_heads=heads,
        n_kv_heads=config["num_key_value_heads"],
        head_dim=head,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_inv_freq=tuple(config["rope_theta"] ** (-2 * i / head) for i in range(head // 2)),
        tied=config["tie_word_embeddings"],
    )


def small(layers: int = 2, vocab: int = 512, hidden: int = 256) -> ArchMap:
    """A model that a CPU runs at once, with heads as wide as those of large ones."""
    return llama(
        n_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        n_heads=hidden // 64,
        n_kv_heads=hidden // 128,
        head_dim=64,
        vocab_size=vocab,
        max_positions=512,
        rope_inv_freq=tuple(10000.0 ** (-2 * i / 64) for i in range(32)),
        tied=False,
    )


def llama(**sizes: Any) -> ArchMap:
    return ArchMap(model_type="llama", architecture="LlamaForCausalLM", norm_eps=1e-5, **sizes)


def random_source(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Source:
    """Normal weights whose products keep their size; gains of one. Drawn in the order in which they are asked for."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, device=device)
        x = torch.randn(size, dtype=dtype, device=device, generator=generator)
        return x.mul_(size[1] ** -0.5)

    return draw


def kept_source(tensors: Mapping[str, Tensor]) -> Source:
    """The tensors of a model."""
    return lambda name, size: tensors[name].reshape(size)


def build(
    arch: ArchMap,
    scheme: str,
    source: Source,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaModel:
    """A model under one of `SCHEMES`, rounded to nearest; embedding, head and cache stay floats."""

    def gain(name: str) -> Tensor:
        return source(f"{name}.weight", (arch.hidden_size,)).to(device, torch.float32)

    def matrix(*names: str) -> Matrix:
        parts = [source(f"{name}.weight", arch.linear_shape(name)) for name in names]
        whole = torch.cat([part.to(device) for part in parts]) if len(parts) > 1 else parts[0].to(device)
        rounding = SCHEMES[scheme]
        if rounding is None:
            return Matrix(unquantized(whole.to(dtype)))
        fmt, granularity, inputs = rounding
        return Matrix(pack(quantize_weight(whole, fmt, granularity), dtype), inputs)

    rows = arch.vocab_size, arch.hidden_size
    embed_VH = source(EMBEDDING, rows).to(device, dtype)
    layers = tuple(layer_of(arch, name, gain, matrix) for name in arch.layers)
    head = embed_VH if arch.tied else source(HEAD, rows).to(device, dtype)
    return CudaModel(arch, dtype, embed_VH, layers, gain("model.norm"), Matrix(unquantized(head)))


def with_kv(model: CudaModel, kv: NumFormat | None) -> CudaModel:
    """The same weights over another cache, under one scale of 1 where it is stored."""
    return replace(model, kv=kv, kv_scales=((1.0, 1.0),) * model.arch.n_layers if kv == FP8_E4M3 else ())


def weight_bytes(arch: ArchMap, scheme: str) -> int:
    """Bytes of weights that a pass reads, with scales: all but an embedding of its own."""
    per, extra = {"BF16": (2.0, 0), "FP8": (1.0, 4), "W8A8": (1.0, 4), "W4A16": (0.5 + 4 / 32, 0)}[scheme]
    shapes = [arch.linear_shape(name) for name in arch.linears() if name != "lm_head"]
    return int(sum(o * k * per + o * extra for o, k in shapes)) + 2 * arch.vocab_size * arch.hidden_size


def kv_bytes(arch: ArchMap, kv: NumFormat | None) -> int:
    """Bytes of a cached position."""
    return arch.n_layers * arch.n_kv_heads * arch.head_dim * 2 * (2 if kv is None else 1)


def write_weights(path: Path, model: str, texts: list[str]) -> None:
    """Keep a model's float weights, and tokens of texts to continue, for a machine with torch alone."""
    from qspec.models.load import load
    from qspec.schema.quantization import ModelSpec  # the whole of qspec, which that machine lacks

    loaded = load(ModelSpec(model=model))
    prompts = [loaded.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    tensors = {name: x.to(torch.bfloat16) for name, x in loaded.tensors.items()}
    torch.save({"arch": asdict(loaded.arch), "tensors": tensors, "prompts": prompts}, path)


def read_weights(path: Path) -> tuple[ArchMap, dict[str, Tensor], list[list[int]]]:
    """What `write_weights` kept."""
    kept = torch.load(path, map_location="cpu", weights_only=True)
    return ArchMap(**kept["arch"]), kept["tensors"], kept["prompts"]
