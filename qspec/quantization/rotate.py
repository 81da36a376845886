"""Rotate a model so that outliers spread over channels (QuaRot, SpinQuant). Data-free; the function stays.

The rotated model is a view: a tensor is rotated in float64 when it is asked for, and nothing is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.numerics.quantization.rotation import Rotation, hadamard_transform, in_blocks, rotation, split_order
from qspec.records import EMBEDDING, HEAD, ArchMap, LoadedModel, View
from qspec.schema.quantization import QuantSpec, RotationSpec

ATTENTION_READERS = ("q_proj", "k_proj", "v_proj")


MLP_READERS = ("gate_proj", "up_proj", "gate")  # `gate` chooses experts


WRITERS = ("o_proj", "down_proj")


_Step = Callable[[Tensor], Tensor]
"""`[…, K]` to `[…, K]`, float64."""


def rotate(model: LoadedModel, spec: RotationSpec, seed: int) -> tuple[LoadedModel, list[str]]:
    """The rotated model, and notes for the report. A piece is rotated as it would be within its model.

    r1: embedding, head and every layer that reads or writes the residual stream; norm gains move into the readers and
    a tied head becomes one of its own. r2: values within each head. r4: `down_proj` gets the transposed Hadamard
    matrix, its input is transformed at run time (`ArchMap.down_hadamard`). Raises `RecipeError` as `rotated_arch`.
    """
    arch = rotated_arch(model.arch, spec)
    whole = untied(model) if model.arch.tied and not arch.tied else model
    return replace(whole, arch=arch, tensors=View(whole.tensors, _Rotated(whole, spec, seed))), _notes(model.arch, spec)


def rotated_arch(arch: ArchMap, spec: RotationSpec | None) -> ArchMap:
    """The architecture after rotation, known without weights; raises `RecipeError` for one that cannot be rotated."""
    if spec is None:
        return arch
    if spec.r1 and arch.post_norms:
        rule = "norms what attention and the MLP write, and the gains of those norms cannot be moved past a rotation"
        raise RecipeError(f"rotation.r1 of {arch.model_type}", rule, "set rotation: {r1: false}; r2 and r4 work")
    for size in down_sizes(arch) if spec.r4 else ():
        if split_order(size) is None:
            rule = "no Hadamard matrix of this order is known here"
            raise RecipeError(f"rotation.r4 of {size} inputs", rule, "set rotation: {r4: false}")
    return replace(arch, tied=arch.tied and not spec.r1, down_hadamard=spec.r4)


def down_sizes(arch: ArchMap) -> list[int]:
    """Inputs of the `down_proj` layers, each size once."""
    downs = (name for name in arch.linears() if name.endswith("down_proj"))
    return list(dict.fromkeys(arch.linear_shape(name)[1] for name in downs))


class _Rotated:
    """Reads tensors of a rotated model by name: float32 where rotated, as they are elsewhere."""

    def __init__(self, model: LoadedModel, spec: RotationSpec, seed: int) -> None:
        self._arch, self._tensors = model.arch, model.tensors
        self._stream = rotation(model.arch.hidden_size, seed) if spec.r1 else None
        self._values = rotation(model.arch.head_dim, seed + 1) if spec.r2 else None
        self._hadamard = spec.r4

    def __call__(self, name: str) -> Tensor:
        x = self._tensors[name]
        layer, _, leaf = name.rpartition(".")
        if self._stream is not None and _is_folded(layer):
            return torch.full_like(x, 1.0 - self._arch.norm_offset, dtype=torch.float32)
        written, read = self._written(layer), self._read(layer) if leaf == "weight" else []
        if leaf == "bias":
            return _applied(x, written, torch.float32) if written else x
        if read:
            x = _applied(x, read, torch.float64 if written else torch.float32)
        return _applied(x.T, written, torch.float32).T.contiguous() if written else x

    def _read(self, layer: str) -> list[_Step]:
        """Steps over a weight's columns, in order; for an embedding, over the vectors that it holds."""
        part, steps = layer.rpartition(".")[2], list[_Step]()
        if self._stream is not None:
            norm = _norm_of(layer)
            if norm is not None:
                gain_K = self._tensors[f"{norm}.weight"].double() + self._arch.norm_offset
                steps.append(lambda x: x * gain_K)
            if norm is not None or part == "embed_tokens":
                steps.append(self._stream.apply)
        if self._values is not None and part == "o_proj":
            steps.append(_by_head(self._values))
        if self._hadamard and part == "down_proj":
            steps.append(lambda x: hadamard_transform(x, row_exact=False))
        return steps

    def _written(self, layer: str) -> list[_Step]:
        """Steps over a weight's rows and the bias, in order."""
        part, steps = layer.rpartition(".")[2], list[_Step]()
        if self._stream is not None and part in WRITERS:
            steps.append(self._stream.apply)
        if self._values is not None and part == "v_proj":
            steps.append(_by_head(self._values))
        return steps


