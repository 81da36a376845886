"""A model's weights on a CUDA device, merged and packed for `ops.cuda`: what `nn.cuda.decoder` runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.eager.attention import rope_tables
from qspec.nn.eager.linear import joined_rows, merge_obstacle
from qspec.numerics.quantization.blocks import PerTensor, PerToken
from qspec.numerics.quantization.formats import FP8_E4M3, INT8, NumFormat
from qspec.ops import cuda as ops
from qspec.ops.cuda import CudaWeight, pack
from qspec.plan import KVScheme, TensorScheme
from qspec.records import EMBEDDING, ArchMap, LoadedModel, QLinear, QuantizedModel

Rounded = tuple[Tensor, Tensor | None]
"""Inputs of a matmul: codes and their scales, or floats and None."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer: weight, how its input is rounded (`scale`: stored, `[1]`; None: one per row), bias."""

    weight: CudaWeight
    fmt: NumFormat | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Rounded) -> Tensor:
        y_NO = ops.linear(x, self.weight)
        return y_NO if self.bias is None else y_NO + self.bias

    def round(self, x_NK: Tensor) -> Rounded:
        """An input that no kernel before has rounded."""
        return (x_NK, None) if self.fmt is None else ops.quantize_rows(x_NK, self.fmt, self.scale)


@dataclass(frozen=True)
class CudaLayer:
    """A decoder layer; norms are float32 gains."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class CudaModel:
    """Everything of a model that no sequence changes. `kv_scales`: of keys and values, by layer, for stored ones."""

    arch: ArchMap
    dtype: torch.dtype
    embed_VH: Tensor
    layers: Iterable[CudaLayer]
    norm: Tensor
    head: Matrix
    kv: NumFormat | None = None
    kv_scales: tuple[tuple[float, float], ...] = ()

    @property
    def device(self) -> torch.device:
        return self.embed_VH.device

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin `[length, R]` on the device."""
        cos_LR, sin_LR = rope_tables(self.arch.rope_inv_freq, self.arch.rope_factor, length, self.dtype)
        return cos_LR.to(self.device), sin_LR.to(self.device)


def obstacle(model: LoadedModel | QuantizedModel) -> str | None:
    """Why the CUDA engine does not run this model, in words; None when it does."""
    reason = _arch_obstacle(model.arch)
    if reason is not None or isinstance(model, LoadedModel):
        return reason
    if model.head_ids is not None:
        return "a head for a part of the vocabulary"
    linears = model.linears
    for group in model.arch.fused_groups():
        reason = merge_obstacle([linears.get(name) for name in group])
        if reason is not None:
            return f"{group[0]} and what it is merged with: {reason}"
    own = (f"{name}: {reason}" for name, linear in linears.items() if (reason := _linear_obstacle(linear)))
    return next(own, None) or _kv_obstacle(model)


