"""Estimates as on two cores, whatever runs the tests."""

import pytest

from qspec.planning import duration


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "usable_cores", lambda: 2)
