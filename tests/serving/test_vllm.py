"""What vLLM is told about a pair."""

import json
from pathlib import Path
import shlex
from typing import Any

import pytest
import torch

from qspec.bridges.heads import speculator
from qspec.cli import main
from qspec.errors import IntegrityError, PairError
from qspec.memory import Room
from qspec.nn.mlp_speculator import MLPSpeculator, initialize
from qspec.pair.check import read_manifest
from qspec.pair.head import shape_of, target_rows
from qspec.pair.package import package
from qspec.planning.preview import preview
from qspec.records import QuantizedModel
from qspec.schema.drafts import MlpDraft
from qspec.schema.recipe import Recipe
from qspec.serving import vllm as serve
from qspec.serving.vllm import serving
from tests.pairs import DRAFTS, KV, halves, recipe


@pytest.fixture(autouse=True)
def wide_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "environment", lambda: {"instruction_sets": "avx2 avx512f"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module")
def made(source: Path) -> tuple[QuantizedModel, QuantizedModel]:
    return halves(source)


@pytest.fixture(scope="module")
def pair(made: tuple[QuantizedModel, QuantizedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(*made, recipe(), tmp_path_factory.mktemp("made"))


def test_everything_is_said_aloud(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a draft that inherits the target's settings, and options of the caller's that are lost."""
    job = serving(pair, more=["--tensor-parallel-size", "2"])
    assert job.model == pair / "target"
    told = dict(zip(job.arguments[::2], job.arguments[1::2], strict=True))
    assert int(told.pop("--kv-cache-memory-bytes")) > 0
    config = json.loads(told.pop("--speculative-config"))
    assert told == {
        "--served-model-name": "tiny",
        "--kv-cache-dtype": "fp8",
        "--max-model-len": "128",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "2",
    }
    assert config["model"] == f"{pair}/draft"
    assert (config["method"], config["num_speculative_tokens"], config["kv_cache_dtype"]) == ("draft_model", 3, "fp8")
    assert "--speculative-config" not in serving(pair, draft=False).arguments
    assert main(["serve", str(pair), "--print", "--", "--tensor-parallel-size", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == job.command
    assert "draft: method draft_model" in said.err


def test_what_vllm_cannot_serve_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Would catch a server that loads for minutes and then writes garbage."""
    kv = {"format": "int8", "granularity": "token_head"}
    refused = recipe(target={"model": "tiny", "quantization": {"scheme": "W8A8", "kv": kv}})
    pair = package(*halves(tmp_path / "source"), refused, tmp_path)
    with pytest.raises(PairError, match="garbage"):
        serving(pair)


def test_fp8_kv_needs_a_cpu_that_vllm_has_kernels_for(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a server that loads all weights and then ends: FP8 KV on x86 without AVX-512."""
    monkeypatch.setattr(serve, "environment", lambda: {"instruction_sets": "avx2"})
    with pytest.raises(PairError, match="AVX-512 or AMX only"):
        serving(pair)


@pytest.mark.parametrize(("sets", "warned"), [("avx2 avx512f", True), ("avx2 avx512f avx512_vnni", False)])
def test_int8_in_vllm_needs_vnni(sets: str, warned: bool, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a server of other text than the pair's without a word: vLLM's INT8 sums overflow without VNNI."""
    monkeypatch.setattr(serve, "environment", lambda: {"instruction_sets": sets})
    assert any("INT8 products of the target overflow" in warning for warning in serving(pair).warnings) == warned


def test_a_changed_command_in_the_manifest_is_not_run(pair: Path, tmp_path: Path) -> None:
    """Would catch a pair from elsewhere that starts a server with arguments of its own."""
    import shutil

    copy = tmp_path / "pair"
    shutil.copytree(pair, copy)
    text = (copy / "pair.json").read_text(encoding="utf-8")
    (copy / "pair.json").write_text(text.replace("--kv-cache-dtype fp8", "--trust-remote-code"), encoding="utf-8")
    with pytest.raises(IntegrityError):
        serving(copy)


def test_options_of_scale_pass_through(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a pair that can only be served by one device, and an option that is lost, moved or split in two."""
    scale = "--tensor-parallel-size 2 --pipeline-parallel-size 4 --distributed-executor-backend ray --nnodes 2"
    assert main(["serve", str(pair), "--print", "--", *scale.split()]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.endswith(f" {scale}")
    assert shlex.split(printed)[:3] == ["vllm", "serve", f"{pair}/target"]
    assert main(["serve", str(pair), "--print", "--no-draft", "--", "-tp=4"]) == 0
    assert capsys.readouterr().out.strip().endswith(" -tp=4")


@pytest.mark.parametrize(
    "given", [["--tensor-parallel-size", "3"], ["-tp=8"], ["--tensor_parallel_size=2", "-tp", "3"]]
)
def test_heads_that_cannot_be_split_are_refused(pair: Path, given: list[str]) -> None:
    """Would catch workers on every device that start, load, and then find out."""
    with pytest.raises(PairError, match=r"cannot split the 4 heads of the target; give one of 1, 2, 4"):
        serving(pair, more=given)


def test_what_is_no_number_is_left_to_the_server(pair: Path) -> None:
    """Would catch a traceback of `int`, for digits that are none and for more of them than it takes."""
    for given in ("²", "9" * 5000, "two"):
        assert serving(pair, more=["-tp", given]).arguments[-1] == given


def test_a_schedule_by_batch_is_in_the_servers_own_words(tmp_path: Path) -> None:
    """Would catch a schedule that stays in the manifest, and one that the server drops without a word."""
    length = {"policy": "fixed", "k": 3, "by_batch": [[1, 4, 3], [5, 32, 0]]}
    scheduled = recipe(speculation={"draft_length": length, "max_length": 128})
    pair = package(*halves(tmp_path / "source"), scheduled, tmp_path)
    job = serving(pair, more=["--data-parallel-size", "2"])
    config = json.loads(job.arguments[job.arguments.index("--speculative-config") + 1])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 32, 0]]
    assert config["num_speculative_tokens"] == 3  # vLLM clips the schedule to it
    assert any("by_batch is dropped" in warning for warning in job.warnings)
    assert not any("by_batch" in warning for warning in serving(pair).warnings)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("kind", ["model", "ngram", "suffix", "mlp_speculator"])
def test_the_command_of_plan_and_manifest_is_the_one_that_serves(
    made: tuple[QuantizedModel, QuantizedModel],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    device: str,
) -> None:
    """Would catch a command that is copied from pair.json and starts another server than `qspec serve` does: one whose
    INT8 kernels refuse float32 inputs, minutes after it has begun to load.
    """
    head = write_head(made[0], tmp_path / "head") if kind == "mlp_speculator" else None
    drafts: dict[str, dict[str, Any]] = {
        "model": {"model": str(source), "quantization": DRAFTS["self"]["quantization"]},
        "mlp_speculator": {"model": str(head), "n_predict": 2, "shared": True},
    }
    target = {"model": str(source), "quantization": {"scheme": "W8A8", "kv": KV}}
    fields = {"device": device, "target": target, "draft": {"kind": kind, **drafts.get(kind, {})}}
    asked = Recipe.model_validate(recipe().as_dict() | fields)
    package(made[0], made[1] if kind == "model" else None, asked, tmp_path, head)
    monkeypatch.chdir(tmp_path)
    job = serving(Path("pair"))
    command, _, cache = job.command.partition(" --kv-cache-memory-bytes ")
    assert command == read_manifest(Path("pair")).speculation["vllm_command"]
    assert command == preview(asked)["commands"]["vllm"]
    assert bool(cache) == (device == "cpu")  # it follows from the memory of the machine
    assert ("--dtype bfloat16" in job.command) == (device == "cpu")


def test_a_cpus_cache_is_said_where_nobody_else_does(
    pair: Path, made: tuple[QuantizedModel, QuantizedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a server that asks for 92 % of the machine's memory and does not start, one that gets more than is
    there, or too little for one sequence, and a size that the caller's own does not replace.
    """

    def cache(*more: str, draft: bool = True) -> int | None:
        arguments = serving(pair, draft=draft, more=more).arguments
        own = arguments[: len(arguments) - len(more)]
        return int(own[own.index(flag) + 1]) if (flag := "--kv-cache-memory-bytes") in own else None

    arch = made[0].arch
    token = arch.n_layers * 2 * arch.n_kv_heads * arch.head_dim  # FP8: a byte a value, and no scale beside it
    for left, sequences in ((10**12, 8), (10 * (128 + 256) * token, 5), (1000, 1)):
        monkeypatch.setattr(serve, "rooms", lambda left=left: [Room(left, "a limit"), Room(10**13, "another")])
        assert cache(draft=False) == sequences * (128 + 256) * token
    monkeypatch.setattr(serve, "rooms", list)
    both = cache()
    assert both is not None
    assert both > 8 * (128 + 256) * token
    assert cache("--max-model-len", "64", draft=False) == 8 * (64 + 256) * token
    for said in ("--kv-cache-memory-bytes=1000", "--gpu-memory-utilization=0.5", "--gpu_memory_utilization=0.5"):
        assert cache(said) is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert cache() is None


def write_head(target: QuantizedModel, folder: Path) -> Path:
    """A speculator head with random weights."""
    draft = MlpDraft(kind="mlp_speculator", model=str(folder), n_predict=2, shared=True)
    head = MLPSpeculator(shape_of(draft, target.arch), None, *target_rows(target))
    initialize(head, torch.Generator().manual_seed(0))
    speculator.write(head, folder)
    return folder
