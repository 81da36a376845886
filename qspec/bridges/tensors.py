"""safetensors files: read lazily, written whole. Nothing else is ever read as weights (no pickle)."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from qspec.errors import OutputError, SourceError
from qspec.plain_files import read_json, require_regular
from qspec.provenance import sha256_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1_000_000_000
"""Size at which weights go into several files; also what writing them holds in memory."""
_ONE_COPY = "download the model again, or save it again with `save_pretrained`"


@dataclass(frozen=True)
class StoredPart:
    """Rows of the tensor `stored`, or of its slice `index` along the first axis; `stop` None: to the last row."""

    stored: str
    index: int | None = None
    start: int = 0
    stop: int | None = None

    @property
    def whole(self) -> bool:
        return self.index is None and (self.start, self.stop) == (0, None)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name over one or several files; each is memory-mapped when it is asked for."""

    def __init__(self, files: Mapping[str, Path], parts: Mapping[str, StoredPart] | None = None) -> None:
        """`files`: the file of each tensor name; `parts`: what to read there, where that is not a tensor so named."""
        self._files = dict(files)
        self._parts = dict(parts or {})
        self._open: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header alone."""
        part, shape = self._part(name), tuple(self._slice(name).get_shape())
        rows, *columns = shape if part.index is None else shape[1:]
        return (len(range(rows)[part.start : part.stop]), *columns) if not part.whole else shape

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's type (`F32`, `BF16`, `F8_E4M3`, …), read from the header alone."""
        return str(self._slice(name).get_dtype())

    def without(self, names: Collection[str]) -> "LazyTensors":
        """The same files without some names."""
        files = {name: path for name, path in self._files.items() if name not in names}
        return LazyTensors(files, self._parts)

    def divided(self, parts: Mapping[str, StoredPart]) -> "LazyTensors":
        """The same files with `parts` in place of the tensors that these are of; all must be there."""
        files = self.without({part.stored for part in parts.values()})._files
        files |= {name: self._files[part.stored] for name, part in parts.items()}
        return LazyTensors(files, parts)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._read(name, self._part(name))
        except safetensors.SafetensorError as error:  # a type that torch has not, an axis that is not there
            path = self._files[name]
            raise SourceError(f"{path}: {name}", f"cannot be read ({error})", _ONE_COPY) from error

    def _read(self, name: str, part: StoredPart) -> Tensor:
        tensor: Tensor
        if part.whole:
            tensor = self._handle(name).get_tensor(part.stored)
        elif part.index is None:
            tensor = self._slice(name)[part.start : part.stop]
        else:
            tensor = self._slice(name)[part.index : part.index + 1, part.start : part.stop][0]
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _part(self, name: str) -> StoredPart:
        return self._parts.get(name, StoredPart(name))

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(self._part(name).stored)

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
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    raise SourceError(
        str(folder),
        "holds no safetensors weights" if not files else "holds several safetensors files and no index",
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


def rising_ids(ids: Tensor, rows: int, name: str) -> Tensor:
    """Ids that pick some of `rows` rows, int64 `[D]`; raises `SourceError` unless they rise within them."""
    if ids.dim() != 1 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        rule = f"must be a list of ids, and is {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
        raise SourceError(name, rule, _ONE_COPY)
    ids = ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise SourceError(name, f"reaches from {ids.min()} to {ids.max()}, ids are 0 to {rows - 1}", _ONE_COPY)
    if bool((ids.diff() <= 0).any()):
        raise SourceError(name, "must rise, each id once", _ONE_COPY)
    return ids


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
        Path(path).touch()
        mode = Path(path).stat().st_mode  # as the umask has it; the library's file is its owner's alone
        safetensors.torch.save_file(plain, str(path), metadata={"format": "pt"})
        Path(path).chmod(mode)
    except (safetensors.SafetensorError, OSError) as error:  # the former for a full disk too
        fix = "choose an output folder with space and write permission"
        raise OutputError(str(path), f"cannot be written ({error})", fix) from error


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a folder's weights: one file, or shards of about `SHARD_BYTES` and their index.

    Tensors are taken one by one, and no more than a shard of them is in memory.
    """
    files: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        write_tensors(folder / f"{len(files)}.part", part)
        files.append(list(part))
        part.clear()

    for name, tensor in tensors:
        if part and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        part[name] = tensor
        size += tensor.nbytes
    flush()
    count = len(files)
    named = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(named):
        (folder / f"{i}.part").rename(folder / name)
    if count > 1:
        write_index(folder, {name: file for file, names in zip(named, files, strict=True) for name in names})


def write_index(folder: Path, where: Mapping[str, str]) -> None:
    """Write the index of shards: `where` names the file of every tensor."""
    files = {file: read_tensors(folder / file) for file in set(where.values())}
    size = sum(files[file][name].nbytes for name, file in where.items())
    body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _open(path: Path) -> Any:
    require_regular(path, SourceError, _ONE_COPY)
    try:
        return safetensors.safe_open(str(path), framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise SourceError(str(path), f"is not a readable safetensors file ({error})", _ONE_COPY) from error


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names = read_json(index, SourceError, _ONE_COPY)["weight_map"]
        items = [(str(tensor), str(file)) for tensor, file in names.items()]
    except (KeyError, AttributeError) as error:
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
