"""safetensors files: read lazily, written whole. Nothing else is ever read as weights (no pickle)."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from qspec.errors import OutputError, SourceError
from qspec.provenance import sha256_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ONE_COPY = "download the model again, or save it again with `save_pretrained`"


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name over one or several files; each is memory-mapped when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: the file of each tensor name."""
        self._files = dict(files)
        self._open: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header alone."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's type (`F32`, `BF16`, `F8_E4M3`, …), read from the header alone."""
        return str(self._handle(name).get_slice(name).get_dtype())

    def without(self, names: Collection[str]) -> "LazyTensors":
        """The same files without some names."""
        return LazyTensors({name: path for name, path in self._files.items() if name not in names})

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _handle(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, sorted; the index first if there is one.

    Raises `SourceError` for a missing shard, a shard name that leaves the folder, or no weights at all.
    """
    if (folder / INDEX).is_file():
        return [folder / INDEX, *sorted(set(_indexed(folder / INDEX).values()))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise SourceError(
        str(folder),
        "holds no safetensors weights" if not found else "holds several safetensors files and no index",
        f"give a folder with {SINGLE} or {INDEX} (pickle files are never read)",
    )


def read_tensors(source: str | Path) -> LazyTensors:
    """Tensors of a `.safetensors` file, or of a model folder (single file or index)."""
    path = Path(source)
    files = [path] if path.is_file() else weight_files(path)
    if files[0].name == INDEX:
        where = _indexed(files[0])
        _check_index(files[0], where)
        return LazyTensors(where)
    with _open(files[0]) as handle:
        return LazyTensors(dict.fromkeys(handle.keys(), files[0]))


def weights_sha256(source: str | Path) -> str:
    """Digest that identifies weights: that of a single file; for shards, over the digests of index and shards."""
    path = Path(source)
    digests = [sha256_file(file) for file in ([path] if path.is_file() else weight_files(path))]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file. Tensors may be views or share memory: each is written whole, under its own name."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if storage in seen else value
        seen.add(storage)
    try:
        safetensors.torch.save_file(plain, str(path), metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # instead of `OSError`, for a full disk too
        fix = "choose an output folder with space and write permission"
        raise OutputError(str(path), f"cannot be written ({error})", fix) from error


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise SourceError(str(path), f"is not a readable safetensors file ({error})", _ONE_COPY) from error


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = [(str(tensor), str(file)) for tensor, file in names.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(str(index), "is not a safetensors index", _ONE_COPY) from error
    for file in {file for _, file in items}:
        if Path(file).name != file:
            raise SourceError(f"{index}: {file!r}", "shards lie beside their index", _ONE_COPY)
        if not (index.parent / file).is_file():
            raise SourceError(str(index.parent / file), f"{INDEX} lists this shard, but it is missing", _ONE_COPY)
    return {tensor: index.parent / file for tensor, file in items}


def _check_index(index: Path, where: Mapping[str, Path]) -> None:
    """Every indexed tensor lies in the shard that the index names."""
    with ExitStack() as stack:
        held = {path: set(stack.enter_context(_open(path)).keys()) for path in sorted(set(where.values()))}
    for name, path in where.items():
        if name not in held[path]:
            raise SourceError(
                f"{path.name}: {name}", f"{index.name} puts this tensor here, but it is missing", _ONE_COPY
            )
