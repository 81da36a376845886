"""A pair that is opened under a limit of memory."""

from pathlib import Path

import pytest

from qspec import cli, load_pair
from qspec.errors import RecipeError
from qspec.nn.cpp import offload
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.offload import OffloadedDecoder
from qspec.pair.open import open_pair
from qspec.pair.package import package
from tests.pairs import halves, recipe


@pytest.fixture(autouse=True)
def _library() -> None:
    if reason := NativeDecoder.missing():
        pytest.skip(f"needs the C++ core: {reason}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    return package(*halves(folder / "source"), recipe(), folder / "pair")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "packed_path", lambda weights: tmp_path / f"{weights}.layers")


def test_answers_are_those_of_the_resident_target(pair: Path, tmp_path: Path) -> None:
    """Catches a limit that the target is not opened under, or that changes an answer, with drafts or without."""
    resident, limited = open_pair(pair), load_pair(pair, "2MB")
    assert isinstance(limited.target, OffloadedDecoder)
    assert limited.target.residency.total <= 2_000_000
    for speculative in (False, True):
        want, got = (each.generate("the quick", 24, speculative=speculative).generation for each in (resident, limited))
        assert got.tokens == want.tokens
        assert [step.accepted for step in got.steps] == [step.accepted for step in want.steps]
    assert len(list(tmp_path.glob("*.layers"))) == 1


@pytest.mark.parametrize(("limit", "says"), [("1kB", "give at least"), ("lots", "is no size in memory")])
def test_a_limit_that_cannot_be_kept_is_one_line(
    pair: Path, limit: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a limit that the command line drops, and a traceback for one."""
    assert cli.main(["generate", "--memory-limit", limit, str(pair), "hello"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: memory limit")
    assert says in line


def test_direct_io_without_a_limit_is_refused(pair: Path) -> None:
    """Catches a flag that does nothing."""
    with pytest.raises(RecipeError, match=r"direct_io: .* there is none; give memory_limit too"):
        open_pair(pair, direct_io=True)


def test_other_kernels_are_refused(pair: Path) -> None:
    """Catches a limit that holds for other kernels than those that were asked for."""
    with pytest.raises(RecipeError, match=r"memory_limit: .* the C\+\+ core, which does not run here: torch kernels"):
        open_pair(pair, kernels="torch", memory_limit="2MB")
