"""The list of measured claims."""

import pytest

from scripts.measured import CLAIMS, ROOT, code_state


def test_every_file_is_claimed_and_every_claim_has_one() -> None:
    """Would catch a number that nobody holds to its code."""
    assert {path.stem for path in (ROOT / "eval/baselines").glob("*.json")} == CLAIMS.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_what_decides_a_number_is_there(name: str) -> None:
    """Would catch code that moved: its changes would no longer be seen."""
    assert [path for path in CLAIMS[name].decided_by if not (ROOT / path).exists()] == []


def test_a_measurement_says_which_code_ran() -> None:
    """Would catch a file whose age nobody can tell."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the history of git")
    state = code_state()
    assert len(state["date"]) == len("2026-01-01")
    assert state["commit"].rstrip("+").isalnum()