def load(model: LoadedModel | QuantizedModel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> CudaModel:
    """Pack a model onto a device; raises `RecipeError` for one that has an `obstacle`."""
    reason = obstacle(model)
    if reason is not None:
        raise RecipeError(f"model {model.arch.model_type} on CUDA", reason, "run it on the CPU: device cpu")
    source = _Source(model, device, dtype)
    arch = model.arch
    layers = tuple(layer_of(arch, name, source.gain, source.matrix) for name in arch.layers)
    embed_VH = model.tensors[EMBEDDING].to(device, dtype)
    tied = arch.tied and "lm_head" not in source.linears
    head = Matrix(unquantized(embed_VH)) if tied else source.matrix("lm_head")
    kv = model.plan.kv if isinstance(model, QuantizedModel) else None
    scales = _kv_scales(model) if isinstance(model, QuantizedModel) and kv is not None and kv.stored else ()
    return CudaModel(arch, dtype, embed_VH, layers, source.gain("model.norm"), head, kv.fmt if kv else None, scales)


class _Source:
    """Looks layers up by name and packs them."""

    def __init__(self, model: LoadedModel | QuantizedModel, device: torch.device, dtype: torch.dtype) -> None:
        self.arch, self.tensors = model.arch, model.tensors
        self.linears: Mapping[str, QLinear] = model.linears if isinstance(model, QuantizedModel) else {}
        self.device, self.dtype = device, dtype

    def gain(self, name: str) -> Tensor:
        return (self.tensors[f"{name}.weight"].float() + self.arch.norm_offset).to(self.device)

    def matrix(self, *names: str) -> Matrix:
        """Layers that read one input as one."""
        quantized = [self.linears[name] for name in names if name in self.linears]
        bias = self._bias(names)
        if not quantized:
            floats = torch.cat([self.tensors[f"{name}.weight"].to(self.device, self.dtype) for name in names])
            return Matrix(unquantized(floats), bias=bias)
        whole = joined_rows(quantized)
        scale = None if whole.input_scale is None else whole.input_scale.to(self.device)
        fmt = None if whole.activation is None else whole.activation.fmt
        packed = pack(whole.weight, self.dtype)
        assert packed.scale is not None
        moved = replace(packed, codes=packed.codes.to(self.device), scale=packed.scale.to(self.device))
        return Matrix(moved, fmt, scale, bias)

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        own = [self.linears[name].bias if name in self.linears else self.tensors.get(f"{name}.bias") for name in names]
        if all(bias is None for bias in own):
            return None
        rows = [self.arch.linear_shape(name)[0] for name in names]
        whole = [torch.zeros(n) if bias is None else bias.float() for n, bias in zip(rows, own, strict=True)]
        return torch.cat(whole).to(self.device, self.dtype)


def layer_of(arch: ArchMap, base: str, gain: Callable[[str], Tensor], matrix: Callable[..., Matrix]) -> CudaLayer:
    """Layer `base`, its gains and its joined matrices looked up by their layers' names."""
    attn, mlp = f"{base}.self_attn", f"{base}.mlp"
    return CudaLayer(
        input_norm=gain(f"{base}.input_layernorm"),
        qkv=matrix(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        q_norm=gain(f"{attn}.q_norm") if arch.qk_norm else None,
        k_norm=gain(f"{attn}.k_norm") if arch.qk_norm else None,
        o=matrix(f"{attn}.o_proj"),
        mlp_norm=gain(f"{base}.{arch.mlp_norm}"),
        gate_up=matrix(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=matrix(f"{mlp}.down_proj"),
    )


def unquantized(w_OK: Tensor) -> CudaWeight:
    return CudaWeight(w_OK, None, None, None, w_OK.dtype)


def _arch_obstacle(arch: ArchMap) -> str | None:
    odd = {
        f"activation {arch.activation}": arch.activation != "silu",
        "norms behind attention and the MLP": arch.post_norms,
        "attention in windows": arch.sliding_window is not None,
        "soft-capped scores or logits": arch.attention_softcap is not None or arch.logit_softcap is not None,
        "a mixture of experts": arch.n_experts > 0,
        "a Hadamard transform before down_proj": arch.down_hadamard,
        "a piece of a model": not arch.has_head or arch.first_layer > 0,
    }
    return next((name for name, present in odd.items() if present), None)


def _linear_obstacle(linear: QLinear) -> str | None:
    if linear.outliers is not None:
        return "weights kept apart"
    try:
        pack(linear.weight)
    except ValueError as error:
        return str(error)
    return None if linear.activation is None else _input_obstacle(linear.activation, linear.weight.fmt)


def _input_obstacle(scheme: TensorScheme, weight: NumFormat) -> str | None:
    if scheme.fmt != weight or scheme.fmt not in (FP8_E4M3, INT8):
        return f"{scheme.fmt.name} inputs of {weight.name} weights"
    by_row = scheme.dynamic and isinstance(scheme.granularity, PerToken)
    stored = not scheme.dynamic and isinstance(scheme.granularity, PerTensor)
    return None if by_row or stored else "inputs rounded neither per token nor under one stored scale"


def _kv_obstacle(model: QuantizedModel) -> str | None:
    scheme = model.plan.kv
    if scheme is None or _plain_kv(scheme, model):
        return None
    return f"KV cache {scheme.label}: FP8 E4M3 under one stored scale or INT8 per token and head are taken"


def _plain_kv(scheme: KVScheme, model: QuantizedModel) -> bool:
    key, value = scheme.parts
    kinds = (FP8_E4M3, "tensor"), (INT8, "token_head"), (FP8_E4M3, "token_head")
    plain = key == value and (key.fmt, key.granularity) in kinds and not key.outliers
    return plain and not scheme.step and not scheme.skip_layers and not model.q_scale


def _kv_scales(model: QuantizedModel) -> tuple[tuple[float, float], ...]:
    names = [f"{layer}.self_attn" for layer in model.arch.layers]
    return tuple((float(model.k_scale[name]), float(model.v_scale[name])) for name in names)
