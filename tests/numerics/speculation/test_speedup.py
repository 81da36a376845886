"""The speedup model against the paper's tables and its own limits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qspec.numerics.speculation.speedup import (
    alpha_from_counts,
    expected_tokens,
    operations,
    optimal_gamma,
    pass_cost,
    survival,
    walltime_speedup,
)


@pytest.fixture(scope="module")
def paper(data_dir: Path) -> dict[str, Any]:
    path = data_dir / "reference" / "leviathan2023.json"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_table_1(paper: dict[str, Any]) -> None:
    """Catches wrong formulas for speed and operations (both at c = c_hat = 0)."""
    for row in paper["table1"]:
        # Printed with two decimals, some cut instead of rounded.
        assert walltime_speedup(row["alpha"], row["gamma"], 0.0) == pytest.approx(row["speed"], abs=0.01)
        assert operations(row["alpha"], row["gamma"], 0.0) == pytest.approx(row["operations"], abs=0.01)


def test_theorem_3_8_at_measured_pairs(paper: dict[str, Any]) -> None:
    """Catches a wrong place of the draft's cost in the denominator."""
    for row in paper["table2_and_4"]:
        speed = walltime_speedup(row["alpha"], row["gamma"], row["c"])
        assert speed == pytest.approx(row["exp_thm38"], abs=5e-5)  # four decimals


def test_optimal_gamma(paper: dict[str, Any]) -> None:
    """Catches an optimum off by one, and a draft where plain decoding is as fast."""
    for c, by_alpha in paper["optimal_gamma_DERIVED"]["by_c"].items():
        for alpha, best in by_alpha.items():
            if best is None:
                continue
            gamma = optimal_gamma(float(alpha), float(c), 64)
            assert gamma == (best[0] if best[1] > 1 else 0)
            assert walltime_speedup(float(alpha), gamma, float(c)) == pytest.approx(best[1], abs=5e-4)  # three decimals


@pytest.mark.parametrize(("alpha", "c"), [(0.6, 0.1), (0.9, 0.5), (0.3, 0.2)])
def test_gain_is_at_least_that_of_the_corollary(alpha: float, c: float) -> None:
    """Catches an optimum below the paper's bound (1 + alpha) / (1 + c) where alpha > c."""
    assert walltime_speedup(alpha, optimal_gamma(alpha, c, 32), c) >= (1 + alpha) / (1 + c)


def test_limits_of_expected_tokens() -> None:
    """Catches 0 / 0 at alpha = 1 and cancellation next to it."""
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(0.5, 0) == 1
    # Slope of the sum at 1 is 7 * 8 / 2 = 28; the next term of the series is below 1e-22.
    assert expected_tokens(1 - 1e-12, 7) == pytest.approx(8 - 28e-12, abs=1e-14)


def test_costly_verification_shortens_the_draft() -> None:
    """Catches a verification cost that is ignored: with one that grows per row, long drafts stop paying."""
    assert optimal_gamma(0.8, 0.05, 16, lambda rows: 1 + 0.2 * (rows - 1)) < optimal_gamma(0.8, 0.05, 16)
    assert optimal_gamma(0.8, 0.05, 16, lambda rows: float(rows)) == 0


def test_alpha_is_recovered_from_truncated_counts() -> None:
    """Catches accepted / drafted, which counts drafts that no one tested and is far below alpha."""
    stands = torch.rand(4000, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    accepted = stands.long().cumprod(1).sum(1).tolist()
    alpha, (lo, hi) = alpha_from_counts([5] * 4000, accepted)
    assert lo < 0.7 < hi  # a fixed seed; 95 % interval
    assert lo < alpha < hi
    assert hi - lo < 0.02  # about 11000 tests: half-width 1.96 * sqrt(.7 * .3 / 11000) = 0.0086


def test_alpha_without_drafts_is_unknown() -> None:
    """Catches a division by zero, and certainty where nothing was tested."""
    assert alpha_from_counts([0, 0], [0, 0]) == (0.0, (0.0, 1.0))


def test_rates_by_position_generalise_one_rate() -> None:
    """Catches rates multiplied from the wrong end, and a last rate that does not go on."""
    assert survival((0.9, 0.5), 3) == [1, 0.9, 0.45, 0.225]
    assert expected_tokens((0.9, 0.5), 3) == pytest.approx(2.575)  # a sum of floats
    for gamma in range(6):
        assert expected_tokens([0.7] * 3, gamma) == pytest.approx(expected_tokens(0.7, gamma))
    assert optimal_gamma((0.9, 0.9, 0.1), 0.2, 16) == 2
    assert optimal_gamma(0.1, 0.9, 16) == 0
    assert optimal_gamma(0.1, 0.9, 16, least=1) == 1


def test_costs_between_and_behind_measured_ones() -> None:
    """Catches a step function, and an outlier at few rows that makes long drafts look cheaper than short ones."""
    known = {1: 1.0, 5: 2.0, 9: 4.0}
    assert [pass_cost(known, n) for n in (1, 3, 5, 7, 9)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert pass_cost(known, 13) == 5.5  # the mean slope, 3 / 8, goes on
    assert pass_cost({2: 3.0}, 1) == pass_cost({2: 3.0}, 9) == 3.0
    assert pass_cost({1: 3.0, 5: 1.0}, 9) == 1.0


def test_the_longest_draft_is_tried_and_slopes_are_per_row() -> None:
    """Catches a search that ends one short of its longest draft, and a slope over two rows taken from one."""
    assert optimal_gamma(1.0, 0.0, 5) == 5
    assert optimal_gamma(0.9, 0.0, 1) == 1
    assert pass_cost({1: 1.0, 2: 1.5}, 4) == pytest.approx(2.5)
    assert pass_cost({1: 1.0, 4: 2.5}, 6) == pytest.approx(3.5)
    assert pass_cost({3: 2.0}, 9) == 2.0
