"""What goes wrong with pairs and servers in use: one line that helps, status 2, and nothing left behind."""

from collections.abc import Callable, Iterator
import json
from pathlib import Path
import re
import shutil
import signal
import socket
import sys
import time
from typing import Any

import pytest
import torch

from qspec.bridges import compressed
from qspec.bridges.remote import FolderStore
from qspec.bridges.vllm import server as vllm
from qspec.cli import main
from qspec.models.layers import truncate_layers
from qspec.models.vocab import match_rows
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.quantization.calibrate import calibrate
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.build import build_plan
from qspec.serving.vllm import serving
from tests.bridges.vllm.test_server import FAKE, _alive, _install
from tests.observed import ROWS, load
from tests.pair.test_check import list_again, rewrite
from tests.tiny import tiny_model

Capture = pytest.CaptureFixture[str]
Change = Callable[[Path], None]


def _quantized(folder: Path, layers: int, rows: int = 300) -> QuantizedModel:
    model = match_rows(truncate_layers(load(folder), layers), rows)
    return quantize(model, calibrate(model, ROWS), build_plan(QuantSpec(scheme="W8A8")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that vLLM could serve on any CPU."""
    draft = {"kind": "self", "layers": 1, "quantization": {"scheme": "W8A8"}}
    speculation = {"draft_length": {"policy": "fixed", "k": 3}, "max_length": 128}
    target = {"model": "tiny", "quantization": {"scheme": "W8A8"}}
    fields = {"name": "tiny", "target": target, "draft": draft, "speculation": speculation}
    recipe = Recipe.model_validate(fields)
    return package(_quantized(source, 2), _quantized(source, 1), recipe, tmp_path_factory.mktemp("made"))


@pytest.fixture
def pair(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "pair"))


def _refused(capfd: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The one line of a command that fails."""
    assert main(arguments) == status
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    (line,) = errors
    assert len(line) < 400
    assert status != 2 or (": " in line.removeprefix("error: ") and "; " in line)
    return line


def _cut(path: str) -> Change:
    def change(pair: Path) -> None:
        file = pair / path
        file.write_bytes(file.read_bytes()[:-100])

    return change


def _write(path: str, content: bytes) -> Change:
    def change(pair: Path) -> None:
        (pair / path).write_bytes(content)

    return change


def _tokens_swapped(pair: Path) -> None:
    path = pair / "draft/tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    vocab = state["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.get)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(state), encoding="utf-8")


def _halves_swapped(pair: Path) -> None:
    (pair / "target").rename(pair / "kept")
    (pair / "draft").rename(pair / "target")
    (pair / "kept").rename(pair / "draft")


def _linked_out(pair: Path) -> None:
    moved = (pair / "draft").rename(pair.parent / "elsewhere")
    (pair / "draft").symlink_to(moved)


def _newer(pair: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["format_version"] = 2

    rewrite(pair, change)


def _not_a_folder(pair: Path) -> None:
    shutil.rmtree(pair)
    pair.write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "sealed", "said"),
    [
        (lambda pair: (pair / "target/config.json").unlink(), False, "target/config.json: is missing; package"),
        (_cut("target/model.safetensors"), False, r"target/model.safetensors: has \d+ bytes instead of"),
        (_cut("target/model.safetensors"), True, "target/"),
        (_cut("draft/model.safetensors"), True, "draft/"),
        (_write("target/config.json", b'{"a": "\xff"}'), True, "target/"),
        (_write("draft/tokenizer.json", b"\xff\xfe"), True, "draft/"),
        (_write("target/tokenizer.json", b"{}"), True, "target/"),
        (_write("draft/config.json", b"[]"), True, "draft/"),
        (_write("draft/qspec.json", b"\xff"), True, "draft/"),
        (_write("pair.json", b"\xff\xfe"), False, "pair.json: is not JSON"),
        (_write("pair.json", b""), False, "pair.json: is not JSON"),
        (_tokens_swapped, True, "2 tokens, first .* both must share one tokenizer; use a draft"),
        (_halves_swapped, True, "target/config.json: has layers"),
        (_linked_out, False, "draft: is a link, a pair holds plain files; copy"),
        (_newer, False, "pair.json: format_version 2: must be 1; it is from a newer qspec: update this one"),
        (_not_a_folder, False, "pair.json: is missing; give the folder"),
        (shutil.rmtree, False, "pair.json: is missing; give the folder"),
    ],
)
def test_pairs_that_are_none(pair: Path, capfd: pytest.CaptureFixture[str], change: Change, sealed: bool, said: str):
    """Would catch a traceback, a page of text, or a pair that is served although its check would fail."""
    change(pair)
    if sealed:
        list_again(pair)
    line = _refused(capfd, "check", str(pair))
    assert re.search(said, line), line
    assert _refused(capfd, "serve", str(pair), "--print") == line


