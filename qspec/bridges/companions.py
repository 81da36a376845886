"""Files beside a model's weights travel with it byte for byte: sampling defaults, templates, processors, licences.

Weights, code and pickled data stay behind, and what is too large, or no plain file of the folder; each with its reason.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
import shutil
import stat

from qspec.bridges import sidecar
from qspec.bridges.tensors import weight_files

CARD, SOURCE_CARD = "README.md", "README.source.md"
"""A README of the source, and its name beside other weights, whose card it must not become."""
NOTICES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
"""Beginnings of the names of files that have to travel with weights."""
MOST_FILES, MOST_BYTES, MOST_TOTAL = 200, 64 << 20, 256 << 20
"""Bounds: files, bytes of one (the largest tokenizers have 35 MB), bytes of all."""
_MOST_ENTRIES = 10_000
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5", ".msgpack"),
    *(".gguf", ".ggml", ".onnx", ".onnx_data", ".ot", ".tflite", ".pb", ".joblib", ".engine", ".distcp", ".nemo"),
)
_INDEX = (".safetensors.index.json", ".bin.index.json")
_CODE = (".py", ".pyc", ".so", ".sh", ".ipynb", ".js", ".dll", ".exe", ".bat", ".ps1", ".jar", ".cu", ".cpp", ".c")
_OTHER_MODEL = ("adapter_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files by which libraries find adapters, or weights that somebody else has quantized."""
_MODEL = ("config.json", "pair.json", "adapter_config.json")
_MAGIC = {
    b"\x80\x02": "pickled data",
    b"\x80\x03": "pickled data",
    b"\x80\x04": "pickled data",
    b"\x80\x05": "pickled data",
    b"PK\x03\x04": "an archive",
    b"\x1f\x8b": "an archive",
    b"\x7fELF": "code",
    b"#!": "code",
    b"GGUF": "weights",
    b"\x89HDF": "weights",
}
_NESTED = "a folder in a folder"
_NAMED = 20
"""Names that a note lists for one reason."""


@dataclass(frozen=True)
class Companions:
    """`files`: path by the name that a copy gets, relative; `left_out`: reason by name."""

    files: Mapping[str, Path] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def companions(folder: Path) -> Companions:
    """The files of a checkpoint's folder that travel with it; its configuration and weights are written anew."""
    return _beside(folder, {"config.json", sidecar.NAME, *(path.name for path in weight_files(folder))})


def notices(folder: Path) -> Companions:
    """Licences and notices alone, of a folder whose other files may belong to other models."""
    files = _beside(folder, ()).files
    return Companions({name: path for name, path in files.items() if name.upper().startswith(NOTICES)})


def _beside(folder: Path, own: Collection[str]) -> Companions:
    """A snapshot of the Hub's cache consists of links into that cache, which count as files of the folder."""
    root = folder.parent.parent if folder.parent.name == "snapshots" else folder
    left_out, sizes = dict[str, str](), dict[str, int]()
    for name, path in islice(_entries(folder), _MOST_ENTRIES):
        if name in own:
            continue
        reason = _obstacle(path, root.resolve())
        if reason is None:
            sizes[name] = path.stat().st_size
        else:
            left_out[name] = reason
    kept, beyond = sort_out(sizes)
    left_out |= beyond
    files = dict[str, Path]()
    for name in sorted(kept):
        if packed := _packed(folder / name):
            left_out[name] = packed
        elif (new := SOURCE_CARD if name.lower() == CARD.lower() else name) in files:
            left_out[name] = f"its name is {new} already"
        else:
            files[new] = folder / name
    return Companions(files, left_out)


def sort_out(sizes: Mapping[str, int]) -> tuple[list[str], dict[str, str]]:
    """Names that may travel, by name and size (bytes) alone, and reasons for the others. The smallest come first."""
    paths = {name: PurePosixPath(name) for name in sizes}
    models = {path.parts[0] for path in paths.values() if len(path.parts) > 1 and path.name in _MODEL}
    kept, left_out, total = list[str](), {f"{folder}/": "another model" for folder in models}, 0
    for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        if len(paths[name].parts) > 1 and paths[name].parts[0] in models:
            continue
        reason = _named(paths[name], size)
        if reason is None and (len(kept) >= MOST_FILES or total + size > MOST_TOTAL):
            reason = f"beyond {MOST_FILES} files or {MOST_TOTAL >> 20} MiB"
        if reason is None:
            kept.append(name)
            total += size
        else:
            left_out[name] = reason
    return kept, left_out


def copy(files: Mapping[str, Path], folder: Path) -> None:
    """Copy companions into a checkpoint's folder; a file that is there already stays."""
    for name, path in files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def left_out_notes(left_out: Mapping[str, str]) -> list[str]:
    """A sentence for a report, naming what stays behind; none where everything comes along."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(left_out.items()):
        by_reason.setdefault(reason, []).append(name if name.isprintable() else ascii(name))
    parts = []
    for reason, names in sorted(by_reason.items()):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        parts.append(f"{', '.join(names[:_NAMED])}{more} ({reason})")
    return [f"Files of the source that do not come along: {'; '.join(parts)}."] if parts else []


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Entries of a folder and of its subfolders; deeper folders as a whole."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from ((f"{path.name}/{inner.name}", inner) for inner in sorted(path.iterdir()))
        else:
            yield path.name, path


def _obstacle(path: Path, root: Path) -> str | None:
    """Why an entry is no file of its folder."""
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(root):
            return "a link out of the folder"
        mode = path.stat().st_mode
    except (OSError, RuntimeError):  # nothing is there, or a ring of links
        return "a broken link"
    if stat.S_ISDIR(mode):
        return "hidden" if path.name.startswith(".") else "a link to a folder" if path.is_symlink() else _NESTED
    return None if stat.S_ISREG(mode) else "no plain file"


def _named(path: PurePosixPath, size: int) -> str | None:
    """Why a file does not travel, by its name and size."""
    name = path.name.lower()
    rules = (
        (not str(path).isprintable() or "\\" in str(path), "an unusual name"),
        (any(part.startswith(".") for part in path.parts), "hidden"),
        (len(path.parts) > 2, _NESTED),
        (name in _OTHER_MODEL, "of other weights"),
        (name.endswith(_WEIGHTS), "weights"),
        (name.endswith(_INDEX), "an index of weights"),
        (name.endswith(_CODE), "code"),
        (size > MOST_BYTES, f"larger than {MOST_BYTES >> 20} MiB"),
    )
    return next((reason for applies, reason in rules if applies), None)


def _packed(path: Path) -> str | None:
    """Kind of a file whose first bytes say that it is no text, whatever its name."""
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError:
        return "cannot be read"
    return next((kind for magic, kind in _MAGIC.items() if begin.startswith(magic)), None)
