"""The C++ core as a shared library: found beside its sources, or compiled once into a cache folder.

A wheel that was built where there is a C++ compiler holds the library (`hatch_build.py`); an editable checkout, or a
wheel built without one, compiles at first use. Names carry a digest of the sources and the flags, so that a library
never belongs to other sources. Instruction sets are chosen at run time: one library fits every CPU of an architecture.
Only the standard library is imported here, because the build hook runs without torch.
"""

from collections.abc import Sequence
import hashlib
import os
from pathlib import Path
import platform
import shutil
import subprocess
import sys
import tempfile

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fno-tree-pre",  # GCC would peel the first turn off each inner loop and then spill its accumulators
    "-fno-tree-reassoc",  # nor keep products beside them, to add up later
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # sums are what the source says, on every compiler
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
UNIT_FLAGS = {
    "kernels_avx2.cpp": AVX2,
    "kernels_avx512.cpp": AVX512,
    "kernels_amx.cpp": (*AVX512, "-mamx-tile", "-mamx-int8"),
}
"""Flags of single files, on x86-64 only; a file whose flags the compiler lacks becomes empty."""


class NoLibrary(Exception):
    """There is no library and none can be made; the message says why."""


def library() -> Path:
    """Path of the library for these sources; compiles it if need be. Raises `NoLibrary`."""
    name = library_name()
    for folder in (SOURCES, cache_folder()):
        if (folder / name).exists():
            return folder / name
    return build(cache_folder())


def library_name(sources: Path = SOURCES) -> str:
    """File name with a digest of what the library is made from."""
    digest = hashlib.sha256(repr((FLAGS, UNIT_FLAGS, platform.machine(), sys.platform)).encode())
    for path in _sources(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"qspec-{digest.hexdigest()[:16]}.so"


def _sources(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def cache_folder() -> Path:
    """Where libraries made at first use lie: `$XDG_CACHE_HOME/qspec`, by default `~/.cache/qspec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qspec"


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, or the first usual one on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path) -> Path:
    """Compile the library into `folder`, whole or not at all, from a copy: its name is of what was compiled.

    Raises `NoLibrary`.
    """
    cxx = compiler()
    if cxx is None or sys.platform not in ("linux", "darwin"):
        raise NoLibrary("there is no C++ compiler (c++, g++ or clang++)" if cxx is None else f"no {sys.platform} build")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            copied = Path(scratch)
            for source in _sources(SOURCES):
                shutil.copy(source, copied)
            return _compile(cxx, copied).replace(folder / library_name(copied))
    except OSError as error:
        raise NoLibrary(f"{folder} cannot be written ({error.strerror})") from error


def _compile(cxx: str, folder: Path) -> Path:
    sources = sorted(folder.glob("*.cpp"))
    objects = [source.with_suffix(".o") for source in sources]
    commands = [
        [cxx, *FLAGS, *unit_flags(cxx, source.name), "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    run_all(commands)
    made = folder / "library.so"
    run_all([[cxx, "-shared", "-pthread", *map(str, objects), "-o", str(made)]])
    return made


def unit_flags(cxx: str, name: str) -> tuple[str, ...]:
    """A file's own flags, if this compiler knows them all."""
    flags = UNIT_FLAGS.get(name, ()) if platform.machine() in ("x86_64", "AMD64") else ()
    known = not flags or not subprocess.run([cxx, *flags, "-E", "-xc++", os.devnull], capture_output=True).returncode
    return flags if known else ()


def run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; raises `NoLibrary` with the first error line if one fails."""
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [process.communicate()[1] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            first = next((line for line in text.splitlines() if "error" in line), text.strip()[:200])
            raise NoLibrary(f"the C++ compiler failed: {first}")
