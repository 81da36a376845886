"""Publishing and fetching a pair: whole, verified, resumable, and never against its gates."""

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import re
from typing import Any

import pytest
import yaml

from qspec import publish as stage
from qspec.bridges.remote import MARKER, PART, FolderStore
from qspec.cli import main
from qspec.errors import IntegrityError, OutputError, PairError, RecipeError, SourceError
from qspec.pair.check import check, provenance, read_manifest
from qspec.pair.open import open_pair
from qspec.pair.package import package, seal
from qspec.schema.manifest import NAME
from qspec.schema.recipe import Recipe
from qspec.schema.results import Accuracy, Equality, Mismatch, Results
from tests.example_results import example, speed, task
from tests.pairs import halves, measured_of, recipe


def _results(pair: Path, *, lossless: bool = True) -> Results:
    wrong = Mismatch(prompt=0, category="qa", position=1, margin=1.0, near_tie=False)
    equality = Equality(arm="a + draft", baseline="a", n=1, equal=0, mismatches=(wrong,))
    if lossless:
        equality = Equality(arm="a + draft", baseline="a", n=1, equal=1)
    of = provenance(read_manifest(pair), recipe(), "pair")
    timed = speed().model_copy(update={"provenance": of, "equality": (equality,)})
    accuracy = measured_of(pair, recipe()).accuracy.model_copy(update={"needles": None, "tasks": ()})
    return Results(name="p", recipe=recipe().as_dict(), environment={}, accuracy=accuracy, speed=timed)


def _pair(folder: Path, *, lossless: bool = True) -> Path:
    pair = package(*halves(folder / "source"), recipe(), folder)
    results, report = _results(pair, lossless=lossless), folder / "report"
    report.mkdir()
    (report / "results.json").write_text(results.dump(), encoding="utf-8")
    (report / "report.md").write_text("# Report\n\nall well\n", encoding="utf-8")
    seal(pair, results.model_dump(mode="json"), report)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _pair(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3 server on this machine, with an empty bucket."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (keys | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="pairs")
        yield "s3://pairs"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "there")
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"


def _publish(pair: Path, to: str, **options: Any) -> list[str]:
    told: list[str] = []
    stage.publish(stage.prepare(pair, to), to, report=told.append, **options)
    return told


def test_what_is_published_is_what_is_fetched(pair: Path, address: str, tmp_path: Path) -> None:
    """Would catch a file that is left out, changed on its way, or fetched beside the pair's own."""
    told = _publish(pair, address)
    assert told[-1] == NAME
    assert stage.CARD in told
    back = stage.pull(address, tmp_path / "back", lambda _: None)
    check(back)
    ours = {p.relative_to(pair): p.read_bytes() for p in pair.rglob("*") if p.is_file()}
    assert {p.relative_to(back): p.read_bytes() for p in back.rglob("*") if p.is_file()} == ours
    assert _publish(pair, address) == []  # it is there already
    assert stage.pull(address, tmp_path / "back", lambda _: None) == back  # and here


def test_every_file_gets_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    """Would catch a pair of which a server's user can read all but the weights."""
    before = os.umask(0o027)
    try:
        pair = _pair(tmp_path)
        _publish(pair, str(tmp_path / "there"))
        back = stage.pull(str(tmp_path / "there"), tmp_path / "back", lambda _: None)
    finally:
        os.umask(before)
    paths = [path for folder in (pair, tmp_path / "there", back) for path in (folder, *folder.rglob("*"))]
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths} == {(True, 0o750), (False, 0o640)}


