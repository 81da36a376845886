"""The cache of the C++ core: what is loaded was compiled here, whole, by this user; a build that fails says why."""

import ctypes
import os
from pathlib import Path
import platform
import shlex
import stat
import subprocess
import sys
import time

import pytest

from qspec.errors import OutputError
from qspec.nn.cpp import interface as native_interface
from qspec.nn.cpp.offload import packed_path
from qspec.ops import native_library
from qspec.ops.native_library import NoLibrary, digest_file, library, library_name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small core of one function, and a cache folder that nothing has been compiled into."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n')
    monkeypatch.setattr(native_library, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if native_library.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return tmp_path / "cache" / "qspec"


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Let `$CXX` be a shell script; `$REAL` in it is the compiler of this machine."""
    path, real, command = tmp_path / "c++", tmp_path / "real", native_library.compiler()
    assert command is not None
    real.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
    real.chmod(0o755), path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def compiling() -> "subprocess.Popen[str]":
    """A process that prints the path of the library. It has the module alone, as the build hook: no torch, no qspec."""
    code = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("alone", {native_library.__file__!r})
alone = module_from_spec(spec)
spec.loader.exec_module(alone)
alone.SOURCES = alone.Path({str(native_library.SOURCES)!r})
print(alone.library())
"""
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, cwd="/")


def one(made: Path) -> int:
    return int(ctypes.CDLL(str(made)).one())


def test_a_library_is_compiled_once_into_a_private_folder(cache: Path):
    """Would catch a cache that others may read or write, and a library that is compiled at each start."""
    made = library()
    assert (made.parent, made.name, one(made)) == (cache, library_name(), 1)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert sorted(path.name for path in cache.iterdir()) == sorted([made.name, digest_file(made).name])
    born = made.stat().st_mtime_ns
    assert library().stat().st_mtime_ns == born


@pytest.mark.parametrize("damage", ["cut", "changed", "no digest", "cut digest", "empty"])
def test_a_damaged_library_is_compiled_anew(cache: Path, damage: str):
    """Would catch a library of half its bytes that is loaded: the process ends with a bus error, no message."""
    made = library()
    content, digest = made.read_bytes(), digest_file(made)
    made.unlink()  # a new file: the loader still has the old one mapped
    made.write_bytes({"cut": content[:5000], "changed": content[:-1] + b"x", "empty": b""}.get(damage, content))
    if damage == "no digest":
        digest.unlink()
    if damage == "cut digest":
        digest.write_text(digest.read_text()[:20])
    assert library() == made
    assert made.read_bytes() == content
    assert native_library._is_whole(made)


def test_a_damaged_library_of_a_wheel_is_not_loaded(cache: Path):
    """Would catch a check of the cache alone: a wheel that was unpacked to a full disk ends in a bus error too."""
    shipped = native_library.build(native_library.SOURCES)
    assert library() == shipped
    shipped.unlink()
    shipped.write_bytes(b"\x7fELF")
    assert library() == cache / shipped.name


def test_a_folder_that_others_may_write_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch code of another user that is loaded into this process: by its library or by its packed layers."""
    cache.mkdir(parents=True)
    for mode in (0o777, 0o1777, 0o770):
        cache.chmod(mode)
        with pytest.raises(NoLibrary, match=rf"may be written by others \(mode {mode:04o}\); remove it, or set XDG"):
            library()
        with pytest.raises(OutputError, match=r"packed layers have no safe place"):
            packed_path("some")
    cache.chmod(0o755)
    assert library().parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(NoLibrary, match=r"belongs to user .* not to user 4711"):
        library()


def test_a_planted_library_is_not_loaded(cache: Path, tmp_path: Path):
    """Would catch a link to a file elsewhere, or a file that others may change, with a digest that fits."""
    made = library()
    content, elsewhere = made.read_bytes(), tmp_path / "planted.so"
    elsewhere.write_bytes(content)
    made.unlink()
    made.symlink_to(elsewhere)
    assert not library().is_symlink()
    made.chmod(0o666)
    library()
    assert stat.S_IMODE(made.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", "reported success and wrote no one.o; set CXX"),
        ('"$REAL" "$@"; for last; do :; done; : > "$last"', "reported success and wrote no one.o"),
        ("echo 'one.cpp: note: x' >&2; echo 'cc1plus: out of \\303\\244 error: no room' >&2; exit 4", "error: no room"),
        ("exit 7", "failed: exit status 7"),
        ("kill -9 $$", "failed: signal 9"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    script: str, message: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Would catch "the folder cannot be written" for a compiler that wrote nothing, and a message without its cause."""
    compiler(tmp_path, monkeypatch, script)
    with pytest.raises(NoLibrary, match=message):
        library()
    assert list(cache.iterdir()) == []


