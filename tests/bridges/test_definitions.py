"""Items that `eval/tasks` makes of texts: which rows they come from, and that they can be answered."""

from collections import Counter
from collections.abc import Iterator
import json
from pathlib import Path
import random

import pytest

from qspec.bridges.harness import definitions
from qspec.bridges.text import calibration_rows, load_rows
from qspec.schema.recipe import Recipe
from tests.arms import Letters

ROOT = Path(__file__).resolve().parents[2]
FILE = "text/tinystories_train_first1097.jsonl"


def story(i: int) -> str:
    words = f"Story {i} has a child in it. The child of story {i} is glad."
    return f"{words}\nOnce it was the {i}th to say the word{'a' * i}.\n\nMore."


@pytest.fixture
def stories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A data set of forty stories, the last of which stands in the first half too."""
    texts = [*map(story, range(39)), story(3)]
    (tmp_path / "text").mkdir()
    write(tmp_path, texts)
    monkeypatch.setenv("QSPEC_DATA", str(tmp_path))
    return texts


def write(folder: Path, texts: list[str]) -> None:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / FILE).write_text("".join(lines), encoding="utf-8")


def last_words() -> list[dict[str, str]]:
    return list(definitions.last_words("tinystories")["test"])


def test_items_come_from_the_half_that_calibration_does_not_read(stories: list[str]):
    """Would catch a model that is judged on rows which calibrate it, also where a row stands in both halves."""
    found = {item["word"].count("a") for item in last_words()}
    assert found == set(range(20, 39))
    sentences = list(definitions.next_sentences("tinystories")["test"])
    assert {item["context"].split()[1] for item in sentences} == {str(i) for i in range(20, 39)}
    assert all(int(choice.split("the ")[1].split("th")[0]) >= 20 for item in sentences for choice in item["choices"])


def recipe_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """The halves of data sets that the recipes' calibrations may read, and what the smallest does read, on one line."""
    recipes = [Recipe.read(path) for path in sorted(folder.glob("*.yaml"))]
    for name in sorted({data.name for recipe in recipes for data in recipe.calibration.data}):
        texts = [" ".join(map(str, row.values())) for row in load_rows(name)]
        yield name, " ".join(" ".join(texts[: len(texts) // 2]).split())
    first = min(recipes, key=lambda recipe: recipe.calibration.samples * recipe.calibration.length)
    read = " ".join(map(Letters().decode, calibration_rows(first.calibration, Letters(), first.seed)))
    yield first.name, " ".join(read.split())


def test_no_recipe_calibrates_on_an_item(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a task over text that a recipe of this project calibrates on."""
    monkeypatch.setenv("QSPEC_DATA", str(data_dir))
    items = [" ".join([item["context"], item["word"]]) for item in last_words()]
    items += [
        " ".join([i["context"], i["choices"][i["answer"]]]) for i in definitions.next_sentences("tinystories")["test"]
    ]
    assert len(items) > 900
    assert [(name, item) for name, text in recipe_texts(ROOT / "recipes") for item in items if item in text] == []


def test_a_right_choice_follows_and_others_are_of_other_stories(stories: list[str]):
    """Would catch a wrong key, an answer that stands twice, and one that always stands at the same place."""
    found = list(definitions.next_sentences("tinystories")["test"])
    for item in found:
        own, right = item["context"].split()[1], item["choices"][item["answer"]]
        assert f" {own}th " in right
        assert len(set(item["choices"])) == definitions.CHOICES
    assert set(Counter(item["answer"] for item in found)) == set(range(definitions.CHOICES))


def test_items_do_not_follow_the_order_of_the_rows(stories: list[str], tmp_path: Path):
    """Would catch a `limit` that takes the first stories of a file, or items that change with the order of its rows."""
    first, kept = last_words(), stories[:20]
    assert [item["word"] for item in first] != sorted(item["word"] for item in first)
    later = stories[20:]
    random.Random(1).shuffle(later)
    write(tmp_path, kept + later)
    assert last_words() == first


def test_what_has_no_last_word_makes_no_item(stories: list[str], tmp_path: Path):
    """Would catch a "word" with a quotation mark or number in it, and passages that are hardly a text."""
    odd = ["Too short.", "word " * 14 + "and 17.", "word " * 14 + 'and "stop."', "word " * 90 + "and more."]
    write(tmp_path, [*map(story, range(4)), *odd[:3], "word " * 16 + "and more."])
    assert [item["word"] for item in last_words()] == ["more"]
    write(tmp_path, [*map(story, range(4)), *odd])
    assert last_words() == []
