"""A process that is killed at any moment leaves a pair that is whole, or none; the same command again ends well.

A moment or two of each command; `QSPEC_LONG=1` takes all of them, more beginnings, and an hour.
"""

from collections.abc import Callable, Iterator, Sequence
import json
import os
from pathlib import Path
import shutil

import pytest

from qspec.bridges.remote import MARKER, PART
from qspec.pair.check import check, read_manifest
from qspec.pair.package import package, tidy
from qspec.schema.manifest import NAME
from qspec.schema.results import Results
from tests.jobs import NGRAM_DRAFT, SELF_DRAFT, job, training_data
from tests.killed import Ended, Killer
from tests.pairs import halves, measured_of, put, recipe
from tests.tiny import TEXT, tiny_model

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
    quantization = recipe().target.quantization.model_dump(mode="json")
    (folder / "prompts.jsonl").write_text('{"text": "The quick brown fox", "category": "prose"}', encoding="utf-8")
    benchmark = {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 8, "repeats": 1}
    target = {"model": str(folder / "source"), "quantization": quantization}
    of_source = recipe(target=target, benchmark=benchmark)
    made = package(*halves(folder / "source"), of_source, folder)
    put(measured_of(made, of_source), made, folder / "report")
    return made


def moments(whole: Callable[[], Ended], critical: Sequence[str]) -> Sequence[int | str]:
    """Steps to die at: all of the `whole` command, or those that are critical."""
    if not LONG:
        return critical
    ended = whole()
    assert ended.status == 0, ended.output
    return range(len(ended.steps))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def listed(pair: Path) -> set[str]:
    return {NAME, *(entry.path for entry in read_manifest(pair).files)}


@pytest.mark.parametrize("draft", [NGRAM_DRAFT, *([SELF_DRAFT] if LONG else [])])
def test_a_run_can_be_resumed_wherever_it_was_killed(draft: dict[str, object], killer: Killer, tmp_path: Path) -> None:
    """Would catch a pair that neither `check` nor `run --resume` takes again, and `work/` that stays for ever."""
    model, yaml = tiny_model("llama", tmp_path / "model"), tmp_path / "recipe.yaml"
    yaml.write_text(job(tmp_path, model, draft).dump(), encoding="utf-8")
    names = {"recipe.yaml", "run.log", "report", "pair"}

    def run(out: Path, die_at: int | str | None = None) -> Ended:
        return killer.run(
            "run", yaml, "--out", out, "--resume", "--despite", "a model of noise", below=out, die_at=die_at
        )

    critical = ("opened /.recipe.yaml", "rename /pair/report/.pair.json", "remove /work/target-")
    for moment in moments(lambda: run(tmp_path / "whole"), critical):
        out = tmp_path / "out"
        dead = run(out, moment)
        assert dead.status == KILLED, moment
        if (out / "pair").exists():
            check(out / "pair")
        ended = run(out)
        assert ended.status == 0, (moment, dead.steps[-2:], ended.output)
        check(out / "pair")
        assert {path.name for path in out.iterdir()} == names, (moment, dead.steps[-2:])
        assert files(out / "pair") == listed(out / "pair"), (moment, dead.steps[-2:])
        shutil.rmtree(out)


