"""A recipe's head: as it was trained, fitted to its target, in INT8; or the sizes of a new one, to be trained here."""

from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from qspec.bridges.compressed import lint_scale
from qspec.bridges.heads import speculator
from qspec.bridges.hub import fetch_model
from qspec.bridges.tensors import read_tensors
from qspec.errors import IntegrityError, OutputError, RecipeError
from qspec.models.load import locate
from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.eagle3 import Eagle3Shape
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, swap_linears
from qspec.records import EMBEDDING, HEAD, ArchMap, LoadedModel, QuantizedModel
from qspec.schema.drafts import Eagle3Draft, MlpDraft
from qspec.schema.quantization import ModelSpec

Head = TypeVar("Head", bound=nn.Module)
_FETCH = "fetch an intact copy of the pair"
_MOST_FLOAT = 2.0**24
"""Largest magnitude of a number that is stored as a float: no model has one near it, and products overflow beyond."""


def shape_of(draft: MlpDraft, arch: ArchMap) -> SpeculatorShape:
    """Sizes of the head that a recipe asks for."""
    return SpeculatorShape(
        arch.hidden_size,
        arch.vocab_size,
        draft.n_predict,
        draft.inner_dim,
        draft.tie_weights,
        draft.scale_input,
        draft.draft_vocab if draft.draft_vocab < arch.vocab_size else 0,
        draft.shared,
    )


def eagle3_shape(draft: Eagle3Draft, arch: ArchMap) -> Eagle3Shape:
    """Sizes of a new EAGLE-3 head: one layer like the target's, its embedding the target's."""
    n = arch.n_layers
    return Eagle3Shape(
        arch.hidden_size,
        arch.hidden_size,
        draft.taps or tuple(sorted({2, n // 2, n - 3})),
        arch.intermediate_size,
        arch.n_heads,
        arch.n_kv_heads,
        arch.head_dim,
        arch.vocab_size,
        draft.draft_vocab if draft.draft_vocab < arch.vocab_size else 0,
    )


def head_folder(spec: ModelSpec) -> Path:
    """Where a head lies, fetched if need be. Raises `SourceError`."""
    return locate(spec).path or fetch_model(spec.model, spec.revision)[0]


def require_shape(folder: Path, draft: MlpDraft, arch: ArchMap) -> None:
    """Raises `RecipeError` unless the head in `folder` is as large as the recipe says."""
    stored, wanted = speculator.read_shape(folder), shape_of(draft, arch)
    for name in ("emb_dim", "vocab_size", "n_predict", "inner", "tie_weights", "scale_input", "draft_vocab", "shared"):
        mine, its = getattr(wanted, name), getattr(stored, name)
        if mine != its:
            rule = f"but its config.json says {its!r}"
            fix = "make the recipe agree, or use another head"
            raise RecipeError(f"draft {draft.model}: {name} {mine!r}", rule, fix)


def open_head(folder: Path, target: LoadedModel | QuantizedModel) -> MLPSpeculator:
    """A stored head for a target, every linear layer in INT8: those stored as float, and shared rows, are rounded."""
    return rounded(speculator.read(folder, *target_rows(target)))


def rounded(head: Head) -> Head:
    """The same head, every linear layer in INT8."""
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    return head


def target_rows(target: LoadedModel | QuantizedModel) -> tuple[Tensor, Tensor]:
    """The target's embedding and output rows `[V, H]`, as its head multiplies with them."""
    embedding_VH = target.tensors[EMBEDDING]
    if isinstance(target, QuantizedModel) and "lm_head" in target.linears:
        return embedding_VH, target.linears["lm_head"].weight.dequantize()
    return embedding_VH, target.tensors.get(HEAD, embedding_VH)


def check_head(folder: Path, target: QuantizedModel) -> str:
    """Read a speculator head and look at every number in it; raises a `QspecError`."""
    embedding_VH = target.tensors[EMBEDDING]
    check_scales(folder)
    head = speculator.read(folder, embedding_VH, embedding_VH)
    check_numbers(head)
    s = head.shape
    return f"draft: {s.n_predict} speculator heads for {s.drafted} of {s.vocab_size} ids; every number is usable"


def check_numbers(head: nn.Module) -> None:
    """Look at every float of a head; raises `IntegrityError`."""
    for name, tensor in head.named_parameters():
        check_floats(name, tensor)


def check_floats(name: str, tensor: Tensor) -> None:
    """Every number is one, and none is so large that products of two layers leave float32; raises `IntegrityError`."""
    if tensor.numel() and not float(tensor.abs().max()) <= _MOST_FLOAT:  # NaN is on no side
        rule = f"holds NaN, infinity, or more than {_MOST_FLOAT:,.0f}"
        raise IntegrityError(name, rule, "use an intact checkpoint of the model")


def check_scales(folder: Path) -> None:
    """Every stored scale of a half is usable; raises `IntegrityError` naming the first that is not. Reads no codes."""
    tensors = read_tensors(folder)
    try:
        for name in tensors:
            if name.endswith("_scale"):
                lint_scale(name, tensors[name])
    except OutputError as error:
        raise IntegrityError(f"{folder.name}: {error.value}", error.rule, _FETCH) from error
