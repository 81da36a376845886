"""A process that is killed at any moment leaves a pair that is whole, or none; the same command again ends well.

A few moments of each command; `QSPEC_LONG=1` takes all of them (an hour).
"""

from collections.abc import Iterator
import os
from pathlib import Path
import shutil

import pytest

from qspec.bridges.remote import MARKER, PART
from qspec.pair.check import check, read_manifest
from qspec.pair.package import package, tidy
from qspec.schema.manifest import NAME
from qspec.schema.results import Results
from tests.jobs import NGRAM_DRAFT, SELF_DRAFT, job
from tests.killed import Killer
from tests.pairs import halves, measured_of, put, recipe
from tests.tiny import tiny_model

LONG = os.environ.get("QSPEC_LONG") == "1"
KILLED = -9


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Killer.started() as started:
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that was measured."""
    folder = tmp_path_factory.mktemp("made")
    made = package(*halves(folder / "source"), recipe(), folder)
    put(measured_of(made, recipe()), made, folder / "report")
    return made


def moments(steps: list[str], *critical: str) -> list[int]:
    """Steps to die at: all of them, or the first of each that are critical."""
    if LONG:
        return list(range(len(steps)))
    return [next(i for i, step in enumerate(steps) if part in step) for part in critical]


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def digests(pair: Path) -> set[str]:
    """Of everything that is not measured."""
    return {entry.sha256 for entry in read_manifest(pair).files if not entry.path.startswith("report/")}


@pytest.mark.parametrize("draft", [NGRAM_DRAFT, *([SELF_DRAFT] if LONG else [])])
def test_a_run_can_be_resumed_wherever_it_was_killed(draft: dict[str, object], killer: Killer, tmp_path: Path) -> None:
    """Would catch a pair that neither `check` nor `run --resume` takes again, and `work/` that stays for ever."""
    model = tiny_model("llama", tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(job(tmp_path, model, draft).dump(), encoding="utf-8")
    whole = tmp_path / "whole"
    steps = killer.run("run", tmp_path / "recipe.yaml", "--out", whole, below=whole).steps
    at = ("opened /.recipe.yaml", "os.rename /.pair.partial", "rename /pair/report/.pair.json", "remove /work/target/")
    for moment in moments(steps, *at):
        out = tmp_path / f"{moment}"
        told = ("run", tmp_path / "recipe.yaml", "--out", out, "--resume")
        assert killer.run(*told, below=out, die_at=moment).status == KILLED
        if (out / "pair").exists():
            check(out / "pair")
        ended = killer.run(*told, below=out)
        assert ended.status == 0, (steps[moment], ended.output)
        check(out / "pair")
        assert digests(out / "pair") == digests(whole / "pair"), steps[moment]
        assert names(out) == names(whole), steps[moment]
        shutil.rmtree(out)


def test_a_pair_stays_whole_while_it_gets_new_measurements(killer: Killer, pair: Path, tmp_path: Path) -> None:
    """Would catch an intact pair that `bench --keep` breaks for good, and reports that pile up in it."""

    def bench(copy: Path, die_at: int | None = None) -> tuple[int, list[str]]:
        told = ("bench", copy, "--no-original", "--keep", "--out", copy.parent / "out")
        ended = killer.run(*told, below=copy.parent, die_at=die_at)
        return ended.status, ended.steps

    whole = Path(shutil.copytree(pair, tmp_path / "whole/pair"))
    status, steps = bench(whole)
    assert status == 0
    versions = {read_manifest(one).report for one in (pair, whole)}
    assert len(versions) == 2
    at = ("opened /pair/report/", "os.rename /pair/report/.", "opened /pair/report/.pair.json", "/.pair.json.partial")
    for moment in moments(steps, *at, "os.rename /.out.partial"):
        copy = Path(shutil.copytree(pair, tmp_path / f"{moment}/pair"))
        assert bench(copy, moment) == (KILLED, steps[:moment])
        check(copy)
        assert read_manifest(copy).report in versions
        assert bench(copy)[0] == 0, steps[moment]
        check(copy)
        assert read_manifest(copy).report == read_manifest(whole).report
        tidy(copy)
        assert {name for name in names(copy) if (copy / name).is_file()} == listed(copy), steps[moment]
        assert sorted(path.name for path in copy.parent.iterdir()) == ["out", "pair"]
        shutil.rmtree(copy.parent)


def listed(pair: Path) -> set[str]:
    return {NAME, *(entry.path for entry in read_manifest(pair).files)}


@pytest.mark.parametrize("there", ["nothing", "another pair", "half of another pair"])
def test_a_published_pair_is_the_old_one_none_or_the_new_one(
    there: str, killer: Killer, pair: Path, tmp_path: Path
) -> None:
    """Would catch half a manifest that others fetch, an upload that never goes on, and files of a pair that is gone."""
    other = Path(shutil.copytree(pair, tmp_path / "other"))
    result = Results.read(other / (read_manifest(other).report or "") / "results.json")
    put(result.model_copy(update={"limits": ("measured again",)}), other, tmp_path / "report")

    def prepared(to: Path) -> Path:
        if there != "nothing":
            steps = killer.run("publish", other, "--to", to, below=to).steps
        if there == "half of another pair":
            shutil.rmtree(to)
            last = next(i for i, step in enumerate(steps) if step == f"os.remove /{MARKER}") - 1
            assert killer.run("publish", other, "--to", to, below=to, die_at=last).status == KILLED
        return to

    def publish(to: Path, die_at: int | None = None) -> int:
        return killer.run("publish", pair, "--to", to, "--replace", below=to, die_at=die_at).status

    whole = prepared(tmp_path / "whole")
    steps = killer.run("publish", pair, "--to", whole, "--replace", below=whole).steps
    at = (f"opened /{PART}", f"rename /{PART}", "opened /draft/config.json", f"remove /{MARKER}")
    for moment in moments(steps, *at):
        to = prepared(tmp_path / f"{moment}")
        assert publish(to, moment) == KILLED
        if (to / NAME).exists():
            check(to)
        assert publish(to) == 0, steps[moment]
        check(to)
        assert (to / NAME).read_bytes() == (pair / NAME).read_bytes()
        assert {name for name in names(to) if (to / name).is_file()} == {*listed(pair), "README.md"}, steps[moment]
        shutil.rmtree(to)


def test_a_pull_goes_on_wherever_it_was_killed(killer: Killer, pair: Path, tmp_path: Path) -> None:
    """Would catch a folder that looks like a pair before all of it is there, and one that cannot be pulled again."""
    assert killer.run("publish", pair, "--to", tmp_path / "there", below=tmp_path / "there").status == 0

    def pull(folder: Path, die_at: int | None = None) -> int:
        return killer.run("pull", tmp_path / "there", folder / "pair", below=folder, die_at=die_at).status

    whole = tmp_path / "whole"
    steps = killer.run("pull", tmp_path / "there", whole / "pair", below=whole).steps
    at = ("opened /.pair.pulled/target/model.safetensors", f"opened /.pair.pulled/{NAME}", "os.rename /.pair.pulled")
    for moment in moments(steps, *at):
        folder = tmp_path / f"{moment}"
        assert pull(folder, moment) == KILLED
        assert not (folder / "pair").exists()
        assert pull(folder) == 0, steps[moment]
        check(folder / "pair")
        assert names(folder) == names(whole), steps[moment]
        assert pull(folder) == 0  # it is there
        shutil.rmtree(folder)


def test_a_quantized_checkpoint_appears_whole(killer: Killer, tmp_path: Path) -> None:
    """Would catch half a checkpoint, finished layers that are made again, and work that stays behind."""
    model, calibration = tiny_model("llama", tmp_path / "model"), tmp_path / "text.txt"
    job(tmp_path, model)
    calibration = tmp_path / "calibration.txt"
    told = ("quantize", model, "--set", f"calibration.data=[{{name: {calibration}}}]", "--set", "calibration.length=32")

    def quantize(folder: Path, die_at: int | None = None) -> tuple[int, list[str]]:
        folder.mkdir(exist_ok=True)
        ended = killer.run(*told, folder / "made", below=folder, die_at=die_at)
        return ended.status, ended.steps

    status, steps = quantize(tmp_path / "whole")
    assert status == 0
    for moment in moments(steps, "os.rename /.made.partial", "remove /.made.work/pieces/key.json"):
        folder = tmp_path / f"{moment}"
        assert quantize(folder, moment)[0] == KILLED
        whole = (folder / "made").exists()
        assert quantize(folder)[0] == (2 if whole else 0), steps[moment]  # that it exists is said, not done again
        assert names(folder) == names(tmp_path / "whole"), steps[moment]
        weights = [one / "made/model.safetensors" for one in (folder, tmp_path / "whole")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        shutil.rmtree(folder)