@pytest.mark.parametrize("verb", ["bench", *(["evaluate"] if LONG else [])])
def test_a_pair_stays_whole_while_it_gets_new_measurements(
    verb: str, killer: Killer, pair: Path, tmp_path: Path
) -> None:
    """Would catch an intact pair that `bench --keep` breaks for good, and reports that pile up in it."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    fidelity = json.dumps({"data": str(text), "windows": 2, "length": 32})
    own = {"bench": ["--no-original"], "evaluate": ["--set", f"evaluation.fidelity={fidelity}"]}
    more = [*own[verb], *(["--set", "evaluation.tasks=[]"] if verb == "evaluate" else [])]
    before = read_manifest(pair).report

    def keep(copy: Path, die_at: int | str | None = None) -> Ended:
        copy = copy if copy.exists() else Path(shutil.copytree(pair, copy))
        command = (verb, copy, "--keep", "--out", copy.parent / "out", *more)
        return killer.run(*command, below=copy.parent, die_at=die_at)

    critical = ("opened /pair/report/.pair.json", "rename /.out.partial")
    for moment in moments(lambda: keep(tmp_path / "whole/pair"), critical):
        copy = tmp_path / "copy/pair"
        dead = keep(copy, moment)
        assert dead.status == KILLED, moment
        check(copy)
        was = read_manifest(copy).report
        ended = keep(copy)
        assert ended.status == 0, (moment, dead.steps[-2:], ended.output)
        check(copy)
        now = read_manifest(copy).report
        assert now != before, (moment, dead.steps[-2:])
        assert was in (before, now), (moment, dead.steps[-2:])
        tidy(copy)
        assert files(copy) == listed(copy), (moment, dead.steps[-2:])
        assert sorted(path.name for path in copy.parent.iterdir()) == ["out", "pair"]
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize("there", ["another pair", *(["nothing", "half of another pair"] if LONG else [])])
def test_a_published_pair_is_the_old_one_none_or_the_new_one(
    there: str, killer: Killer, pair: Path, tmp_path: Path
) -> None:
    """Would catch half a manifest that others fetch, an upload that never goes on, and files of a pair that is gone."""
    other = Path(shutil.copytree(pair, tmp_path / "other"))
    results = Results.read(other / (read_manifest(other).report or "") / "results.json")
    put(results.model_copy(update={"limits": ("measured again",)}), other, tmp_path / "report")

    def publish(to: Path, die_at: int | str | None = None) -> Ended:
        if not to.exists() and there != "nothing":
            half = f"remove /{MARKER}" if there == "half of another pair" else None
            assert killer.run("publish", other, "--to", to, below=to, die_at=half).status in (0, KILLED)
            if half:
                (to / NAME).unlink()
        return killer.run("publish", pair, "--to", to, "--replace", below=to, die_at=die_at)

    for moment in moments(lambda: publish(tmp_path / "whole"), (f"rename /{PART}", f"remove /{MARKER}")):
        to = tmp_path / "there"
        dead = publish(to, moment)
        assert dead.status == KILLED, moment
        if (to / NAME).exists():
            check(to)
        ended = publish(to)
        assert ended.status == 0, (moment, dead.steps[-2:], ended.output)
        check(to)
        assert (to / NAME).read_bytes() == (pair / NAME).read_bytes()
        assert files(to) == {*listed(pair), "README.md"}, (moment, dead.steps[-2:])
        shutil.rmtree(to)


def test_a_pull_goes_on_wherever_it_was_killed(killer: Killer, pair: Path, tmp_path: Path) -> None:
    """Would catch a folder that looks like a pair before all of it is there, and one that cannot be pulled again."""
    assert killer.run("publish", pair, "--to", tmp_path / "there", below=tmp_path / "there").status == 0

    def pull(folder: Path, die_at: int | str | None = None) -> Ended:
        return killer.run("pull", tmp_path / "there", folder / "pair", below=folder, die_at=die_at)

    for moment in moments(lambda: pull(tmp_path / "whole"), (f"opened /.pair.pulled/{NAME}",)):
        folder = tmp_path / "pulled"
        dead = pull(folder, moment)
        assert dead.status == KILLED, moment
        assert not (folder / "pair").exists()
        ended = pull(folder)
        assert ended.status == 0, (moment, dead.steps[-2:], ended.output)
        check(folder / "pair")
        assert files(folder) == {f"pair/{name}" for name in listed(pair)}, (moment, dead.steps[-2:])
        assert pull(folder).status == 0  # it is there
        shutil.rmtree(folder)


def test_a_quantized_checkpoint_appears_whole(killer: Killer, tmp_path: Path) -> None:
    """Would catch half a checkpoint, and work that stays behind."""
    model = tiny_model("llama", tmp_path / "model")
    job(tmp_path, model)
    calibration = f"calibration.data=[{{name: {tmp_path / 'calibration.txt'}}}]"

    def quantize(folder: Path, die_at: int | str | None = None) -> Ended:
        folder.mkdir(exist_ok=True)
        command = ("quantize", model, "--set", calibration, "--set", "calibration.length=32", folder / "made")
        return killer.run(*command, below=folder, die_at=die_at)

    for moment in moments(
        lambda: quantize(tmp_path / "whole"), ("rename /.made.work/.00000-", "rename /.made.work/.whole.partial")
    ):
        folder = tmp_path / "folder"
        dead = quantize(folder, moment)
        assert dead.status == KILLED, moment
        whole = (folder / "made").exists()
        ended = quantize(folder)
        assert ended.status == (2 if whole else 0), (moment, ended.output)  # that it exists is said, not done again
        assert [path.name for path in folder.iterdir()] == ["made"], (moment, dead.steps[-2:])
        assert (folder / "made/model.safetensors").stat().st_size > 0
        shutil.rmtree(folder)


@pytest.mark.skipif(not LONG, reason="trains for minutes: set QSPEC_LONG=1")
def test_a_training_goes_on_wherever_it_was_killed(killer: Killer, tmp_path: Path) -> None:
    """Would catch a training that begins anew, a head of other weights, and half-written data that stays."""
    training = {"positions": 128, "batch": 16, "evaluate_every": 4, "data": training_data(tmp_path, 200)}
    draft = {
        "kind": "mlp_speculator",
        "model": str(tmp_path / "out/head"),
        "n_predict": 2,
        "inner_dim": 16,
        "training": training,
    }
    yaml = tmp_path / "recipe.yaml"
    yaml.write_text(job(tmp_path, tiny_model("llama", tmp_path / "model"), draft).dump(), encoding="utf-8")

    def train(out: Path, die_at: int | str | None = None) -> Ended:
        return killer.run("train-draft", yaml, "--out", out, below=out, die_at=die_at)

    weights = []
    for moment in moments(lambda: train(tmp_path / "whole"), ()):
        out = tmp_path / "out"
        dead = train(out, moment)
        assert dead.status == KILLED, moment
        ended = train(out)
        assert ended.status == 0, (moment, dead.steps[-2:], ended.output)
        weights = [(one / "head/model.safetensors").read_bytes() for one in (out, tmp_path / "whole")]
        assert weights[0] == weights[1], (moment, dead.steps[-2:])
        assert files(out) == files(tmp_path / "whole"), (moment, dead.steps[-2:])
        shutil.rmtree(out)
