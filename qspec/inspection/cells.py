"""Cells, table heads and charts that the pages of a model and of a pair share."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from qspec.inspection.model import LayerView
from qspec.inspection.pair import StoredLayer
from qspec.numerics.quantization.distribution import Extent, extent
from qspec.readable import number
from qspec.report.document import Bar, Bars

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


def chart(caption: str, values: dict[str, list[float]], mark: float | None = None, axis: str = "") -> Bars:
    """A bar per kind: the median over its layers, a line from the least to the greatest."""
    spread = {kind: extent(group) for kind, group in values.items()}
    bars = tuple(Bar(kind, s.median, number(s.median), (s.min, s.max)) for kind, s in spread.items())
    return Bars(caption, bars, mark, axis)


def by_layer(caption: str, layers: Sequence[Sequence[float]]) -> Bars:
    """A bar per decoder layer: its largest head, a line over all of them."""
    bars = tuple(
        Bar(f"layer {i}", max(heads), number(max(heads)), (min(heads), max(heads)) if len(heads) > 1 else None)
        for i, heads in enumerate(layers)
    )
    return Bars(caption, bars)
