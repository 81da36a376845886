"""Where a result comes from and how it reaches the disk: digests, versions, the machine, writes without halves."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
import errno
import fcntl
import hashlib
from importlib import metadata
import json
import os
from pathlib import Path
import platform
import shutil
from typing import BinaryIO

from qspec.errors import OutputError

PACKAGES = (
    "qspec",
    "torch",
    "transformers",
    "tokenizers",
    "compressed-tensors",
    "llmcompressor",
    "lm-eval",
    "optimum",
    "safetensors",
)
"""Distributions whose version can change a number in a report."""

INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
"""CPU flags that decide which kernels run, spelled as in /proc/cpuinfo (x86 `flags`, Arm `Features`)."""
_LEFTOVERS = ("partial", "previous")
"""Endings of hidden names: what is being written, and what a new folder replaces."""


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of a file's bytes, read in chunks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_folder(folder: Path) -> str:
    """Hex sha256 over the names and bytes of every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return digest_of({path.relative_to(folder).as_posix(): sha256_file(path) for path in files})


def digest_of(value: object) -> str:
    """Hex SHA-256 of a value of JSON types, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def environment() -> dict[str, str]:
    """Conditions of a measurement: interpreter, library versions, CPU, threads and, if there is one, the GPU."""
    import torch

    cpu, flags = _cpu()
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {package: package_version(package) for package in PACKAGES}
    facts |= {"cpu": cpu, "instruction_sets": " ".join(flags), "cores": str(usable_cores())}
    facts["threads"] = str(torch.get_num_threads())
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return facts


def require_writable(folder: str | Path) -> Path:
    """Refuse a folder that cannot be made and written to: raises `OutputError`. Makes nothing.

    Returns the folder, or the nearest one above it that exists.
    """
    path = Path(folder)
    with _output_errors(path):
        existing = path.absolute()
        while not (existing.exists() or existing.is_symlink()):
            existing = existing.parent
    if not existing.is_dir():
        raise OutputError(str(path), f"cannot be made ({existing} is no folder)", "choose another output folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        rule = f"cannot be written ({existing} takes no new files)"
        raise OutputError(str(path), rule, "choose an output folder with write permission")
    return existing


def require_file(path: str | Path) -> None:
    """Refuse a path that no file can be written to: raises `OutputError`. Makes nothing."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a folder, or a device that would be replaced by a file
        raise OutputError(str(path), "exists and is no file", "give another path")
    require_writable(path.parent)


def require_space(path: str | Path, size: int) -> None:
    """Refuse to start writing `size` bytes under `path` when its disk has less room; raises `OutputError`."""
    free = shutil.disk_usage(require_writable(path)).free
    if free < size:
        rule = f"needs {size / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free"
        raise OutputError(str(path), rule, "free some space or choose an output folder on another disk")


def atomic_write(path: str | Path, content: bytes | str, scratch: Path | None = None) -> None:
    """Write a whole file or nothing (text as UTF-8); makes missing parent folders. Raises `OutputError`."""
    with atomic_file(path, scratch) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: str | Path, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A file that takes its place when the block ends, and vanishes when the block raises. Raises `OutputError`.

    scratch: folder on the same disk in which the file is written; None: the file's own.
    """
    path = Path(path)
    part = (scratch or path.parent) / f".{path.name}.partial"
    with _output_errors(path):
        require_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                yield file
            commit(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def commit(part: Path, final: Path) -> None:
    """Give a file, or a folder with all that it holds, its final name, under which a power cut leaves it whole.

    Bytes reach the disk first, then the names inside, the new name last.
    """
    for path in (*sorted(part.rglob("*"), reverse=True), part):
        _sync(path)
    part.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. File systems that cannot do so for folders are trusted."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged_dir(final: str | Path) -> Iterator[Path]:
    """An empty folder beside `final` that takes its place when the block ends, and vanishes when the block raises.

    Readers never see half of a folder. They see none for a moment where a new one replaces an old one, and `restore`
    puts the old one back if the process was killed then; a folder that others read is replaced by `add_version`. What a
    killed process left is cleaned up by the next call. One writer per folder. A full disk raises `OutputError`.
    """
    final = Path(final)
    part, previous = (final.with_name(f".{final.name}.{suffix}") for suffix in _LEFTOVERS)
    with _output_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        restore(final)
        part.mkdir()
    try:
        with _output_errors(final, only=(errno.ENOSPC, errno.EDQUOT)):
            yield part
        with _output_errors(final):
            _swap(part, final, previous)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def restore(final: Path) -> None:
    """Take away what a killed `staged_dir` left beside `final`, and put back the old folder if there is no new one."""
    part, previous = (final.with_name(f".{final.name}.{suffix}") for suffix in _LEFTOVERS)
    if previous.exists() and not final.exists():
        previous.rename(final)
    for leftover in (part, previous):
        if leftover.exists():
            shutil.rmtree(leftover)


def is_leftover(path: Path) -> bool:
    """Whether a writer that was killed left this path half-written; the next writer takes its place."""
    return path.name.startswith(".") and path.name.endswith(tuple(f".{suffix}" for suffix in _LEFTOVERS))


def add_version(parent: Path, source: Path) -> Path:
    """Copy the folder `source` to one below `parent` that is named for what it holds; returns that folder.

    This is how part of a finished folder changes: nothing that is there is touched, and a new version counts from the
    moment at which `atomic_write` replaces a file that names it. A process that is killed leaves the old whole or the
    new one, and versions that nothing names: readers ignore them, and the next change begins with `drop_unnamed`. Until
    then who had begun to read the old version goes on to find it.
    """
    digest = sha256_folder(source)
    version = parent / digest[:16]
    if not (version.is_dir() and sha256_folder(version) == digest):
        with staged_dir(version) as part:
            shutil.copytree(source, part, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return version


def drop_unnamed(parent: Path, named: Collection[Path]) -> None:
    """Remove the files below `parent` that are not `named`, and folders that are empty then."""
    for path in sorted(parent.rglob("*"), reverse=True):  # what a folder holds before the folder
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in named:
            path.unlink()


@contextmanager
def sole_writer(folder: str | Path) -> Iterator[None]:
    """Refuse a second job in a folder, which is made, for as long as a block lasts; raises `OutputError`.

    The system frees it when a process ends, however it ends. File systems that know no locks are trusted.
    """
    require_writable(folder)
    with _output_errors(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            _lock(lock, folder)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int, folder: str | Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fix = "wait until it ends, or choose another --out"
        raise OutputError(str(folder), "is written by another qspec that runs now", fix) from None


def _swap(part: Path, final: Path, previous: Path) -> None:
    if final.exists():
        final.rename(previous)
    try:
        commit(part, final)
    except OSError:
        if previous.exists():
            previous.rename(final)
        raise
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def _output_errors(path: Path, only: tuple[int, ...] = ()) -> Iterator[None]:
    """Turn `OSError` (with `only`: of these numbers) into `OutputError` about `path`."""
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        rule = f"cannot be written ({error.strerror or error})"
        raise OutputError(str(path), rule, "choose an output folder with space and write permission") from error


def package_version(package: str) -> str:
    """Version of an installed distribution, or that there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """Model name and the watched instruction sets; where there is no `/proc/cpuinfo`, the name alone."""
    if not cpuinfo.exists():
        return platform.processor() or platform.machine(), []
    first_core = cpuinfo.read_text().split("\n\n")[0]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first_core.splitlines())}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", platform.machine()), [name for name in INSTRUCTION_SETS if name in flags]
