"""The C++ core as a shared library: found beside its sources, or compiled once into a cache folder.

A wheel that was built where there is a C++ compiler holds the library (`hatch_build.py`); an editable checkout, or a
wheel built without one, compiles at first use. Names carry a digest of the sources and the flags, so that a library
never belongs to other sources. Its SHA-256 lies beside it, written last: only a library with the bytes that the
compiler wrote is loaded, out of a folder that nobody else may write. Instruction sets are chosen at run time: one
library fits every CPU of an architecture. Only the standard library is imported here, because the build hook runs
without torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
import fcntl
import hashlib
import importlib.util
import os
from pathlib import Path
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

SOURCES = Path(__file__).parents[1] / "native"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # sums are what the source says, on every compiler
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
GCC_FLAGS = (
    "-fno-tree-pre",  # GCC would peel the first turn off each inner loop and then spill its accumulators
    "-fno-tree-reassoc",  # nor keep products beside them, to add up later
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
UNIT_FLAGS = {
    "kernels_avx2.cpp": AVX2,
    "kernels_avx512.cpp": AVX512,
    "kernels_amx.cpp": (*AVX512, "-mamx-tile", "-mamx-int8"),
}
"""Flags of single files, on x86-64 only; a file whose flags the compiler lacks becomes empty."""
GLIBC = "2.17"
"""The C library that the `ziglang` package builds for: that of manylinux2014, which every present Linux fits."""
TIMEOUT = 600.0
"""Seconds that one build may take, and that another process waits for it; minutes pass on a slow, busy machine."""
_SCRATCH = "build-"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoLibrary(Exception):
    """There is no library and none can be made; the message says why."""


def library() -> Path:
    """Path of the library for these sources; compiles it if need be. Raises `NoLibrary`."""
    shipped = SOURCES / library_name()
    if _is_whole(shipped):
        return shipped
    folder = private_cache()
    made = folder / shipped.name
    if _is_own(made) and _is_whole(made):
        return made
    with _sole_builder(folder):
        return made if _is_own(made) and _is_whole(made) else build(folder)


def library_name(sources: Path | None = None) -> str:
    """File name with a digest of what the library is made from."""
    digest = hashlib.sha256(repr((FLAGS, GCC_FLAGS, UNIT_FLAGS, platform.machine(), sys.platform)).encode())
    for path in _sources(SOURCES if sources is None else sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"qspec-{digest.hexdigest()[:16]}.so"


def digest_file(made: Path) -> Path:
    """Where the SHA-256 of a library lies; only a library that has it is loaded."""
    return made.with_name(f"{made.name}.sha256")


def _sources(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def _is_whole(made: Path) -> bool:
    """Whether a library has the bytes that its compiler wrote: loading a part of one ends in a bus error."""
    try:
        return digest_file(made).read_text() == _digest(made)
    except (OSError, ValueError):
        return False


def _digest(made: Path) -> str:
    return hashlib.sha256(made.read_bytes()).hexdigest()


def _is_own(made: Path) -> bool:
    """Whether a library is a plain file that this user made and nobody else may write."""
    try:
        facts = made.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & _OTHERS_WRITE


def cache_folder() -> Path:
    """Path for what is made at first use: `$XDG_CACHE_HOME/qspec`, by default `~/.cache/qspec`. Raises `NoLibrary`."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qspec"
    except RuntimeError as error:  # a user without an entry, as containers have
        raise NoLibrary("this user has no home folder; set XDG_CACHE_HOME to a folder of your own") from error


