"""Publishing to the Hub and fetching from it, through huggingface_hub and a server on this machine."""

from collections.abc import Iterator
import logging
from pathlib import Path

from huggingface_hub import constants
import pytest

from qspec import publish as stage
from qspec.cli import main
from qspec.errors import OutputError, QspecError, SourceError
from qspec.models.load import load
from qspec.pair.check import check
from qspec.provenance import sha256_file
from qspec.schema.manifest import NAME
from qspec.schema.recipe import ModelSpec
from tests.hub_server import TOKEN, Hub, serving_hub
from tests.test_publish import _pair, _publish
from tests.tiny import tiny_model

ADDRESS = "hf://org/pair"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's call of httpx


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _pair(tmp_path_factory.mktemp("made"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as hub:
        told: dict[str, str | bool] = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        told["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in told.items():  # what HF_ENDPOINT and the others set at import
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def _bytes(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _uploads(hub: Hub) -> list[str]:
    return [asked for asked in hub.asked if asked.startswith("PUT /lfs/")]


def test_what_is_published_is_what_is_fetched(pair: Path, hub: Hub, tmp_path: Path) -> None:
    """Would catch a file that is lost on its way, sent twice or in a commit of its own, and a card without a header."""
    told = _publish(pair, ADDRESS)
    there = hub.files("org/pair")
    assert set(there) == set(told) == {*_bytes(pair), stage.CARD}
    assert (hub.commits, there[stage.CARD][:4]) == (1, b"---\n")
    assert len(_uploads(hub)) >= 2  # the weights of both halves
    assert _publish(pair, ADDRESS) == []  # it is there already
    back = stage.pull(ADDRESS, tmp_path / "back", lambda _: None)
    check(back)
    assert _bytes(back) == _bytes(pair)


@pytest.mark.parametrize("where", ["upload", "commit"])
def test_an_interrupted_upload_is_no_pair_and_goes_on(pair: Path, hub: Hub, tmp_path: Path, where: str) -> None:
    """Would catch a repository with half a pair in it, and weights that are sent again."""
    weights = sha256_file(pair / "target/model.safetensors")
    failing = {"upload": f"PUT /lfs/{weights}", "commit": "POST /api/models/org/pair/commit"}[where]
    hub.fail[failing] = 403
    with pytest.raises(OutputError, match=r"hf://org/pair: was not published"):
        _publish(pair, ADDRESS)
    assert hub.files("org/pair") == {}
    with pytest.raises(QspecError, match=r"pair\.json: is missing"):
        stage.pull(ADDRESS, tmp_path / "back", lambda _: None)
    hub.fail.clear()
    hub.asked, kept = [], {f"PUT /lfs/{oid}" for oid in hub.objects}
    assert _publish(pair, ADDRESS)
    assert not kept.intersection(_uploads(hub))
    assert (failing in _uploads(hub)) == (where == "upload")
    check(stage.pull(ADDRESS, tmp_path / "back", lambda _: None))


def test_a_branch_is_made_for_a_revision(pair: Path, hub: Hub, tmp_path: Path) -> None:
    """Would catch `@v2` that is refused because nobody has made it, or that lands on the main branch."""
    _publish(pair, f"{ADDRESS}@v2")
    assert hub.files("org/pair") == {}
    assert NAME in hub.files("org/pair", "v2")
    check(stage.pull(f"{ADDRESS}@v2", tmp_path / "back", lambda _: None))
    assert _publish(pair, f"{ADDRESS}@v2") == []


def test_a_failure_is_not_taken_for_an_empty_place(pair: Path, hub: Hub, tmp_path: Path) -> None:
    """Would catch a pair that is replaced unasked because the Hub did not answer when it was looked for."""
    (tmp_path / "other").mkdir()
    _publish(_pair(tmp_path / "other"), ADDRESS)
    hub.fail["GET /api/models"] = 500
    with pytest.raises(SourceError, match="failed"):
        _publish(pair, ADDRESS)
    with pytest.raises(SourceError, match="failed"):
        stage.pull(ADDRESS, tmp_path / "back", lambda _: None)
    assert hub.commits == 1
    hub.fail.clear()
    with pytest.raises(OutputError, match="holds another pair"):
        _publish(pair, ADDRESS)
    _publish(pair, ADDRESS, replace=True)
    assert hub.files("org/pair")[NAME] == (pair / NAME).read_bytes()


@pytest.mark.parametrize("fault", ["none", "POST /api/repos", "PUT /lfs/", "/commit/", "GET /api", "GET /org"])
def test_no_token_is_told(
    pair: Path,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    """Would catch a token in an error, in a log of any level, on the terminal, on the card or in the manifest."""
    caplog.set_level(logging.DEBUG)
    hub.fail[fault] = 403
    published = main(["publish", str(pair), "--to", ADDRESS])
    pulled = main(["pull", ADDRESS, str(tmp_path / "back")])
    assert (published, pulled) == ((0, 0) if fault == "none" else (2 if "GET /org" not in fault else 0, 2))
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}x")  # not a valid one
    assert main(["publish", str(pair), "--to", "hf://org/other"]) == 2
    said = capfd.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (1 if fault == "none" else 3 - (fault == "GET /org"))
    assert "hf auth login" in errors[-1] or "check address" in errors[-1]
    for text in (
        said.out,
        said.err,
        caplog.text,
        *(content.decode(errors="replace") for content in hub.objects.values()),
    ):
        assert TOKEN not in text
    for branches in hub.repos.values():
        assert not any(TOKEN.encode() in content for files in branches.values() for content in files.values())


def test_a_model_comes_with_what_lies_beside_it(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch processors and sampling defaults that are never fetched, code and pickles that are, and silence."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    files = _bytes(tiny_model("llama", tmp_path / "source"))
    files |= {"generation_config.json": b'{"top_k":  20}', "processor_config.json": b"{}", "a[1].txt": b"x"}
    files |= {"README.md": b"# theirs", "modeling_own.py": b"1", "pytorch_model.bin": b"w", "onnx/config.json": b"{}"}
    hub.repos["org/tiny"] = {"main": files, f"{0:040}": files}
    model = load(ModelSpec(model="org/tiny"))
    travel = {"README.source.md": "README.md", "tokenizer.json": "tokenizer.json", "a[1].txt": "a[1].txt"}
    travel |= {name: name for name in ("generation_config.json", "processor_config.json")}
    for name, there in travel.items():
        assert model.files[name].read_bytes() == files[there]
    assert model.left_out == {"modeling_own.py": "code", "pytorch_model.bin": "weights", "onnx/": "another model"}
    assert not [asked for asked in hub.asked if asked.endswith((".py", ".bin", "onnx/config.json"))]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(ModelSpec(model="org/tiny")).files == model.files
