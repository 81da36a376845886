"""Sampling settings."""

import pytest

from qspec.errors import RecipeError
from qspec.speculation.types import Sampling


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}], ids=lambda s: str(s)
)
def test_impossible_sampling_is_refused(settings: dict[str, float]) -> None:
    """Catches a negative temperature, which would turn the distribution upside down, and filters that keep nothing."""
    with pytest.raises(RecipeError, match=next(iter(settings))):
        Sampling(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_temperature_is_finite(temperature: float) -> None:
    """Catches NaN, which passes every comparison, and ends in a token outside the vocabulary."""
    with pytest.raises(RecipeError, match="not finite"):
        Sampling(temperature)