def private_cache() -> Path:
    """The cache folder, made if need be, for this user alone (mode 0700).

    Raises `NoLibrary` for a folder of another user, or one that others may write to: what lies there may be theirs.
    """
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if facts.st_uid != os.geteuid():
            why = f"belongs to user {facts.st_uid}, not to user {os.geteuid()}"
            raise NoLibrary(f"{folder} {why}; set XDG_CACHE_HOME to a folder of your own")
        if facts.st_mode & _OTHERS_WRITE:
            why = f"may be written by others (mode {stat.S_IMODE(facts.st_mode):04o})"
            raise NoLibrary(f"{folder} {why}; remove it, or set XDG_CACHE_HOME to a folder of your own")
        if stat.S_IMODE(facts.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise NoLibrary(f"{folder} cannot be written ({error.strerror})") from error
    return folder


def compiler() -> tuple[str, ...] | None:
    """Command of the C++ compiler: `$CXX`, the first usual one on the path, or that of the `ziglang` package."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    path = next((path for name in names if name and (path := shutil.which(name))), None)
    return (path,) if path is not None else zig(platform.machine())


def zig(machine: str) -> tuple[str, ...] | None:
    """Command of the compiler in the `ziglang` package, for Linux on `machine`; None where it is not installed."""
    if sys.platform != "linux" or importlib.util.find_spec("ziglang") is None:
        return None
    return (sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{GLIBC}")


def build(folder: Path, cxx: Sequence[str] | None = None) -> Path:
    """Compile the library into `folder`, whole or not at all, from a copy: its name is of what was compiled.

    cxx: command of the compiler; None: that of `compiler`. One process at a time may build in a folder; what killed
    ones left there is removed. Raises `NoLibrary`.
    """
    cxx = compiler() if cxx is None else cxx
    if cxx is None or sys.platform not in ("linux", "darwin"):
        lacking = "there is no C++ compiler (c++, g++ or clang++); pip install ziglang brings one"
        raise NoLibrary(lacking if cxx is None else f"no {sys.platform} build")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remains in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(remains)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
            copied = Path(scratch)
            for source in _sources(SOURCES):
                shutil.copy(source, copied)
            made = _compile(cxx, copied)
            return _install(made, folder / library_name(copied))
    except OSError as error:
        raise NoLibrary(f"{folder} cannot be written ({error.strerror})") from error


def _install(made: Path, final: Path) -> Path:
    """Move a library and then its digest to their places; between the two it counts as not there."""
    digest = digest_file(made)
    digest.write_text(_digest(made))
    for path in (made, digest):
        path.chmod(0o644)
    digest_file(final).unlink(missing_ok=True)
    made.replace(final)
    digest.replace(digest_file(final))
    return final


@contextmanager
def _sole_builder(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in a folder. File systems that know no locks are trusted.

    Raises `NoLibrary` when another one takes longer than a build may.
    """
    lock, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + TIMEOUT
    try:
        with suppress(OSError):
            while not _locked(lock):
                if time.monotonic() > deadline:
                    raise NoLibrary(f"another process has been compiling in {folder} for {TIMEOUT:.0f} s; end it")
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(cxx: Sequence[str], folder: Path) -> Path:
    deadline, sources = time.monotonic() + TIMEOUT, sorted(folder.glob("*.cpp"))
    objects = [source.with_suffix(".o") for source in sources]
    common = FLAGS if "ziglang" in cxx else (*FLAGS, *GCC_FLAGS)  # clang passes those over, zig refuses them
    commands = [
        [*cxx, *common, *unit_flags(cxx, source.name), "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    run_all(commands, deadline)
    _require_written(cxx, objects)
    made = folder / "library.so"
    run_all([[*cxx, "-shared", "-pthread", *map(str, objects), "-o", str(made)]], deadline)
    _require_written(cxx, [made])
    return made


def _require_written(cxx: Sequence[str], files: Sequence[Path]) -> None:
    for made in files:
        if not made.is_file() or not made.stat().st_size:
            raise NoLibrary(
                f"the C++ compiler {cxx[0]} reported success and wrote no {made.name}; set CXX to another one"
            )


def unit_flags(cxx: Sequence[str], name: str) -> tuple[str, ...]:
    """A file's own flags, if this compiler knows them all."""
    flags = UNIT_FLAGS.get(name, ()) if platform.machine() in ("x86_64", "AMD64") else ()
    try:
        if flags:
            run_all([[*cxx, *flags, "-E", "-xc++", os.devnull, "-o", os.devnull]])
    except NoLibrary:
        return ()
    return flags


def run_all(commands: Sequence[Sequence[str]], deadline: float | None = None) -> None:
    """Run commands side by side, until `time.monotonic()` is `deadline`; none outlives the call.

    Raises `NoLibrary` with the first error line of one that fails.
    """
    deadline = time.monotonic() + TIMEOUT if deadline is None else deadline
    running = list[subprocess.Popen[str]]()
    try:
        for command in commands:
            running.append(_started(command))
        for process in running:
            _, text = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode:
                raise NoLibrary(f"the C++ compiler failed: {_reason(process.returncode, text)}")
    except subprocess.TimeoutExpired as error:
        raise NoLibrary(f"the C++ compiler {error.cmd[0]} did not end within {TIMEOUT:.0f} s") from error
    except OSError as error:
        raise NoLibrary(f"the C++ compiler cannot be run ({error.strerror})") from error
    finally:
        for process in running:
            _end(process)


def _started(command: Sequence[str]) -> "subprocess.Popen[str]":
    """A command in a process group of its own, with English messages."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )


def _reason(status: int, text: str) -> str:
    """The line of a compiler's messages that says why it failed; its exit status where it said nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else ended)[:300]


def _end(process: "subprocess.Popen[str]") -> None:
    """End a compiler with the programs that it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stderr is not None:
        process.stderr.close()