def test_a_compiler_that_cannot_be_run_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch "the cache folder cannot be written" for a file that is no program."""
    compiler(tmp_path, monkeypatch, "").write_bytes(b"\x00\x01")
    with pytest.raises(NoLibrary, match=r"compiler cannot be run \(Exec format error\)"):
        library()


def test_a_compiler_that_hangs_is_ended_with_its_children(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a start that waits for ever, and compilers that go on when nobody waits for them."""
    pid = tmp_path / "pid"
    compiler(tmp_path, monkeypatch, f"sleep 60 & echo $! > {pid}; wait")
    monkeypatch.setattr(native_library, "TIMEOUT", 0.5)
    with pytest.raises(NoLibrary, match="did not end within"):
        library()
    child, deadline = Path(f"/proc/{pid.read_text().strip()}/stat"), time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"
    assert list(cache.iterdir()) == []


def test_the_compiler_of_a_package_serves_where_there_is_no_other(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Would catch torch's slow kernels where `ziglang` is installed, which knows no flags of GCC alone."""
    real = native_library.compiler()
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"""import os, sys
if {native_library.GCC_FLAGS[0]!r} in sys.argv:
    sys.exit("error: unknown option")
assert sys.argv[1:4] == ["c++", "-target", "{platform.machine()}-linux-gnu.2.17"], sys.argv
command = [*{real!r}, *sys.argv[4:]]
os.execve(command[0], command, {{**os.environ, "PATH": {os.environ["PATH"]!r}}})
"""
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    assert one(native_library.library()) == 1


def test_remains_of_killed_compiles_go(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a folder of sources and objects that each killed start leaves in the cache for good."""
    compiler(tmp_path, monkeypatch, "sleep 60")
    with compiling() as process:
        deadline = time.monotonic() + 20
        while not list(cache.glob("build-*/*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert list(cache.glob("build-*"))
    monkeypatch.delenv("CXX")
    made = library()
    assert sorted(cache.iterdir()) == sorted([made, digest_file(made)])


def test_two_that_compile_at_once_end_with_one_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch two builds that write over each other, a library of one with the digest of the other."""
    calls = tmp_path / "calls"
    compiler(tmp_path, monkeypatch, f'echo >> {calls}; sleep 0.2; exec "$REAL" "$@"')
    running = [compiling(), compiling()]
    answers = [process.communicate(timeout=60)[0].strip() for process in running]
    assert answers == [str(cache / library_name())] * 2
    assert one(Path(answers[0])) == 1
    assert len(calls.read_text().splitlines()) == 2  # one compile, one link


def test_one_that_compiles_for_ever_does_not_hold_others(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a stopped process that keeps every later start waiting."""
    cache.mkdir(parents=True)
    monkeypatch.setattr(native_library, "TIMEOUT", 0.1)
    with native_library._sole_builder(cache), pytest.raises(NoLibrary, match="another process has been compiling"):
        library()


def test_a_user_without_a_home_is_answered(monkeypatch: pytest.MonkeyPatch):
    """Would catch the traceback of a container's user that has no entry."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native_library.Path, "home", no_home)
    with pytest.raises(NoLibrary, match="has no home folder; set XDG_CACHE_HOME"):
        library()


def test_a_failed_build_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a compiler that fails again, for as long as it takes, at each model that is opened."""
    calls = tmp_path / "calls"
    compiler(tmp_path, monkeypatch, f"echo >> {calls}; exit 1")
    native_interface._library.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(NoLibrary, match="exit status 1"):
                native_interface.library()
    finally:
        native_interface._library.cache_clear()
    assert len(calls.read_text().splitlines()) == 1


def test_a_library_of_other_functions_is_named(monkeypatch: pytest.MonkeyPatch):
    """Would catch an `AttributeError` for a library that was compiled, but is none of ours."""
    native_interface._library.cache_clear()
    try:
        with pytest.raises(NoLibrary, match=r"cannot be loaded \(.*undefined symbol: qspec_isa\)"):
            native_interface.library()
    finally:
        native_interface._library.cache_clear()
