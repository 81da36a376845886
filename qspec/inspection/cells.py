"""Cells and table heads that the pages of a model and of a pair share."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from qspec.inspection.model import LayerView
from qspec.inspection.pair import StoredLayer
from qspec.numerics.quantization.distribution import Extent, extent
from qspec.readable import number

L = TypeVar("L", LayerView, StoredLayer)


def by_key(layers: Iterable[L], key: Callable[[L], object]) -> dict[str, list[L]]:
    """Layers by key, in order of first appearance."""
    groups: dict[object, list[L]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return {str(name): members for name, members in groups.items()}


def part(layer: LayerView | StoredLayer) -> str:
    return layer.name.rpartition(".")[2]


def short(name: str) -> str:
    return name.removeprefix("model.layers.")


def heads(name: str) -> tuple[str, str, str]:
    return (f"{name}\nmin", "\nmedian", "\nmax")


def trio(values: Iterable[float], text: Callable[[float], str] = number) -> tuple[str, str, str]:
    bounds: Extent = extent(values)
    return (text(bounds.min), text(bounds.median), text(bounds.max))


def two_places(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def places(percentage: float) -> str:
    """A share that may be tiny and must not look like none."""
    return "–" if percentage != percentage else "0" if not percentage else number(percentage, 2)


def joined(items: Iterable[object]) -> str:
    return " ".join(map(str, items))
