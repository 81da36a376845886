"""A decoder that reads layers as it needs them: the numbers, the memory and the ends of one that holds them all."""

from collections.abc import Callable
import gc
import os
from pathlib import Path
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from qspec.bridges import compressed
from qspec.bridges.staging import Staging
from qspec.errors import IntegrityError
from qspec.nn import residency
from qspec.nn.decoder import Decoder
from qspec.nn.offload import OffloadedDecoder
from qspec.nn.residency import layer_bytes
from qspec.ops.select import Kernels
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import ModelSpec
from qspec.stages.build_plan import build_plan
from qspec.stages.quantize import quantize
from tests.observed import load, observe
from tests.tiny import tiny_model

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "W8A8"},
    "int8 outliers": {"scheme": "W8A8", "outliers": {"share": 1.0}},
    "int8 kv": {"scheme": "W8A8", "kv": {"format": "fp8_e4m3"}},
    "int4": {"scheme": "W4A16", "group_size": 32},
    "int4 kv": {"scheme": "W4A16", "group_size": 32, "kv": {"format": "int8", "granularity": "token_head"}},
    "int4 bytes": {"scheme": "W4A8", "group_size": 32},
    "fp8": {"scheme": "FP8"},
    "fp8 dynamic": {"scheme": "FP8_DYNAMIC"},
    "mixed": {"scheme": "W8A8", "ignore": ["k_proj"]},
    "float": {"scheme": "none"},
}
KINDS = ("qwen2", "gemma2", "phi3", "mixtral", "qwen3_moe")
MOST = 10**12


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight INT8 layers."""
    return checkpoint(tmp_path_factory.mktemp("int8"), spec=SCHEMES["int8"], num_hidden_layers=8)


def checkpoint(folder: Path, kind: str = "llama", spec: dict[str, Any] | None = None, **shape: Any) -> Path:
    """A tiny quantized model on disk."""
    model, quantization = load(tiny_model(kind, folder / "source", **shape)), QuantSpec.model_validate(spec or {})
    stats = observe(folder / "source") if quantization.scheme == "FP8" or quantization.kv else None
    compressed.write(quantize(model, stats, build_plan(quantization)), folder / "made", torch.float32)
    return folder / "made"


def least(folder: Path, kernels: Kernels = "auto") -> int:
    """The lowest limit that a model of many layers runs under: none is in memory."""
    with offloaded(folder, MOST, kernels=kernels) as decoder:
        fixed, arch = decoder.residency.fixed, decoder.arch
    schemes = compressed.read(folder).plan.resolve(arch.linears())
    sizes = layer_bytes(arch, schemes, Staging(folder).size, torch.float32, kernels)
    return min(residency._with_resident(count, fixed, sizes).total for count in range(len(sizes) + 1))


def offloaded(folder: Path, limit: int, direct: bool = False, kernels: Kernels = "auto") -> OffloadedDecoder:
    staging = Staging(folder, direct)
    return OffloadedDecoder.open(compressed.read(folder, staging.opener), staging, limit, kernels=kernels)


def passes(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of a prompt, steps, a verification that is rolled back, a tree and a batch."""
    decoder.truncate(0)
    tokens = torch.arange(5, 40)
    out = [decoder.forward(tokens[:20]), decoder.forward(tokens[20:21]), decoder.forward(tokens[21:26], last=3)]
    decoder.truncate(22)
    out += [decoder.forward(tokens[26:27]), decoder.forward_tree(tokens[:3], (-1, 0, 0))]
    decoder.keep([0, 2])
    other = decoder.fork()
    out += type(decoder).forward_many([decoder, other], [tokens[:2], tokens[4:9]], [None, None])
    return out


def read_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "qspec read-ahead"]


