"""What a speed study keeps: arms of cells under the settings that decide them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qspec.progress import Progress
from qspec.schema.problems import validate
from scripts.speed import run as bench_speed
from scripts.speed.matrix import Lengths, SpeedSubject
from scripts.speed.run import Study, make_prompts
from scripts.speed.study import Timed
from tests.arms import Letters


def subject(**changed: object) -> SpeedSubject:
    told = {"model": "m", "shapes": {"9-9": {"prompt": 9, "new": 9}}, "batches": [1], "repeats": 2}
    return validate(SpeedSubject, told | {"arms": {"a": {}, "b": {"quantization": {"scheme": "W8A8"}}}} | changed, "x")


def test_what_did_not_change_is_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch arms that never rotate, a new batch that drops the old ones, a changed arm that keeps its numbers."""
    monkeypatch.setattr("scripts.speed.journal.WORK", tmp_path)
    asked: list[tuple[str, int]] = []

    def measure(arm: str, lengths: Lengths, batch: int, repeat: int) -> Timed:
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


@pytest.mark.parametrize("random", [False, True])
def test_every_repeat_asks_prompts_of_its_own(random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch one prompt that is asked three times and called three, and texts that run out behind a few groups."""
    texts = [SimpleNamespace(text=f"{i} " + "".join(chr(97 + (i + j) % 26) for j in range(900))) for i in range(3)]
    monkeypatch.setattr(bench_speed, "prompts", lambda *told: texts)
    monkeypatch.setattr(bench_speed, "real_vocab", lambda tokenizer: 250)
    asked = subject(prompts={"random": random}, arms={"a": {}})
    lengths = Lengths(prompt=60, new=2)
    groups = [make_prompts(asked, Letters(), lengths, 2, repeat) for repeat in range(3)]
    found = {tuple(tokens) for group in groups for tokens in group}
    assert [len(group) for group in groups] == [2, 2, 2]
    assert len(found) == 6
    assert {len(tokens) for tokens in found} == {60}
    assert make_prompts(asked, Letters(), lengths, 2, 1) == groups[1]