def test_an_interrupted_upload_goes_on_and_is_no_pair_until_it_ends(
    pair: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch half a pair that others fetch, and an upload that begins anew."""
    publication = stage.prepare(pair, address)

    def cut(name: str) -> None:
        if name == publication.items[2].name:
            raise Cut

    with pytest.raises(Cut):
        stage.publish(publication, address, report=cut)
    with pytest.raises(IntegrityError, match=r"pair\.json: is missing"):
        stage.pull(address, tmp_path / "back", lambda _: None)
    sent: list[str] = []
    put = FolderStore._put
    monkeypatch.setattr(FolderStore, "_put", lambda self, item: (sent.append(item.name), put(self, item))[1])
    stage.publish(publication, address, report=lambda _: None)
    done = {item.name for item in publication.items[:3]}
    assert set(sent) == {item.name for item in publication.items} - done - {NAME} | {PART}  # the manifest in one step
    check(stage.pull(address, tmp_path / "back", lambda _: None))
    assert FolderStore(address).read(MARKER, 100) is None


class Cut(Exception):
    """A connection that ends, or a process that is killed."""


def _cut_at(count: int) -> Callable[[str], None]:
    """Ends at the `count`-th file that it is told of."""
    told = list[str]()

    def hear(name: str) -> None:
        told.append(name)
        if len(told) == count:
            raise Cut

    return hear


def test_a_fetched_pair_answers_as_the_one_that_was_published(pair: Path, address: str, tmp_path: Path) -> None:
    """Would catch a pair that passes its checks and is another one in use, both ways having been interrupted."""
    publication = stage.prepare(pair, address)
    for count in (3, 7):
        with pytest.raises(Cut):
            stage.publish(publication, address, report=_cut_at(count))
    stage.publish(publication, address, report=lambda _: None)
    for count in (2, 5):
        with pytest.raises(Cut):
            stage.pull(address, tmp_path / "back", _cut_at(count))
    back = stage.pull(address, tmp_path / "back", lambda _: None)
    assert check(back) == check(pair)
    prompts = ("The quick brown fox", "0, 12 and")
    for temperature in (0.0, 1.0):
        ours, theirs = (
            [open_pair(p).generate(prompt, 24, temperature=temperature, seed=3) for prompt in prompts]
            for p in (pair, back)
        )
        assert [one.text for one in theirs] == [one.text for one in ours]
        assert all(step.drafted for one in theirs for step in one.generation.steps[:2])


def test_a_pair_is_not_published_into_itself(pair: Path) -> None:
    """Would catch a pair that no longer passes its own check, for the files that were published into it."""
    with pytest.raises(OutputError, match="lies in the pair"):
        stage.prepare(pair, f"{pair}/published")
    check(pair)


def test_a_folder_of_other_files_is_left_alone(pair: Path, tmp_path: Path) -> None:
    """Would catch the README.md of a project replaced by a pair's card, with the pair's files strewn beside it."""
    (tmp_path / "README.md").write_text("mine")
    for replace in (False, True):
        with pytest.raises(OutputError, match="holds other files, among which"):
            _publish(pair, str(tmp_path), replace=replace)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_another_pair_is_replaced_only_when_asked_for(pair: Path, address: str, tmp_path: Path) -> None:
    """Would catch a published pair lost to a mistyped address, and files of the old one mixed with the new one's."""
    (tmp_path / "other").mkdir()
    other = _pair(tmp_path / "other")
    assert (other / NAME).read_bytes() != (pair / NAME).read_bytes()
    _publish(other, address)
    with pytest.raises(OutputError, match="holds another pair"):
        _publish(pair, address)
    _publish(pair, address, replace=True)
    back = stage.pull(address, tmp_path / "back", lambda _: None)
    assert (back / NAME).read_bytes() == (pair / NAME).read_bytes()


def test_a_changed_file_is_found_before_the_pair_appears(pair: Path, tmp_path: Path) -> None:
    """Would catch weights that are loaded although their digest differs, and a good file fetched twice."""
    there = tmp_path / "there"
    _publish(pair, str(there))
    weights = there / "target" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=r"target/model\.safetensors: was changed"):
        stage.pull(str(there), tmp_path / "back", lambda _: None)
    assert not (tmp_path / "back").exists()
    weights.write_bytes(good[:-1])
    with pytest.raises(SourceError, match="bytes instead of"):
        stage.pull(str(there), tmp_path / "back", lambda _: None)
    weights.write_bytes(good)
    check(stage.pull(str(there), tmp_path / "back", lambda _: None))


def test_a_missed_gate_blocks_unless_the_card_says_so(tmp_path: Path) -> None:
    """Would catch a pair whose drafts change the output, published as if they did not."""
    pair = _pair(tmp_path, lossless=False)
    with pytest.raises(PairError, match="speculation is not lossless"):
        stage.prepare(pair, "there")
    publication = stage.prepare(pair, "there", override="a test pair")
    assert "Published although a gate failed:** a test pair" in publication.card
    unmeasured = package(*halves(tmp_path / "again"), recipe(), tmp_path / "plain")
    with pytest.raises(PairError, match="nothing was measured"):
        stage.prepare(unmeasured, "there")


def test_guesses_are_no_score_of_a_card() -> None:
    """Would catch a score of two questions that guessing explains, by which the Hub lists the pair among others."""
    guessed = task(0.1).model_copy(update={"original": task().original.model_copy(update={"value": 0.1})})
    for tasks, score in (((task(0.3),), 0.3), ((guessed, task(0.3)), 0.3), ((guessed,), None)):
        found = stage._score(example().model_copy(update={"accuracy": Accuracy(tasks=tasks)}))
        assert (found and found["metric_value"]) == score


