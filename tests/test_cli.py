"""The command line: help worth reading, one line and status 2 for bad input, and calls with the right arguments."""

from collections.abc import Callable
import io
import json
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import qspec
from qspec import cli, pipeline
from qspec.errors import IntegrityError
from qspec.pair import check as pair_check
from qspec.speculation.types import Generation, StepRecord
from tests.tiny import TEXT, tiny_model

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "recipes" / "llama-3.1-8b-fp8-h100.yaml")
Capture = pytest.CaptureFixture[str]


def test_help_names_the_first_three_commands_and_loads_nothing_heavy():
    """Would catch a bare help page, or one that takes seconds because a model library is imported for it."""
    heavy = "{'torch', 'transformers', 'datasets', 'llmcompressor', 'lm_eval'}"
    code = f"import sys; from qspec.cli import main; main([]); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert all(f"qspec {verb} " in done.stdout for verb in ("plan", "run", "generate"))
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["plan"], "Missing argument"),
        (["plann"], "plann"),
        (["plan", "nope.yaml"], "does not exist"),
        (["plan", str(ROOT)], "is a folder"),
        (["plan", RECIPE, "--json", "--sett", "x"], "--sett"),
        (["plan", RECIPE, "--set", "nonsense"], "dotted.key=value"),
        (["plan", RECIPE, "--set", "target.quantization.scheme=INT8"], "target.quantization.scheme"),
        (["plan", RECIPE, "--set", "device=b200", "--set", "target.quantization.scheme=W8A8"], "SM75 to SM90"),
        (["generate", "x", "hi", "--top-p", "0"], "--top-p 0"),
        (["generate", "x", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "x", "hi", "--seed", "-1"], "--seed"),
        (["generate", "x", "hi \udcff"], "is not UTF-8 text"),
        (["check", "x" * 5000], "File name too long"),
        (["inspect", ""], "must have at least 1 character"),
        (["run", RECIPE, "--out", "x" * 5000], "File name too long"),
        (["generate", "no-such-pair", "hi"], "no-such-pair"),
        (["check", "no-such-pair"], "no-such-pair"),
        (["inspect", "no-such-model"], "no-such-model"),
        (["inspect", str(ROOT)], "config.json"),
        (["inspect", "org/model", "--calibrate", "no-such-data"], "no-such-data"),
        (["inspect", "org/model", "--html", str(ROOT)], "exists and is no file"),
        (["sensitivity", "no-such-model"], "no-such-model"),
        (["sensitivity", "nope.yaml"], "does not exist"),
        (["sensitivity", RECIPE, "--bits", "0"], "--bits 0"),
        (["sensitivity", RECIPE, "--bits", "3", "--set", "target.quantization.group_size=64"], "reach 4.500"),
        (["sensitivity", RECIPE, "--out", str(ROOT)], "exists and is no file"),
        (["inspect", "org/model", "--html", f"{RECIPE}/page.html"], f"({RECIPE} is no folder)"),
        (["sensitivity", RECIPE, "--out", f"{RECIPE}/scores.json"], f"({RECIPE} is no folder)"),
        (["report", "no-such-pair", "--out", f"{RECIPE}/report"], f"({RECIPE} is no folder)"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], part: str, capsys: Capture):
    """Would catch a traceback, a boxed page of usage, or success for input that cannot be used."""
    assert cli.main(arguments) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ")
    assert part in message


