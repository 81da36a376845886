"""What a speed study keeps: arms of cells under the settings that decide them."""

from pathlib import Path

import pytest

from qspec.progress import Progress
from qspec.schema.problems import validate
from scripts.speed.matrix import Lengths, SpeedSubject
from scripts.speed.run import Study
from scripts.speed.study import Timed


def subject(**changed: object) -> SpeedSubject:
    told = {"model": "m", "shapes": {"9-9": {"prompt": 9, "new": 9}}, "batches": [1], "repeats": 2}
    return validate(SpeedSubject, told | {"arms": {"a": {}, "b": {"quantization": {"scheme": "W8A8"}}}} | changed, "x")


def test_what_did_not_change_is_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch arms that never rotate, a new batch that drops the old ones, a changed arm that keeps its numbers."""
    monkeypatch.setattr("scripts.speed.journal.WORK", tmp_path)
    asked: list[tuple[str, int]] = []

    def measure(arm: str, lengths: Lengths, batch: int) -> Timed:
        asked.append((arm, batch))
        return Timed((0.1,), (0.1,), 9, 1.0)

    def run(of: SpeedSubject, *arms: str, place: str = "qspec") -> list[tuple[str, int]]:
        asked.clear()
        Study("s", of, arms, place).run(measure, "engine", Progress())
        return list(asked)

    assert run(subject(), "a") == [("a", 1), ("a", 1)]
    assert run(subject(), "a", "b") == [("b", 1), ("b", 1)]
    assert run(subject(batches=[1, 2]), "a", "b") == [("a", 2), ("b", 2), ("b", 2), ("a", 2)]
    assert run(subject(arms={"a": {}, "b": {}}), "a", "b") == [("b", 1), ("b", 1)]
    assert len(run(subject(), "a", "b", place="server")) == 4
    assert Study("s", subject(), ("b",), "qspec").todo == []
