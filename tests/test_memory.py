"""Memory that does not suffice: seen before compute where it can be, and one line where it runs out all the same.

Processes run under real limits (`ulimit -v`, `ulimit -d`); control groups are folders of files, as the kernel has them.
"""

from collections.abc import Sequence
from dataclasses import replace
import errno
import os
from pathlib import Path
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch

from qspec.cli import main
from qspec.errors import OutOfMemory, SourceError
from qspec.memory import Need, Room, _kilobytes, ran_out, require_memory, rooms, tightest
from qspec.nn.engines import open_decoder
from qspec.pair.package import package
from tests.jobs import job
from tests.pairs import halves, recipe
from tests.tiny import tiny_model

GB = 10**9


def system(folder: Path, cgroup: str, mounts: Sequence[str], swap: int = 0, available: int = 64 << 20) -> Path:
    """A `/proc` with these control groups; the machine has 64 GiB left."""
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available} kB\nSwapFree: {swap >> 10} kB\n")
    (folder / "self" / "status").write_text("Name:\tpython\nVmSize:\t  4000 kB\nVmData:\t 2000 kB\n")
    (folder / "self" / "cgroup").write_text(cgroup)
    (folder / "self" / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return folder


def group(folder: Path, **files: str | int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def test_the_tightest_group_above_decides(tmp_path: Path) -> None:
    """Would catch a container's limit that is looked for in the innermost group only, where there is `max`."""
    top = tmp_path / "cgroup"
    group(top / "pods" / "one", memory__max="max", memory__current=GB)
    stat = "anon 5\ninactive_file 300000000\nactive_file 200000000"
    group(top / "pods", memory__max=4 * GB, memory__current=2 * GB, memory__stat=stat)
    group(top, memory__max=9 * GB, memory__current=3 * GB, memory__stat="")
    proc = system(tmp_path / "proc", "0::/pods/one\n", [f"30 1 0:1 / {top} rw - cgroup2 cgroup2 rw"])
    found = {room.limit: room.left for room in rooms(proc)}
    assert found == {
        "this machine's memory": 64 << 30,
        f"memory.max 4.00 GB of control group {top / 'pods'}": 2_500_000_000,  # what is cached goes when it has to
        f"memory.max 9.00 GB of control group {top}": 6 * GB,
    }
    assert tightest(proc) == f"memory.max 4.00 GB of control group {top / 'pods'} leaves 2.50 GB now"


def test_groups_of_version_one_count(tmp_path: Path) -> None:
    """Would catch a batch system's limit under the older interface, in which each controller has a tree of its own."""
    top = tmp_path / "memory"
    limits = {"memory__limit_in_bytes": 3 * GB, "memory__usage_in_bytes": GB}
    group(top / "job", **limits, memory__stat="total_inactive_file 7\ntotal_active_file 3\ninactive_file 500")
    group(top, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GB)
    lines = "5:cpu:/other\n4:memory,hugetlb:/job\n0::/\n"
    mounts = [f"35 1 0:2 / {top} rw - cgroup cgroup rw,memory,hugetlb", "36 1 0:3 / /nowhere rw - cgroup cgroup rw,cpu"]
    found = rooms(system(tmp_path / "proc", lines, mounts))
    assert [(room.left, room.limit) for room in found[1:]] == [
        (2 * GB + 10, f"memory.limit_in_bytes 3.00 GB of control group {top / 'job'}")
    ]


def test_a_container_sees_its_group_as_the_mount(tmp_path: Path) -> None:
    """Would catch a group whose path is that of the host, which the container does not see, taken for none."""
    top = group(tmp_path / "cgroup", memory__max=2 * GB, memory__current=GB)
    mounts = [f"30 1 0:1 /docker/abc {top} rw - cgroup2 cgroup2 rw"]
    inside = system(tmp_path / "inside", "0::/docker/abc\n", mounts)
    elsewhere = system(tmp_path / "elsewhere", "0::/another\n", mounts)
    for proc in (inside, elsewhere):
        assert [room.left for room in rooms(proc)[1:]] == [GB]


def test_swap_counts_as_far_as_it_may_be_used(tmp_path: Path) -> None:
    """Would catch a refusal of what would run, slowly, and room that a group may not use."""
    top = group(tmp_path / "cgroup", memory__max=2 * GB, memory__current=GB, memory__swap__max=GB // 4)
    proc = system(tmp_path / "proc", "0::/\n", [f"30 1 0:1 / {top} rw - cgroup2 cgroup2 rw"], swap=GB)
    machine, own = rooms(proc)
    assert machine.left == (64 << 30) + (GB >> 10 << 10)
    assert own.left == GB + GB // 4


def test_systems_without_these_files_have_no_limit(tmp_path: Path) -> None:
    """Would catch a crash on macOS, or under a `/proc` that hides what it has."""
    assert rooms(tmp_path) == []
    assert tightest(tmp_path) == ""


def test_what_is_only_reserved_counts_under_ulimit_alone() -> None:
    """Would catch a long context that is refused for memory that it will not touch."""
    need = Need(held=2, reserved=10) + Need(1)
    assert [Room(9, "x", reserves).counted(need) for reserves in (False, True)] == [3, 13]


def test_a_need_beyond_all_limits_is_refused() -> None:
    """Would catch a job that starts and is killed by the kernel hours later."""
    require_memory("a job", Need(1 << 20), "x")
    with pytest.raises(
        OutOfMemory, match=r"^a job: takes at least 1,000,000 GB of memory, and .* leaves .*; buy some$"
    ):
        require_memory("a job", Need(10**15), "buy some")


def raised(error: Exception, cause: BaseException | None = None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "an allocation failed"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator"),
        (RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"), "unable to mmap"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("std::bad_alloc"), "bad_alloc"),
        (ImportError("libx.so: failed to map segment from shared object"), "failed to map"),
        (raised(SourceError("x", "is unreadable", "mend"), MemoryError("no room")), "no room"),
        (raised(ValueError("x"), raised(KeyError("y"), OSError(errno.ENOMEM, "mmap"))), "mmap"),
        (ValueError("out of memory"), None),
        (OSError(errno.ENOENT, "missing"), None),
        (RuntimeError("shapes differ"), None),
    ],
)
def test_errors_of_memory_are_known(error: Exception, said: str | None) -> None:
    """Would catch memory that ran out reported as a broken file, and a broken file reported as memory."""
    found = ran_out(error)
    assert (found is None) if said is None else (said in str(found))


def test_a_ring_of_causes_ends() -> None:
    """Would catch a search that follows exceptions for ever."""
    one, two = ValueError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert ran_out(one) is None


def limited(which: str, beyond: int, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """`qspec` in a copy of this process that may take `beyond` bytes more: its status, and the lines of its errors."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 99  # an error that nobody caught
        try:
            torch.set_num_threads(1)  # no thread of the parent lives on
            os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            limit(which, beyond)
            status = main(arguments)
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended), (folder / "errors").read_text().splitlines()


def limit(which: str, beyond: int) -> None:
    """Let this process take `beyond` bytes more than it has."""
    number, field = {"AS": (resource.RLIMIT_AS, "VmSize"), "DATA": (resource.RLIMIT_DATA, "VmData")}[which]
    most = _kilobytes(Path("/proc/self/status"))[field] + beyond
    resource.setrlimit(number, (most, most))


LONG = 1 << 21
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of small models for contexts of two million tokens: room for their KV is 0.4 GB, rotations are 0.1 GB each."""
    folder = tmp_path_factory.mktemp("made")
    made = [
        replace(
            half,
            arch=replace(half.arch, max_positions=LONG),
            config={**half.config, "max_position_embeddings": LONG},
        )
        for half in halves(folder / "source")
    ]
    length = {"draft_length": {"policy": "fixed", "k": 3}, "max_length": LONG}
    return package(made[0], made[1], recipe(speculation=length), folder)


@FORKS
@pytest.mark.parametrize("which", ["AS", "DATA"])
def test_a_pair_that_does_not_fit_is_refused_before_it_is_loaded(which: str, pair: Path, tmp_path: Path) -> None:
    """Would catch an allocation that fails in the C++ core, as a traceback, where the sizes are known before."""
    status, lines = limited(which, 400 << 20, tmp_path, "generate", str(pair), "Hello")
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith(f"error: {pair}: takes at least ")
    assert f"and RLIMIT_{which} (ulimit -" in lines[0]
    assert "--memory-limit SIZE" in lines[0]


@FORKS
@pytest.mark.parametrize(
    ("which", "beyond"), [("AS", 60 << 20), ("AS", 400 << 20), ("AS", 600 << 20), ("DATA", 200 << 20)]
)
def test_memory_that_runs_out_is_one_line(
    which: str, beyond: int, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a traceback of torch, or an abort of the C++ core, where an estimate was too low."""
    monkeypatch.setattr("qspec.pair.open.require_memory", lambda *_: None)
    status, lines = limited(which, beyond, tmp_path, "generate", str(pair), "Hello", "--max-new-tokens", "4")
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith("error: memory: ran out (")
    assert f"RLIMIT_{which}" in lines[0]
    assert lines[0].endswith("fewer at once")


@FORKS
def test_a_run_that_ran_out_of_memory_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a run whose hours are lost, and a message that does not say how to keep them."""
    model = tiny_model("llama", tmp_path / "model", max_position_embeddings=LONG)
    path, out = tmp_path / "recipe.yaml", str(tmp_path / "out")
    path.write_text(job(tmp_path, model, speculation={"max_length": 256}).dump(), encoding="utf-8")
    opened = open_decoder

    def open_in_little(*told: Any, **options: Any) -> Any:
        limit("AS", 60 << 20)
        return opened(*told, **options | {"max_length": LONG})

    with monkeypatch.context() as patched:
        patched.setattr("qspec.pair.open.open_decoder", open_in_little)
        status, lines = limited("AS", 4 << 30, tmp_path, "run", str(path), "--out", out)
    assert status == 2, lines
    assert lines[-1].startswith("error: memory: ran out (")
    assert lines[-1].endswith("then continue with --resume")
    assert not [line for line in lines if "Traceback" in line]
    assert main(["run", str(path), "--out", out, "--resume"]) == 0
    assert (tmp_path / "out/report/report.html").is_file()


def test_a_recipe_that_does_not_fit_is_refused_before_models_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a run that quantizes for hours and ends when it opens the original."""
    model = tiny_model("llama", tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(job(tmp_path, model).dump(), encoding="utf-8")
    monkeypatch.setattr("qspec.memory.rooms", lambda: [Room(100_000, "the group")])
    monkeypatch.setattr("qspec.pipeline.load_originals", lambda *_: pytest.fail("models were read"))
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "run tiny: takes at least" in told
    assert "then continue with --resume" in told
    assert not (tmp_path / "out").exists()
    assert main(["quantize", str(model), str(tmp_path / "alone"), "--scheme", "FP8_DYNAMIC"]) == 2
    told = capsys.readouterr().err
    assert f"quantizing {model}: takes at least" in told
    assert "then call it again" in told


def test_threads_that_cannot_start_end_no_process() -> None:
    """Would catch a pool whose second thread fails, and whose first one then ends the process without a word."""
    code = """
import resource
from qspec.memory import Path, _kilobytes
from qspec.nn.cpp import interface
interface.instruction_sets()
most = _kilobytes(Path("/proc/self/status"))["VmSize"] + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    interface.pool_of(500)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "500 threads cannot be started\n")
