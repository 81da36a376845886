"""A model with fewer of its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from qspec.errors import RecipeError
from qspec.records import ArchMap, LoadedModel, layer_number


def truncate_layers(model: LoadedModel, n: int) -> LoadedModel:
    """The model with its first `n` layers only: the copy of a target that serves as its own draft."""
    if not 1 <= n <= model.arch.n_layers:
        fix = f"use 1 … {model.arch.n_layers}"
        raise RecipeError(f"layers: {n}", f"the model has {model.arch.n_layers} layers", fix)
    return keep_layers(model, range(n))


def keep_layers(model: LoadedModel, layers: Sequence[int]) -> LoadedModel:
    """The model with some of its layers only, in rising order and numbered anew."""
    require_layers(layers, model.arch)
    if len(layers) == model.arch.n_layers:
        return model
    arch, config = model.arch.keep(layers), dict(model.config) | {"num_hidden_layers": len(layers)}
    if model.arch.full_attention or isinstance(config.get("layer_types"), list):
        windows = [arch.window(layer) for layer in arch.layers]  # said one by one: a period would name others
        config["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if model.arch.dense_layers:
        config |= {"mlp_only_layers": list(arch.dense_layers), "decoder_sparse_step": 1}
    number = {-1: -1} | {old: new for new, old in enumerate(layers)}
    kept = [name for name in model.tensors if layer_number(name) in number]
    tensors = {_renumbered(name, number): model.tensors[name] for name in kept}
    return replace(model, arch=arch, tensors=tensors, config=config)


def require_layers(layers: int | Sequence[int], arch: ArchMap) -> None:
    """Refuse a number of layers that is not below the model's, and layers that it lacks, that repeat or go back."""
    if isinstance(layers, int):
        if not 1 <= layers < arch.n_layers:
            rule = f"must leave out some of the model's {arch.n_layers} layers, not all"
            raise RecipeError(f"layers {layers}", rule, f"use 1 … {arch.n_layers - 1}")
        return
    rising = all(low < high for low, high in pairwise(layers))
    if not layers or not rising or not 0 <= layers[0] <= layers[-1] < arch.n_layers:
        rule = f"must be different layers of 0 … {arch.n_layers - 1} in rising order"
        raise RecipeError(f"layers {list(layers)}", rule, "give those that should stay, or how many")


def _renumbered(name: str, number: Mapping[int, int]) -> str:
    old = layer_number(name)
    return name if old < 0 else name.replace(f"model.layers.{old}.", f"model.layers.{number[old]}.", 1)
