"""Where a token's time goes, on a tiny pair."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest

from qspec.errors import RecipeError
from qspec.inspection import profile as stage
from qspec.inspection.profile import as_data, document, profile
from qspec.measure import bench
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.interface import LAPS
from qspec.pair.open import LoadedPair, open_pair
from qspec.pair.package import package
from qspec.report.render.text import render
from qspec.schema.results import Measurement
from tests.pairs import halves, recipe


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    folder = tmp_path_factory.mktemp("profile")
    opened = open_pair(package(*halves(folder / "source"), recipe(), folder))
    if not isinstance(opened.target, NativeDecoder):
        pytest.skip(f"no C++ core: {NativeDecoder.missing()}")
    return opened


@pytest.fixture(autouse=True)
def _small_memory_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BANDWIDTH_BYTES", 1 << 20)


def test_profile_adds_up(pair: LoadedPair) -> None:
    """Catches milliseconds for seconds, a prompt's pass counted as tokens, and parts without their bytes."""
    found = profile(pair, tokens=8, prompt="the quick")
    assert {part.name for part in found.parts} == {*LAPS, "sampling", "bookkeeping"} - {"activation", "reading"}
    assert sum(part.share for part in found.parts) == pytest.approx(1)  # a sum of floats
    by_name = {part.name: part for part in found.parts}
    assert all(part.ms_range[0] <= part.ms <= part.ms_range[1] for part in found.parts)
    assert all(
        by_name[name].bytes > 0 and by_name[name].floor_ms > 0
        for name in ("q/k/v", "o", "gate/up", "down", "head", "attention")
    )
    assert found.bytes_per_token == sum(part.bytes for part in found.parts)
    assert found.of_ceiling == pytest.approx(1000 / found.plain_ms / found.ceiling_tokens_s)
    assert 1 <= found.speculation.tokens_per_step <= 4  # fixed k = 3
    assert as_data(found)["parts"][0]["name"] == found.parts[0].name
    text = render(document(found, "pair"))
    assert "gate/up" in text
    assert "tokens per step" in text


@pytest.mark.parametrize(
    ("span", "said"),
    [((1.1, 1.3), "1.10…1.30×"), ((0.93, 1.05), "within noise (0.930…1.05×)"), ((0.4, 0.5), "0.400…0.500×")],
)
def test_a_part_is_not_told_to_beat_its_floor_by_noise(pair: LoadedPair, span: tuple[float, float], said: str) -> None:
    """Catches "0.93×" of the least that is possible: one disturbed reading of the memory beside one lucky decode."""
    found = profile(pair, tokens=4, prompt="the quick")
    part = replace(found.parts[0], ms_range=span, floor_ms=1.0)
    faster = replace(found, parts=(part,), plain_ms=0.99 * 1000 / found.ceiling_tokens_s)
    text = render(document(faster, "pair"))
    assert said in text
    assert "within noise of the ceiling" in text


def test_floors_are_measured_beside_the_turns(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one bandwidth for all turns: on a machine with other work it belongs to none of them."""
    rates = iter([2e9, 8e9, 4e9])
    measured = Measurement(metric="memory read", value=0, unit="B/s", n=5)
    monkeypatch.setattr(stage, "bandwidth", lambda: measured.model_copy(update={"value": next(rates)}))
    found = profile(pair, tokens=4, prompt="the quick")
    assert next(rates, None) is None
    assert found.bandwidth == 8e9
    assert all(part.floor_ms == pytest.approx(1000 * part.bytes / 8e9) for part in found.parts)


def test_the_core_times_its_own_passes(pair: LoadedPair) -> None:
    """Catches laps in another order than their names, and a pass that is left out."""
    begin, before = perf_counter(), sum(pair.target.seconds().values())
    found = profile(pair, tokens=8, prompt="the quick")
    after = sum(pair.target.seconds().values())
    assert 0 < after - before < perf_counter() - begin
    assert "C++ core" in render(document(found, "pair"))


def test_more_tokens_than_the_cache_holds_are_refused(pair: LoadedPair) -> None:
    """Catches an assertion deep in the decoder instead of one line."""
    with pytest.raises(RecipeError, match="--tokens 1000"):
        profile(pair, tokens=1000)


def test_a_pair_of_another_engine_is_refused(tmp_path: Path) -> None:
    """Catches parts of no time at all, of an engine that keeps none."""
    opened = open_pair(package(*halves(tmp_path / "source"), recipe(), tmp_path), kernels="torch")
    with pytest.raises(RecipeError, match=r"parts of the C\+\+ core.*qspec bench"):
        profile(opened, tokens=4)