@pytest.mark.parametrize("path", ["target/model.safetensors", "draft/model.safetensors"])
def test_cut_weights_do_not_answer(pair: Path, capfd: pytest.CaptureFixture[str], path: str) -> None:
    """Would catch `generate`, which does not read every digest, falling over half a file."""
    _cut(path)(pair)
    assert path.partition("/")[0] in _refused(capfd, "generate", str(pair), "hello")


def test_an_answer_that_the_cache_cuts_says_so(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Would catch an answer that stops in the middle, far short of what was asked for, without a word."""
    assert main(["generate", str(whole), "fox", "--max-new-tokens", str(10**30)]) == 0
    told = f"--max-new-tokens {10**30}: the answer is cut where 128 tokens, the prompt among them, fill the cache"
    assert f"warning: {told}; make the pair with speculation.max_length up to 256\n" in capfd.readouterr().err
    assert main(["generate", str(whole), "fox", "--max-new-tokens", "8"]) == 0
    assert "warning" not in capfd.readouterr().err


def test_a_draft_with_another_bos_is_told(pair: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Would catch a draft whose acceptance nobody can explain: same ids, but it has never seen this text's start."""
    path = pair / "draft/tokenizer_config.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(state | {"bos_token": "<|endoftext|>"}), encoding="utf-8")
    list_again(pair)
    assert main(["check", str(pair)]) == 0
    assert "warning: the draft's tokenizer (special tokens) is not as the target's" in capfd.readouterr().out


def test_another_padding_is_refused(pair: Path, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Would catch halves whose heads differ, which servers load and then index out of bounds."""
    shutil.rmtree(pair / "draft")
    compressed.write(_quantized(source, 1, rows=304), pair / "draft", torch.float32)
    list_again(pair)
    line = _refused(capfd, "check", str(pair))
    assert "draft vocabulary 304: the target's head has 300 rows, and runtimes need equal heads; use" in line


def test_a_draft_of_a_shorter_context_stops_drafting_there(source: Path, tmp_path: Path) -> None:
    """Would catch a server that refuses to start, or a draft that is asked for positions that it does not know."""
    short = tiny_model("llama", tmp_path / "short", num_hidden_layers=1, max_position_embeddings=48)
    quantization = {"scheme": "W8A8"}
    fields = {
        "name": "short",
        "target": {"model": "tiny", "quantization": quantization},
        "draft": {"kind": "model", "model": "short", "quantization": quantization},
        "speculation": {"draft_length": {"policy": "fixed", "k": 3}, "max_length": 128},
    }
    made = package(_quantized(source, 2), _quantized(short, 1), Recipe.model_validate(fields), tmp_path)
    job = serving(made)
    told = json.loads(job.arguments[job.arguments.index("--speculative-config") + 1])
    assert "max_model_len" not in told  # vLLM takes the shorter of both by itself, and stops at a longer one
    answers = [open_pair(made).generate("fox", 90, speculative=drafts) for drafts in (True, False)]
    assert answers[0].generation.tokens == answers[1].generation.tokens
    drafted = [step.drafted for step in answers[0].generation.steps]
    assert drafted[0] == 3
    assert drafted[-1] == 0


@pytest.mark.parametrize("where", ["mkdir", "fetch", "write_bytes"])
def test_a_pull_onto_a_bad_disk_can_go_on(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    """Would catch half a pair under its final name, and a second attempt that trips over the first."""
    (tmp_path / "there").mkdir()
    for path in (p for p in pair.rglob("*") if p.is_file()):
        (tmp_path / "there" / path.relative_to(pair)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / "there" / path.relative_to(pair))
    out = tmp_path / "out" / "pair"

    def full(self: Any, *_: Any, **__: Any) -> None:
        if isinstance(self, FolderStore) or str(self).startswith(str(tmp_path / "out")):
            raise OSError(
                28 if where != "mkdir" else 30, "No space left" if where != "mkdir" else "Read-only", str(out)
            )

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore if where == "fetch" else Path, where, full)
        _refused(capfd, "pull", str(tmp_path / "there"), str(out))
    assert not out.exists()
    assert main(["pull", str(tmp_path / "there"), str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["pair"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This interpreter, to which vLLM 0.32.0 seems to belong; the folder of its packages."""
    module = tmp_path / "packages/vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(FAKE, encoding="utf-8")
    for folder in (module.parent, module.parent.parent, module.parent.parent.parent):
        (folder / "__init__.py").touch()
    _install(tmp_path / "packages", "0.32.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return tmp_path / "packages"


def _serve(pair: Path, *more: str, port: int | None = None, **options: str) -> list[str]:
    told = [f"--{name}={value}" for name, value in {"python": sys.executable, **options}.items()]
    return ["serve", str(pair), f"--port={port or vllm.free_port()}", *told, "--", *more]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[list[str]]:
    """Arguments with which the server starts a worker; no worker is left behind."""
    file = tmp_path / "child"
    yield ["--child", str(file)]
    pid = int(file.read_text())
    for _ in range(200):  # a killed process takes a moment to be gone
        if not _alive(pid):
            break
        time.sleep(0.05)
    assert not _alive(pid)


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        (["--fail", "1"], {}, "vLLM: ended with status 7 before it answered; read its last lines"),
        (["--requests", "1"], {}, "vLLM: ended with status 9; read its last lines"),
        (
            ["--signal", str(int(signal.SIGWINCH))],
            {"patience": "1"},
            "did not answer .*/health within 1 s; give it longer",
        ),
    ],
)
def test_servers_that_end_or_never_begin(
    whole: Path, installed: Path, capfd: pytest.CaptureFixture[str], more: list[str], options: dict[str, str], said: str
) -> None:
    """Would catch a wait of minutes, a traceback, and a server that nobody stops."""
    assert re.search(said, _refused(capfd, *_serve(whole, *more, **options)))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_stops_qspec_stops_its_server(
    whole: Path, installed: Path, child: list[str], capfd: pytest.CaptureFixture[str], sign: signal.Signals
) -> None:
    """Would catch a server that keeps its memory and port when a service manager or a closed terminal ends qspec."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it ...
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ... and one under nohup this
    assert main(_serve(whole, *child, "--signal", str(int(sign)))) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "the server was stopped"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_interrupt_waits_no_longer(installed: Path, child: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch an impatient Ctrl-C that leaves the server, half stopped, behind."""
    python, port, wait = Path(sys.executable), vllm.free_port(), vllm.subprocess.Popen.wait
    interrupted = list[float]()

    def impatient(self: Any, timeout: float | None = None) -> int:
        if timeout == vllm.STOPPING and not interrupted:
            interrupted.append(timeout)
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(vllm.subprocess.Popen, "wait", impatient)
    with vllm.server(python, installed, child, "127.0.0.1", port, 60) as process:
        pass
    assert interrupted
    assert process.returncode is not None


def test_a_port_that_is_taken_is_told_at_once(whole: Path, installed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Would catch another server's health taken for that of ours, or a model loaded for minutes in vain."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = _refused(capfd, *_serve(whole, port=port))
    assert f"127.0.0.1:{port}: cannot be listened at (Address already in use); give another one: --host, --port" in line
    assert "cannot be listened at" in _refused(capfd, *_serve(whole, host="203.0.113.1"))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("exit 3", "has no vLLM in its environment; install vLLM"),
        ("echo 0.8.5", r"vLLM 0.8.5: is outside of 0.30 up to 0.34; install one of these, or --any-version"),
        ("exec sleep 600", "did not say its packages within 0 s; install"),
    ],
)
def test_interpreters_without_a_usable_vllm(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    program: str,
    said: str,
) -> None:
    """Would catch a server of a release whose arguments are others, and an interpreter that hangs."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(vllm, "PATIENCE", 0.3 if "sleep" in program else 60.0)
    assert re.search(said, _refused(capfd, *_serve(whole, python=str(python))))
    assert "is no interpreter" in _refused(capfd, *_serve(whole, python=str(tmp_path / "none")))