def test_version(capsys: Capture):
    """Would catch a version that drifts from the package's."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"qspec {qspec.__version__}\n"
    assert cli.main(["version"]) == 0
    assert "torch" in capsys.readouterr().out


def test_plan_prints_text_or_json(capsys: Capture):
    """Would catch JSON that a program cannot read, or an override that the resolved recipe does not show."""
    ever = ["--set", "budget.minutes=null"]  # how long it takes depends on the cores here
    assert cli.main(["plan", RECIPE, *ever]) == 0
    assert "224 layers" in capsys.readouterr().out
    assert cli.main(["plan", RECIPE, "--json", "--set", "seed=7", *ever]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["seed"] == 7


def test_run_passes_recipe_folder_and_resume(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Would catch arguments that get lost between the command line and the pipeline."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pipeline, "run", lambda *a, **k: calls.append((*a, k)) or a[1] / "pair")
    monkeypatch.setattr(qspec, "obstacles", lambda pair: [])
    assert cli.main(["run", RECIPE, "--set", "benchmark.repeats=9"]) == 0
    assert (
        cli.main(["run", RECIPE, "--out", "here", "--resume", "--whole-tasks", "--long", "--despite", " a test "]) == 0
    )
    told = [(job.benchmark.repeats, job.evaluation.task_minutes, *rest) for job, *rest in calls]
    assert told == [
        (9, 60, Path("runs/llama-3.1-8b-fp8-h100"), False, {"long": False, "despite": ""}),
        (3, None, Path("here"), True, {"long": True, "despite": "a test"}),
    ]
    assert "qspec generate here/pair" in capsys.readouterr().out
    monkeypatch.setattr(qspec, "obstacles", lambda pair: ["KL 22", "loops"])
    assert cli.main(["run", RECIPE, "--out", "here"]) == cli.NOT_READY == 4
    assert "here/pair: made and kept, but not ready: KL 22; loops; " in capsys.readouterr().err


def fake_pair(seen: dict[str, Any], steps: list[StepRecord]) -> Any:
    def generate(prompt: str, on_text: Callable[[str], None], **options: Any) -> Any:
        seen.update(options, prompt=prompt)
        for piece in ("Hel", "lo"):
            on_text(piece)
        return SimpleNamespace(generation=Generation(tokens=[1] * 6, steps=steps, ttft=1.0, seconds=1.0))

    return SimpleNamespace(generate=generate)


def test_generate_streams_and_sums_up(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Would catch options that do not arrive, text mixed with statistics, or wrong arithmetic in the summary."""
    seen: dict[str, Any] = {}
    steps = [StepRecord(4, 3, 0.1, 0.1, 0.0), StepRecord(4, 1, 0.1, 0.1, 0.0)]
    monkeypatch.setattr(qspec, "load_pair", lambda folder, memory_limit: fake_pair(seen, steps))
    options = ["--max-new-tokens", "6", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.9", "--seed", "3"]
    assert cli.main(["generate", "pair", "hi", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello\n"
    assert "6 tokens, 3.0 tokens/s" in printed.err
    assert "4 of 8 drafted tokens accepted (50%), 3.00 per step" in printed.err
    sampling = {"temperature": 0.5, "top_k": 9, "top_p": 0.9}
    assert seen == {"prompt": "hi", "max_new_tokens": 6, "seed": 3, "speculative": True, **sampling}


def test_generate_without_draft_keeps_the_pair_s_sampling(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Would catch `--no-draft` ignored, or command-line defaults that override what the pair was made for."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(qspec, "load_pair", lambda folder, limit: fake_pair(seen, [StepRecord(0, 0, 0.0, 0.1, 0.0)]))
    assert cli.main(["generate", "pair", "hi", "--no-draft"]) == 0
    assert (seen["speculative"], seen["temperature"], seen["top_p"]) == (False, None, None)
    assert "no draft" in capsys.readouterr().err


def test_quantize_makes_one_checkpoint(tmp_path: Path, capsys: Capture):
    """Would catch fields of a recipe that do not arrive, and a verb that makes something else than a recipe does."""
    model, text = tiny_model("llama", tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    sets = [f"calibration.data=[{{name: {text}}}]", "calibration.samples=2", "calibration.length=32"]
    told = ["quantize", str(model), str(tmp_path / "made"), "--scheme", "FP8"]
    for each in [*sets, "quantization.kv={}"]:
        told += ["--set", each]
    assert cli.main(told) == 0
    assert "14 layers quantized" in capsys.readouterr().out
    config = json.loads((tmp_path / "made/config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["kv_cache_scheme"] is not None
    assert config["format"] == "float-quantized"
    for more, part in (
        (["--set", "benchmark.repeats=1"], "benchmark"),
        (["--set", "quantization=W8A8"], "quantization"),
        (["--set", "calibration.sample=2"], "did you mean 'samples'"),
        ([], "exists already"),
    ):
        assert cli.main([*told, *more]) == 2
        (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert part in message


def test_check_prints_what_it_found(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Would catch a damaged pair reported as intact, or remarks that are swallowed."""
    monkeypatch.setattr(qspec, "check", lambda pair: ["3 files match"])
    monkeypatch.setattr(qspec, "obstacles", lambda pair: ["KL 22"])
    monkeypatch.setattr(pair_check, "read_manifest", lambda pair: SimpleNamespace(despite="a test"))
    assert cli.main(["check", "pair"]) == 0
    told = ["3 files match", "not ready: KL 22", "accepted despite that: a test", "pair: intact"]
    assert capsys.readouterr().out.splitlines() == told

    def damaged(pair: Path) -> list[str]:
        raise IntegrityError("target/config.json", "was changed", "fetch an intact copy")

    monkeypatch.setattr(qspec, "check", damaged)
    assert cli.main(["check", "pair"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "target/config.json" in printed.err


def test_inspect_prints_tables_or_json_and_writes_the_page(tmp_path: Path, capsys: Capture):
    """Would catch options that do not arrive, and JSON mixed with text."""
    model, page = str(tiny_model("llama", tmp_path / "model")), tmp_path / "new" / "page.html"
    assert cli.main(["inspect", model, "--html", str(page)]) == 0
    short = capsys.readouterr().out
    assert "Cost of a scheme" in short
    assert "1.mlp.down_proj" in page.read_text(encoding="utf-8")
    assert cli.main(["inspect", model, "--layers"]) == 0
    assert "1.mlp.down_proj" in capsys.readouterr().out.removeprefix(short)
    assert "1.mlp.down_proj" not in short
    assert cli.main(["inspect", model, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 15


def test_sensitivity_prints_tables_or_json_and_keeps_scores(tmp_path: Path, capsys: Capture):
    """Would catch budgets that do not arrive, plans that are not one per budget, and scores that are not kept."""
    model, text, kept = str(tiny_model("llama", tmp_path / "model")), tmp_path / "text.txt", tmp_path / "scores.json"
    text.write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    data = f"calibration={{data: [{{name: '{text}'}}], samples: 4, length: 32}}"
    call = ["sensitivity", model, "--set", data, "--bits", "6", "--bits", "8.5", "--out", str(kept)]
    assert cli.main(call) == 0
    shown = capsys.readouterr().out
    assert "W4A16 g64" in shown
    assert "1.self_attn.{q,k,v}_proj" in shown
    written = kept.read_bytes()
    assert cli.main([*call, "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert kept.read_bytes() == written
    assert [plan["budget"]["bits"] for plan in view["plans"]] == [6, 8.5]
    assert view["plans"][0]["bits"] <= 6
    assert view["plans"][1]["error"] < view["plans"][0]["error"]


def test_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Would catch a page of frames after Ctrl-C, or status 0 for a job that did not finish."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    assert cli.main(["run", RECIPE]) == 130
    assert "--resume" in capsys.readouterr().err


def test_standard_input_must_be_text(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Would catch a decoder's traceback for a binary file piped in as a prompt."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert cli.main(["generate", "pair", "-"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_standard_input_may_begin_with_a_mark(monkeypatch: pytest.MonkeyPatch):
    """Would catch a byte order mark that becomes the prompt's first token."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfHi"), encoding="utf-8"))
    assert cli._read_prompt("-") == "Hi"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device of Linux")
@pytest.mark.parametrize(("output", "status"), [("/dev/full", 2), ("closed pipe", 1)])
def test_output_that_nobody_takes(output: str, status: int):
    """Would catch a traceback, now or at exit, when standard output is full or its reader (`| head`) has left."""
    code = "import sys; from qspec.cli import main; sys.exit(main(['plan', sys.argv[1], '--json']))"
    if output == "/dev/full":
        stdout = os.open(output, os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code, RECIPE], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(stdout)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == (status == 2), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", RECIPE, "--out"],
        ["tune", RECIPE, "--out"],
        ["report", "pair", "--out"],
        ["evaluate", "pair", "--out"],
        ["bench", "pair", "--out"],
        ["quantize", "org/model"],
        ["inspect", "pair", "--html"],
        ["sensitivity", RECIPE, "--out"],
        ["pull", "elsewhere"],
    ],
)
@pytest.mark.parametrize("inside", [".", "report/new"])
def test_nothing_is_written_into_a_pair(arguments: list[str], inside: str, tmp_path: Path, capsys: Capture):
    """Would catch a report or a page that is put into a pair, which from then on fails its check."""
    (tmp_path / "pair.json").touch()
    (tmp_path / "target").mkdir()
    assert cli.main([*arguments, str(tmp_path / inside)]) == 2
    refusal = f"lies in a pair, {tmp_path.resolve()}; choose a place outside of it"
    if (arguments[0], inside) == ("pull", "."):  # it may be the very pair
        refusal = "elsewhere/pair.json: is missing"
    assert refusal in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"pair.json", "target"}


def test_a_terminal_of_few_characters_is_no_traceback(monkeypatch: pytest.MonkeyPatch):
    """Would catch a UnicodeEncodeError in place of a plan, where standard output takes ASCII or Latin-1 alone."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["plan", RECIPE, "--set", "description=fast → small"]) == 0
    assert b"fast \\u2192 small" in written.getvalue()


def test_two_models_cannot_be_proven(capsys: Capture):
    """Would catch `--prove` ignored where there is no pair yet, as if drafts had been shown to be harmless."""
    assert cli.main(["check", "org/target", "org/draft", "--prove"]) == 2
    assert "--prove: runs a pair" in capsys.readouterr().err
