import errno
import hashlib
import os
from pathlib import Path
import subprocess
import sys

import pytest

from qspec import provenance
from qspec.errors import OutputError
from qspec.provenance import (
    add_version,
    atomic_file,
    atomic_write,
    drop_unnamed,
    environment,
    is_leftover,
    require_file,
    require_space,
    require_writable,
    sha256_file,
    staged_dir,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_sha256_file_covers_every_byte(tmp_path):
    """Would catch a digest over the first chunk only."""
    content = os.urandom(3 << 20) + b"tail"
    (tmp_path / "f").write_bytes(content)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def test_environment_names_what_numbers_depend_on():
    """Would catch a report without library versions, CPU or thread count, or a value that JSON cannot hold."""
    facts = environment()
    assert set(provenance.PACKAGES) <= set(facts)
    assert {"python", "cpu", "instruction_sets", "cores", "threads"} <= set(facts)
    assert all(isinstance(value, str) for value in facts.values())
    assert facts["torch"].startswith("2.")


def test_environment_imports_no_heavy_library():
    """Would catch reading a version through `import transformers`, which costs seconds."""
    code = (
        "import sys; from qspec.provenance import environment; environment();"
        "print(sorted({'transformers', 'llmcompressor', 'lm_eval', 'optimum', 'datasets'} & set(sys.modules)))"
    )
    root = Path(provenance.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_of_a_missing_package_is_said(monkeypatch):
    """Would catch a crash, or a silent gap, when an optional library is absent."""
    monkeypatch.setattr(provenance, "PACKAGES", ("no-such-package",))
    assert environment()["no-such-package"] == "not installed"


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        (
            "processor\t: 0\nmodel name\t: A CPU @ 2: fast\nflags\t\t: fpu avx2 avx512f amx_int8\n\nprocessor\t: 1\n",
            "A CPU @ 2: fast",
            ["avx2", "avx512f", "amx_int8"],
        ),
        ("processor\t: 0\nFeatures\t: fp asimddp i8mm\n", None, ["asimddp", "i8mm"]),
    ],
)
def test_cpu_of_x86_and_arm(tmp_path, text, name, flags):
    """Would catch cutting a model name at its colon, or looking for x86 `flags` on Arm."""
    (tmp_path / "cpuinfo").write_text(text)
    found, sets = provenance._cpu(tmp_path / "cpuinfo")
    assert sets == flags
    assert found == name if name else found


def test_cpu_without_cpuinfo(tmp_path):
    """Would catch a crash on macOS and Windows, which have no /proc."""
    name, sets = provenance._cpu(tmp_path / "absent")
    assert name
    assert sets == []


def test_require_space_refuses_what_cannot_fit(tmp_path):
    """Would catch finding the disk full only after hours of compute; the folder itself may not exist yet."""
    require_space(tmp_path / "a" / "b", 1)
    with pytest.raises(OutputError, match="are free"):
        require_space(tmp_path / "a" / "b", 1 << 60)


def test_what_cannot_be_written_is_known_before_it_is(tmp_path, monkeypatch):
    """Would catch a check that makes the folder it asks about, or that looks at another folder than the nearest one."""
    require_writable(tmp_path / "a" / "b")
    require_file(tmp_path / "a" / "page.html")
    assert names(tmp_path) == set()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(OutputError, match=f"b: cannot be written \\({tmp_path} takes no new files\\); choose"):
        require_writable(tmp_path / "a" / "b")
    with pytest.raises(OutputError, match="File name too long"):
        require_writable("x" * 5000)


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    """Would catch a left-over temporary file, changed line ends, or a missing parent folder."""
    path = tmp_path / "new" / "f.txt"
    atomic_write(path, "old")
    atomic_write(path, "é\r\n")
    assert path.read_bytes() == "é\r\n".encode()
    assert names(path.parent) == {"f.txt"}


def test_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    """Would catch a truncated file after a full disk, and an OSError that reaches the user as a traceback."""
    path = tmp_path / "f"
    atomic_write(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"f"}


def test_staged_dir_replaces_the_whole_folder(tmp_path):
    """Would catch mixing files of an older run into a new pair."""
    final = tmp_path / "deep" / "pair"
    for name in ("old", "new"):
        with staged_dir(final) as part:
            (part / name).touch()
    assert names(final) == {"new"}
    assert names(final.parent) == {"pair"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), FileNotFoundError("source")])
def test_staged_dir_that_fails_leaves_the_old_folder(tmp_path, error):
    """Would catch half a pair after Ctrl-C, and errors of the body relabelled as output errors."""
    final = tmp_path / "pair"
    with staged_dir(final) as part:
        (part / "old").touch()
    with pytest.raises(type(error)), staged_dir(final) as part:
        (part / "half").touch()
        raise error
    assert names(final) == {"old"}
    assert names(tmp_path) == {"pair"}


