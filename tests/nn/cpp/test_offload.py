"""A decoder that reads layers as it needs them: the numbers, the memory and the ends of one that holds them all."""

import gc
import os
from pathlib import Path
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from qspec.bridges import compressed
from qspec.errors import SourceError
from qspec.nn.cpp.decoder import NativeDecoder
from qspec.nn.cpp.layer_file import LayerFile, pack_once
from qspec.nn.cpp.offload import BUFFERS, OffloadedDecoder
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schemes.build import build_plan
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
    "mixed": {"scheme": "W8A8", "ignore": ["o_proj"]},
    "float": {"scheme": "none"},
}
KINDS = ("qwen2", "gemma2", "phi3", "mixtral", "qwen3_moe")
MOST = 10**12
LAYERS = 7


@pytest.fixture(autouse=True)
def _library() -> None:
    if reason := NativeDecoder.missing():
        pytest.skip(f"needs the C++ core: {reason}")


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("int8"), SCHEMES["int8"])[1]


def packed(folder: Path, spec: dict[str, Any], kind: str = "llama") -> tuple[QuantizedModel, Path]:
    """A tiny quantized model of seven layers, and its file."""
    model = load(tiny_model(kind, folder / "source", num_hidden_layers=LAYERS))
    quantization = QuantSpec.model_validate(spec)
    stats = observe(folder / "source") if quantization.scheme == "FP8" or quantization.kv else None
    compressed.write(quantize(model, stats, build_plan(quantization)), folder / "made", torch.float32)
    pack_once(compressed.read(folder / "made"), folder / "packed.layers")
    return compressed.read(folder / "made"), folder / "packed.layers"


def offloaded(path: Path, resident: int, direct: bool = False) -> OffloadedDecoder:
    """The model of `packed`, with so many layers in memory."""
    model = compressed.read(path.parent / "made")
    sizes = OffloadedDecoder(model, LayerFile(path), MOST).sizes
    return OffloadedDecoder(model, LayerFile(path, direct), sizes.holding(resident).total)


def passes(decoder: NativeDecoder) -> list[torch.Tensor]:
    """Logits of a prompt of several blocks, steps, a verification that is rolled back, a tree and a batch."""
    decoder.truncate(0)
    tokens = torch.arange(5, 95)
    out = [decoder.forward(tokens[:80]), decoder.forward(tokens[80:81]), decoder.forward(tokens[81:86], last=3)]
    decoder.truncate(82)
    out += [decoder.forward(tokens[86:87]), decoder.forward_tree(tokens[:3], (-1, 0, 0))]
    decoder.keep([0, 2])
    out += NativeDecoder.forward_many([decoder, decoder.fork()], [tokens[:2], tokens[4:9]], [None, None])
    return out