def same(decoder: Decoder, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(passes(decoder), expected, strict=True))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_gives_the_resident_numbers(tmp_path: Path, name: str) -> None:
    """Catches codes, scales or outliers of another layer, or of the layer that came before in a buffer."""
    folder = checkpoint(tmp_path, spec=SCHEMES[name], num_hidden_layers=8)
    for kernels in ("auto", "reference"):
        expected = passes(Decoder.from_quantized(compressed.read(folder), kernels=kernels))
        with offloaded(folder, least(folder, kernels), kernels=kernels) as decoder:
            assert (decoder.residency.resident, len(decoder.residency.streamed)) == ((), 8)
            assert same(decoder, expected)
            assert same(decoder, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_resident_numbers(tmp_path: Path, kind: str) -> None:
    """Catches biases, routers, windows, and layers that are stored as one or under other names, that are not staged."""
    folder = checkpoint(tmp_path, kind, {"scheme": "W8A8"}, num_hidden_layers=8)
    expected = passes(Decoder.from_quantized(compressed.read(folder)))
    with offloaded(folder, least(folder)) as decoder:
        assert decoder.residency.streamed
        assert same(decoder, expected)


def test_layers_in_memory_and_layers_that_are_read_take_turns(int8: Path) -> None:
    """Catches layers out of order where some are held, past the file cache too, and a limit that is not used."""
    expected = passes(Decoder.from_quantized(compressed.read(int8)))
    counts = set()
    for limit in (least(int8), least(int8) + 150_000, MOST):
        for direct in (False, True):
            with offloaded(int8, limit, direct) as decoder:
                assert decoder.residency.total <= limit
                counts.add(len(decoder.residency.resident))
                assert same(decoder, expected)
    assert len(counts) == 3
    assert {0, 8} < counts


def test_a_pass_that_was_left_half_way_is_forgotten(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an interrupted pass after which every layer is the next one's."""
    expected = passes(Decoder.from_quantized(compressed.read(int8)))
    with offloaded(int8, least(int8)) as decoder:
        for stop in range(1, 5):
            done = []

            def interrupted(*args: Any, done: list[int] = done, stop: int = stop) -> Any:
                done.append(args[0])
                if len(done) == stop:
                    raise KeyboardInterrupt
                return Decoder._attention(decoder, *args)

            with monkeypatch.context() as patched:
                patched.setattr(decoder, "_attention", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    decoder.forward(torch.tensor([7]))
            assert same(decoder, expected)


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01" * 8)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("harm", [shortened, rewritten])
def test_a_file_that_changes_is_one_line(int8: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Catches a reader that dies and leaves the decoder waiting, or goes on with bytes of another file."""
    folder = shutil.copytree(int8, tmp_path / "copy")
    with offloaded(folder, least(folder)) as decoder:
        decoder.forward(torch.tensor([5]))
        harm(folder / "model.safetensors")
        for _ in range(3):
            with pytest.raises(
                IntegrityError, match=r"model\.safetensors: has changed since .*; keep the files"
            ) as found:
                for _ in range(3):  # what was read ahead is still good
                    decoder.forward(torch.tensor([5]))
            assert "\n" not in str(found.value)
    assert not read_ahead()


def test_a_file_that_is_deleted_is_still_there(int8: Path, tmp_path: Path) -> None:
    """Catches a reader that opens its file again and again: a pair may be replaced while it runs."""
    folder = shutil.copytree(int8, tmp_path / "copy")
    expected = passes(Decoder.from_quantized(compressed.read(folder)))
    with offloaded(folder, least(folder)) as decoder:
        (folder / "model.safetensors").unlink()
        assert same(decoder, expected)


def test_any_failure_of_the_thread_is_raised(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bug or a lack of memory in the thread that turns into waiting."""

    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    limit = least(int8)
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "read", fail)
        with pytest.raises(MemoryError, match="none left"), offloaded(int8, limit) as decoder:
            decoder.forward(torch.tensor([5]))


def test_a_closed_decoder_says_so(int8: Path) -> None:
    """Catches a pass that waits for a thread that has ended."""
    with offloaded(int8, least(int8)) as decoder:
        decoder.forward(torch.tensor([5]))
    with pytest.raises(RuntimeError, match="closed"):
        decoder.forward(torch.tensor([5]))


def test_the_thread_ends_with_the_last_decoder(int8: Path) -> None:
    """Catches a thread that keeps the model, or its files, for as long as the process lives."""
    gc.collect()  # what earlier tests left open
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    decoder = offloaded(int8, least(int8))
    other = decoder.fork()
    decoder.forward(torch.tensor([5]))
    del decoder
    gc.collect()
    assert len(read_ahead()) == 1
    other.forward(torch.tensor([5]))
    del other
    gc.collect()
    assert not read_ahead()
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == files


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_copy_of_the_process_says_that_it_has_no_thread(int8: Path) -> None:
    """Catches a worker process that waits for a thread that only its parent has."""
    with offloaded(int8, least(int8)) as decoder:
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            try:
                decoder.forward(torch.tensor([5]))
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


LIMITED = """
import os, sys, threading, time
from pathlib import Path
import torch
from qspec.bridges import compressed
from qspec.bridges.staging import Staging
from qspec.nn.offload import OffloadedDecoder
from qspec.nn.residency import layer_bytes
torch.set_num_threads(1)
folder, limit, least = Path(sys.argv[1]), int(sys.argv[2]), []

def run(name, limit):
    staging = Staging(folder / name)
    with OffloadedDecoder.open(compressed.read(folder / name, staging.opener), staging, limit) as decoder:
        for tokens in ([5, 6, 7, 8], [9], [10]):
            decoder.forward(torch.tensor(tokens))
        return decoder.residency

def used():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

def watch(most):
    while used() < most:
        time.sleep(0.002)
    os._exit(9)

run("small", 10_000_000)  # libraries are imported at first use
threading.Thread(target=watch, args=(used() + limit,), daemon=True).start()
found = run("big", limit)
assert found.streamed and found.total > 0.9 * limit, found
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
@pytest.mark.parametrize(
    ("scheme", "limit"), [("W8A8", 26_000_000), ("W4A16", 37_000_000), ("FP8_DYNAMIC", 61_000_000)]
)
def test_memory_stays_below_the_limit(tmp_path: Path, scheme: str, limit: int) -> None:
    """Catches layers, buffers or floats on the way to them that the plan does not count."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    for name, sizes in (("big", shape), ("small", {})):
        spec = ModelSpec(model=str(tiny_model("llama", tmp_path / "source" / name, **sizes)))
        spec = spec.model_copy(update={"quantization": QuantSpec(scheme=scheme, group_size=32)})
        quantize_checkpoint(spec, tmp_path / name, progress=Progress(quiet=True))
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, and not counted
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