def test_staged_dir_on_a_full_disk(tmp_path):
    """Would catch a traceback instead of one line when the disk fills up while tensors are written."""
    with pytest.raises(OutputError, match="full"), staged_dir(tmp_path / "pair"):
        raise OSError(errno.ENOSPC, "full")
    assert names(tmp_path) == set()


def test_staged_dir_mends_what_a_killed_process_left(tmp_path):
    """Would catch losing the old pair when the process died between the two renames, and left-overs that pile up."""
    (tmp_path / ".pair.previous").mkdir()
    (tmp_path / ".pair.previous" / "old").touch()
    (tmp_path / ".pair.partial").mkdir()
    (tmp_path / ".pair.partial" / "half").touch()
    with pytest.raises(ValueError, match="x"), staged_dir(tmp_path / "pair") as part:
        assert names(part) == set()
        raise ValueError("x")
    assert names(tmp_path) == {"pair"}
    assert names(tmp_path / "pair") == {"old"}


def test_staged_dir_puts_the_old_folder_back_when_the_swap_fails(tmp_path, monkeypatch):
    """Would catch ending with neither the old nor the new folder."""
    final = tmp_path / "pair"
    with staged_dir(final) as part:
        (part / "old").touch()
    rename = Path.rename

    def fails_for_part(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_part)
    with pytest.raises(OutputError, match="broken"), staged_dir(final) as part:
        (part / "new").touch()
    assert names(final) == {"old"}
    assert names(tmp_path) == {"pair"}


def test_output_inside_a_file_is_refused(tmp_path):
    """Would catch a traceback when the output path runs through an existing file."""
    (tmp_path / "f").touch()
    with pytest.raises(OutputError), staged_dir(tmp_path / "f" / "pair"):
        pass
    with pytest.raises(OutputError):
        atomic_write(tmp_path / "f" / "x", b"")


def test_write_never_replaces_what_is_no_file(tmp_path):
    """Would catch `--html /dev/null`, run as root, that turns the device into a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OutputError, match="exists and is no file"):
            atomic_write(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo()


def test_a_version_counts_when_it_is_named(tmp_path):
    """Would catch a new version that touches the old one, a damaged copy taken for it, and old ones that stay."""
    parent, source = tmp_path / "report", tmp_path / "source"
    versions = []
    for text in ("old", "new", "old"):
        atomic_write(source / "deep" / "f", text)
        versions.append(add_version(parent, source))
    old, new, again = versions
    assert again == old != new
    assert [(path / "deep" / "f").read_text() for path in (old, new)] == ["old", "new"]
    (old / "deep" / "f").write_text("damaged")
    assert (add_version(parent, source) / "deep" / "f").read_text() == "old"
    (parent / ".x.partial").mkdir()
    drop_unnamed(parent, {new / "deep" / "f"})
    assert names(parent) == {new.name}
    assert (new / "deep" / "f").read_text() == "new"


def test_what_a_killed_writer_leaves_is_known(tmp_path):
    """Would catch a run refused as a folder of something else, for a file that an earlier attempt had begun."""
    assert is_leftover(tmp_path / ".recipe.yaml.partial")
    assert is_leftover(tmp_path / ".pair.previous")
    assert not any(is_leftover(tmp_path / name) for name in ("recipe.partial", ".hidden", "partial"))


def test_a_file_can_be_written_elsewhere_first(tmp_path):
    """Would catch a half-written file where a reader takes every file for one that belongs there."""
    (tmp_path / "scratch").mkdir()
    with atomic_file(tmp_path / "f", tmp_path / "scratch") as file:
        file.write(b"whole")
        assert names(tmp_path) == {"scratch"}
    assert names(tmp_path) == {"scratch", "f"}


def test_a_name_is_given_to_what_is_on_the_disk(tmp_path, monkeypatch):
    """Would catch a file, or a folder of files, that a power cut leaves empty under its final name."""
    steps = list[str]()
    sync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        sync(descriptor)

    def renamed(source: Path, target: Path, **_: object) -> None:
        steps.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    atomic_write(tmp_path / "f", b"all of it")
    assert steps == ["sync .f.partial", "rename .f.partial f", "sync ."]
    steps.clear()
    with staged_dir(tmp_path / "pair") as part:
        (part / "half").mkdir()
        (part / "half" / "weights").write_bytes(b"all of them")
        (part / "pair.json").write_bytes(b"{}")
    inside = ["pair.json", "half/weights", "half"]
    assert steps == [*(f"sync .pair.partial/{name}" for name in inside), *_named("pair")]


def _named(name: str) -> list[str]:
    return [f"sync .{name}.partial", f"rename .{name}.partial {name}", "sync ."]
