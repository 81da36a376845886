"""What stays in memory under a limit."""

from hypothesis import given, strategies as st
import pytest

from qspec.errors import RecipeError
from qspec.nn.cpp.offload import BUFFERS, ModelBytes, megabytes

SIZES = st.integers(1, 10**9)
LAYERS = st.lists(SIZES, min_size=1, max_size=12)


@given(LAYERS, SIZES, st.integers(1, 10**11))
def test_a_plan_keeps_its_limit_and_loses_no_layer(layers: list[int], fixed: int, limit: int) -> None:
    """Catches a plan above its limit, one that forgets a layer, and a refusal of what would do."""
    sizes = ModelBytes(fixed, {f"model.layers.{i}": size for i, size in enumerate(layers)})
    least = min(sizes.holding(count).total for count in range(len(layers) + 1))
    if limit < least:
        with pytest.raises(RecipeError, match="give at least"):
            sizes.under(limit)
        limit = least
    found = sizes.under(limit)
    assert fixed < found.total <= limit
    assert sorted(found.resident + found.streamed) == sorted(sizes.layers)
    assert found.read == sum(sizes.layers[name] for name in found.streamed)


def test_layers_in_memory_are_spread_evenly() -> None:
    """Catches a disk that stands still while the first half of the model, all in memory, runs."""
    sizes = ModelBytes(100, {f"model.layers.{i}": 10 for i in range(9)})
    found = sizes.under(100 + (3 + BUFFERS) * 10)
    assert [int(name.rpartition(".")[2]) for name in found.resident] == [2, 5, 8]
    assert found == sizes.holding(3)
    assert str(found) == "3 of 9 layers in memory, 0.1 MB read for every pass"


def test_layers_that_would_fit_into_the_buffers_are_held() -> None:
    """Catches layers that are read again for every pass into memory that could hold them all."""
    sizes = ModelBytes(100, {f"model.layers.{i}": 10 for i in range(BUFFERS + 1)})
    assert sizes.under(100 + 10 * BUFFERS).read
    assert not sizes.under(100 + 10 * (BUFFERS + 1)).streamed


def test_a_limit_that_is_too_low_names_the_numbers() -> None:
    """Catches a refusal from which nobody can tell what takes the memory."""
    sizes = ModelBytes(70_000_000, {f"model.layers.{i}": 3_000_000 for i in range(99)})
    with pytest.raises(RecipeError) as refused:
        sizes.under(20_000_000)
    assert str(refused.value) == (
        "memory limit 20.0 MB: the model takes 76.0 MB at the least: 70.0 MB for embedding, head and KV cache, the "
        "rest for 2 buffers of the largest layer; give at least 76.0 MB, or lower speculation.max_length, which sizes "
        "the KV cache"
    )


def test_megabytes_are_enough() -> None:
    """Catches a limit that is rounded down and then refused."""
    assert (megabytes(1), megabytes(100_000), megabytes(100_001)) == ("0.1 MB", "0.1 MB", "0.2 MB")