def _norm_of(layer: str) -> str | None:
    """The norm whose output a linear layer reads; None for one that does not read the residual stream."""
    if layer == "lm_head":
        return "model.norm"
    part = layer.rpartition(".")[2]
    block = ".".join(layer.split(".")[:3])  # model.layers.0
    if part in ATTENTION_READERS:
        return f"{block}.input_layernorm"
    return f"{block}.post_attention_layernorm" if part in MLP_READERS else None


def _is_folded(layer: str) -> bool:
    return layer == "model.norm" or layer.endswith((".input_layernorm", ".post_attention_layernorm"))


def _by_head(values: Rotation) -> _Step:
    return lambda x: values.apply(x.unflatten(-1, (-1, values.size))).flatten(-2)


def _applied(x: Tensor, steps: Sequence[_Step], dtype: torch.dtype) -> Tensor:
    """`steps` on the last dimension in float64, then one rounding to `dtype`; a block of rows at a time."""

    def run(block: Tensor) -> Tensor:
        block = block.double()
        for step in steps:
            block = step(block)
        return block.to(dtype)

    return in_blocks(x, run)


def _notes(arch: ArchMap, spec: RotationSpec) -> list[str]:
    notes = []
    if spec.r1:
        notes.append(
            f"Residual stream rotated (r1): {_kind(arch.hidden_size)}, norm gains folded into the next layers. A draft "
            "that reads this model's hidden states must be rotated with it."
        )
    if spec.r1 and arch.tied:
        added = arch.vocab_size * arch.hidden_size
        notes.append(f"The head no longer shares the embedding's weight: {added / 1e6:.1f} million parameters more.")
    if spec.r2:
        notes.append(f"Values rotated within each head (r2): {_kind(arch.head_dim)}.")
    if spec.r4:
        sizes = ", ".join(map(str, down_sizes(arch)))
        notes.append(f"Inputs of down_proj are transformed at run time (r4): Hadamard matrix of order {sizes}.")
    return notes


def _kind(size: int) -> str:
    if split_order(size) is None:
        return f"random orthogonal matrix of order {size}"
    return f"Hadamard matrix of order {size} with seeded signs"


def prepare(model: LoadedModel, spec: QuantSpec, seed: int) -> tuple[LoadedModel, list[str]]:
    """The model under `spec`'s data-free rewrites, as views of its tensors, and notes for the report."""
    notes: list[str] = []
    if spec.untie_head and model.arch.tied:
        size = model.arch.vocab_size * model.arch.hidden_size
        notes.append(f"The head was tied to the embedding and is a matrix of its own now: {size / 1e6:,.1f} M weights.")
        model = untied(model)
    if spec.rotation is not None:
        model, done = rotate(model, spec.rotation, seed)
        notes += done
    return model, notes


def prepared_arch(arch: ArchMap, spec: QuantSpec) -> ArchMap:
    """The architecture after `prepare`, known without weights; raises `RecipeError` as `rotated_arch`."""
    return rotated_arch(replace(arch, tied=arch.tied and not spec.untie_head), spec.rotation)


def untied(model: LoadedModel) -> LoadedModel:
    """A view of a tied model in which the head is a tensor too; a piece without a head gets none."""
    tensors = model.tensors
    if model.arch.has_head:
        tensors = View([*tensors, HEAD], lambda name: model.tensors[EMBEDDING if name == HEAD else name])
    config = dict(model.config) | {"tie_word_embeddings": False}
    return replace(model, arch=replace(model.arch, tied=False), tensors=tensors, config=config)
