"""Sensitivity scores: what each scheme would cost every group of layers, in error and in bytes. `sensitivity.json`."""

from typing import Literal

from qspec.schema.results import Record


class Basis(Record):
    """The model, text and settings of scores; scores of another basis say nothing about this one.

    width: bytes of a value that is not quantized. settings, text: sha256 of all that shapes a candidate, of the rows.
    """

    model: str
    metric: Literal["output", "kl"]
    candidates: tuple[str, ...]
    group_size: int
    width: int
    settings: str
    text: str
    rows: int
    tokens: int
    seed: int


class UnitScore(Record):
    """Layers that are decided together: their weights, then bytes and error by candidate, in the order of `Basis`."""

    layers: tuple[str, ...]
    weights: int
    bytes: tuple[int, ...]
    errors: tuple[float, ...]


class Scores(Record):
    """Scores of every unit, in forward order."""

    basis: Basis
    units: tuple[UnitScore, ...]