def same(decoder: NativeDecoder, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(passes(decoder), expected, strict=True))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_gives_the_resident_bits(tmp_path: Path, name: str) -> None:
    """Catches codes, scales or outliers of another layer, or of the layer that came before in a buffer."""
    model, path = packed(tmp_path, SCHEMES[name])
    expected, decoder = passes(NativeDecoder(model)), offloaded(path, 0)
    assert len(decoder.residency.streamed) == LAYERS
    assert same(decoder, expected)
    assert same(decoder, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_resident_bits(tmp_path: Path, kind: str) -> None:
    """Catches biases, routers, windows and experts that are not read, or stay those of another layer."""
    model, path = packed(tmp_path, SCHEMES["int8"], kind)
    assert same(offloaded(path, 0), passes(NativeDecoder(model)))


@pytest.mark.parametrize("direct", [False, True])
def test_layers_in_memory_and_layers_that_are_read_take_turns(int8: Path, direct: bool) -> None:
    """Catches layers out of order where some are held, and neighbours in one buffer, also from pass to pass."""
    expected = passes(NativeDecoder(compressed.read(int8.parent / "made")))
    for resident in range(LAYERS + 1):
        decoder = offloaded(int8, resident, direct)
        streamed = 0 if LAYERS - resident <= BUFFERS else LAYERS - resident  # so few fit into the buffers' memory
        assert len(decoder.residency.streamed) == streamed
        assert same(decoder, expected)
        assert same(decoder, expected)


def test_thread_counts_give_equal_bits(int8: Path) -> None:
    """Catches threads that go on with a layer before it is there."""
    expected, threads = passes(NativeDecoder(compressed.read(int8.parent / "made"))), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert same(offloaded(int8, 2), expected)
    finally:
        torch.set_num_threads(threads)


def test_a_pass_reads_each_layer_once(int8: Path) -> None:
    """Catches a prompt for which layers are read once per block of rows, and sums that count something else."""
    decoder = offloaded(int8, 2)
    for _ in range(3):
        decoder.forward(torch.arange(70))
    found, most = decoder.reading(), BUFFERS * max(decoder.sizes.layers.values())
    assert 0 <= found.bytes - 3 * decoder.residency.read <= most
    assert found.seconds > 0
    assert found.waited >= 0
    assert 0 <= found.hidden <= 1
    assert found.since(found).bytes == 0


def test_a_file_that_is_cut_is_one_line(int8: Path, tmp_path: Path) -> None:
    """Catches a reader that dies and leaves the decoder waiting, and a sequence that grows by tokens of no pass."""
    folder = shutil.copytree(int8.parent, tmp_path / "copy")
    decoder = offloaded(folder / int8.name, 0)
    decoder.forward(torch.tensor([5]))
    os.truncate(folder / int8.name, 5000)
    for _ in range(3):
        length = decoder.length
        with pytest.raises(SourceError, match=r"packed\.layers: cannot be read \(it was cut\); check"):
            for _ in range(3):  # what was read ahead is still good
                decoder.forward(torch.tensor([5]))
                length = decoder.length
        assert decoder.length == length


def test_a_file_that_is_deleted_is_still_there(int8: Path, tmp_path: Path) -> None:
    """Catches a reader that opens its file again and again: one may be made anew while a model runs."""
    folder = shutil.copytree(int8.parent, tmp_path / "copy")
    expected, decoder = passes(NativeDecoder(compressed.read(folder / "made"))), offloaded(folder / int8.name, 0)
    (folder / int8.name).unlink()
    assert same(decoder, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="threads and files are counted as Linux does")
def test_thread_and_file_end_with_the_last_decoder(int8: Path) -> None:
    """Catches a thread that keeps the model, or its file, for as long as the process lives."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    pool = NativeDecoder(compressed.read(int8.parent / "made"))  # its threads are everybody's
    gc.collect()  # what earlier tests left open
    before = held()
    decoder = offloaded(int8, 0)
    other = decoder.fork()
    decoder.forward(torch.tensor([5]))
    del decoder
    gc.collect()
    assert held()[0] == before[0] + 1
    other.forward(torch.tensor([5]))
    del other
    gc.collect()
    assert held() == before
    del pool


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_copy_of_the_process_says_that_it_has_no_thread(int8: Path) -> None:
    """Catches a worker process that waits, or ends by waiting, for a thread that only its parent has."""
    decoder = offloaded(int8, 0)
    child = os.fork()
    if not child:
        try:
            decoder.forward(torch.tensor([5]))
        except RuntimeError as error:
            del decoder
            gc.collect()
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


LIMITED = """
import os, sys, threading, time
from pathlib import Path
import torch
from qspec.bridges import compressed
from qspec.nn.cpp.layer_file import LayerFile, pack_once
from qspec.nn.cpp.offload import OffloadedDecoder
torch.set_num_threads(1)
folder, limit = Path(sys.argv[1]), int(sys.argv[2])

def run(name, limit):
    model, path = compressed.read(folder / name), folder / f"{name}.layers"
    pack_once(model, path)
    decoder = OffloadedDecoder(model, LayerFile(path), limit, 128)
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
@pytest.mark.parametrize(("scheme", "limit"), [("W8A8", 24_500_000), ("W4A16", 14_000_000)])
def test_memory_stays_below_the_limit(tmp_path: Path, scheme: Any, limit: int) -> None:
    """Catches layers, buffers or copies on the way to them that the plan does not count, while packing too."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    for name, sizes in (("big", shape), ("small", {})):
        spec = ModelSpec(model=str(tiny_model("llama", tmp_path / "source" / name, **sizes)))
        spec = spec.model_copy(update={"quantization": QuantSpec(scheme=scheme, group_size=32)})
        quantize_checkpoint(spec, tmp_path / name, progress=Progress(quiet=True))
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, and not counted
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
