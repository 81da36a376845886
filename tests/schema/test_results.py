"""`results.json` holds everything and reads back equal."""

import math
from pathlib import Path

import pytest

from qspec.errors import IntegrityError
from qspec.schema.results import Measurement, Results
from tests.example_results import example


def test_round_trip(tmp_path: Path):
    """Would catch a field that JSON loses: tuples, infinities, None."""
    results = example()
    path = tmp_path / "results.json"
    path.write_text(results.dump())
    assert Results.read(path) == results
    assert Results.read(path).dump() == results.dump()


@pytest.mark.parametrize("content", ["", "{}", '{"format_version": 2}', "[1]", "nonsense"])
def test_other_files_are_refused_in_one_line(content: str, tmp_path: Path):
    """Would catch a stack trace, or a later format that is read as this one."""
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(IntegrityError, match="not a results file") as refusal:
        Results.read(path)
    assert "\n" not in str(refusal.value)


def test_a_refusal_says_what_is_wrong_and_where_else_to_look(tmp_path: Path):
    """Would catch "4 validation errors", and the advice to run a recipe again for hours for a mistyped path."""
    path = tmp_path / "results.json"
    with pytest.raises(IntegrityError, match=r"cannot be read \(No such file or directory\); give a run's or a pair's"):
        Results.read(path)
    path.write_text('{"name": 7}')
    with pytest.raises(IntegrityError, match=r"\(name: Input should be a valid string\); give a results\.json, or run"):
        Results.read(path)


def test_infinite_divergence_survives():
    """Would catch results that cannot be read back after a model ruled out what the other allows."""
    found = Measurement(metric="KL", value=math.inf, unit="nats/token", n=1)
    assert Measurement.model_validate_json(found.model_dump_json()) == found