def test_the_card_has_a_header_that_the_hub_reads(pair: Path) -> None:
    """Would catch a card without licence or tags, and a base model that is a path on somebody's disk."""
    publication = stage.prepare(pair, "hf://org/name", license="apache-2.0")
    header = yaml.safe_load(publication.card.split("---")[1])
    assert header["license"] == "apache-2.0"
    assert header["library_name"] == "qspec"
    assert {"speculative-decoding", "w8a8", "w4a16"} <= set(header["tags"])
    assert "base_model" not in header  # the halves were made in a folder
    assert "qspec pull hf://org/name pair" in publication.card
    known = stage.prepare(pair, "hf://org/name", base="HuggingFaceTB/SmolLM2-135M-Instruct")
    header = yaml.safe_load(known.card.split("---")[1])
    assert header["base_model"] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert header["base_model_relation"] == "quantized"
    with pytest.raises(OutputError, match="--base-model /a/b: is no Hub id"):
        stage.prepare(pair, "hf://org/name", base="/a/b")


def test_a_recipe_names_the_base_of_its_files() -> None:
    """Would catch a pair of a GGUF file that nobody finds under the model which it was made from."""
    for name in ("smollm2-135m-int8-cpu", "smollm2-135m-self-cpu"):
        read = Recipe.read(Path(__file__).parents[1] / "recipes" / f"{name}.yaml")
        assert read.target.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    fields = {"name": "t", "target": {"model": "a.gguf", "base_model": "../a"}, "draft": {"kind": "ngram"}}
    with pytest.raises(RecipeError, match=r"target\.base_model"):
        Recipe.of(fields, (), "t.yaml")


def test_the_card_is_a_screen_and_links_the_rest(pair: Path, tmp_path: Path) -> None:
    """Would catch a card of 20 kB, a link to what is not published, and a path of the machine that it was made on."""
    publication = stage.prepare(pair, str(tmp_path / "there"))
    body = publication.card.split("---\n", 2)[2]
    assert len(publication.card) < 5000
    assert len(body.splitlines()) < 50
    assert str(tmp_path) not in publication.card
    assert str(pair.parent) not in publication.card
    assert "qspec pull FOLDER pair" in body
    assert "At a glance" in body
    links = re.findall(r"\]\(([^)]+)\)", body)
    assert links
    assert set(links) <= {item.name for item in publication.items}
    bucket = stage.prepare(pair, "s3://bucket/pair").card
    assert "qspec pull s3://bucket/pair pair" in bucket


def test_the_hub_gets_one_commit(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a repository that others see half-written."""
    import huggingface_hub

    seen: list[Any] = []

    class Api:
        def create_repo(self, repo: str, **options: Any) -> None:
            seen.append((repo, options))

        def create_branch(self, repo: str, **options: Any) -> None:
            seen.append((repo, options))

        def create_commit(self, repo: str, operations: list[Any], **options: Any) -> None:
            seen.append((repo, {o.path_in_repo for o in operations}, options["revision"]))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(FolderStore, "read", lambda self, name, most: None)
    told = _publish(pair, "hf://org/name@v2", private=True)
    assert seen == [
        ("org/name", {"private": True, "exist_ok": True}),
        ("org/name", {"branch": "v2", "exist_ok": True}),
        ("org/name", set(told), "v2"),
    ]
    with pytest.raises(SourceError, match="no address of a repository"):
        stage.publish(stage.prepare(pair, "hf://name"), "hf://name", report=print)


@pytest.mark.parametrize(
    "address", ["s3://key:secret@host/bucket", "https://secret@host/x", "nosuchthing://x/y", "", " "]
)
def test_addresses_that_are_refused(address: str) -> None:
    """Would catch a password kept in logs, a traceback for a mistyped scheme, and an unset variable for an address:
    a pair would be written into whatever folder one happens to stand in.
    """
    with pytest.raises(SourceError) as error:
        FolderStore(address)
    assert "secret" not in str(error.value)


def test_the_dry_run_lists_every_byte_and_writes_nothing(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a rehearsal that publishes, or that leaves a file out."""
    there = tmp_path / "there"
    assert main(["publish", str(pair), "--to", str(there), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not there.exists()
    for path in (p for p in pair.rglob("*") if p.is_file()):
        assert f"{os.path.getsize(path):>15,} {path.relative_to(pair).as_posix()}" in printed
    assert main(["publish", str(pair), "--to", str(there)]) == 0
    assert main(["pull", str(there), str(tmp_path / "back")]) == 0


def test_a_pull_takes_nothing_away(pair: Path, tmp_path: Path) -> None:
    """Would catch a folder of somebody's own, or another pair, that a fetched pair takes the place of."""
    _publish(pair, str(tmp_path / "there"))
    (tmp_path / "other").mkdir()
    other = _pair(tmp_path / "other")
    for out, rule in ((tmp_path / "other", "exists;"), (other, "exists, and is another pair")):
        with pytest.raises(OutputError, match=rule):
            stage.pull(str(tmp_path / "there"), out, lambda _: None)
    weights = stage.pull(str(tmp_path / "there"), tmp_path / "back", lambda _: None) / "target/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="bytes instead of"):
        stage.pull(str(tmp_path / "there"), tmp_path / "back", lambda _: None)
