"""What stays in memory under a limit."""

from hypothesis import given, strategies as st
import pytest

from qspec.errors import RecipeError
from qspec.nn.residency import LayerBytes, megabytes, plan_residency

SIZES = st.integers(1, 10**9)
LAYERS = st.lists(st.builds(LayerBytes, SIZES, SIZES, SIZES), min_size=1, max_size=12)


@given(LAYERS, SIZES, st.integers(1, 10**11))
def test_a_plan_keeps_its_limit_and_loses_no_layer(sizes: list[LayerBytes], fixed: int, limit: int) -> None:
    """Catches a plan above its limit, one that forgets a layer, and a refusal of what its own fix says is enough."""
    layers = {f"model.layers.{i}": size for i, size in enumerate(sizes)}
    try:
        found = plan_residency(limit, fixed, layers)
    except RecipeError as refused:
        enough = int(1e6 * float(refused.fix.split("at least ")[1].split(" MB")[0])) + 1
        assert enough > limit
        found, limit = plan_residency(enough, fixed, layers), enough
    assert fixed < found.total <= limit
    assert sorted(found.resident + found.streamed) == sorted(layers)
    assert found.read == sum(layers[name].stored for name in found.streamed)


def test_layers_in_memory_are_spread_evenly() -> None:
    """Catches a disk that stands still while the first half of the model, all in memory, runs."""
    layers = {f"model.layers.{i}": LayerBytes(10, 10, 0) for i in range(9)}
    found = plan_residency(100 + 3 * 10 + 2 * 10 + 2 * 10, 100, layers)
    assert [int(name.rpartition(".")[2]) for name in found.resident] == [2, 5, 8]
    assert str(found) == "3 of 9 layers in memory, 0.1 MB read for every pass"


def test_a_limit_that_is_too_low_names_the_numbers() -> None:
    """Catches a refusal from which nobody can tell what takes the memory."""
    layers = {f"model.layers.{i}": LayerBytes(3_000_000, 4_000_000, 500_000) for i in range(99)}
    with pytest.raises(RecipeError) as refused:
        plan_residency(20_000_000, 70_000_000, layers)
    assert str(refused.value) == (
        "memory limit 20.0 MB: the model takes 84.5 MB at the least: 70.0 MB for embedding, head and KV cache, 6.0 MB "
        "for 2 buffers of the largest layer, the rest to build and run layers; give at least 84.5 MB, or lower "
        "speculation.max_length, which sizes the KV cache"
    )


def test_megabytes_are_enough() -> None:
    """Catches a limit that is rounded down and then refused."""
    assert (megabytes(1), megabytes(100_000), megabytes(100_001)) == ("0.1 MB", "0.1 MB", "0.2 MB")
