"""The main job, end to end, on tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
import torch

import qspec
from qspec import cli, pipeline, provenance
from qspec.bridges import compressed
from qspec.cli import main
from qspec.errors import OutputError, QspecError, RecipeError, SourceError
from qspec.measure import arms
from qspec.nn.eager.decoder import Decoder
from qspec.pair import open as open_pair
from qspec.pair.check import read_manifest
from qspec.progress import Progress
from qspec.provenance import sole_writer
from qspec.publish import prepare
from qspec.records import QuantizedModel
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import EvaluationSpec, Recipe, TaskSpec
from qspec.schema.results import Accuracy, Results
from qspec.tune.search import tune
from tests.jobs import INT4, INT8, NGRAM_DRAFT, SELF_DRAFT, job
from tests.served import IDS, logits, transformers_model
from tests.tiny import TEXT, tiny_model

QUIET = Progress(quiet=True)
ENDS = ("html", "md", "json", "csv")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("other"), seed=1, num_hidden_layers=1)


def _drafts(other: Path) -> dict[str, dict[str, Any]]:
    return {
        "self": SELF_DRAFT,
        "truncated": SELF_DRAFT | {"layers": 1},
        "ngram": NGRAM_DRAFT,
        "model": {"kind": "model", "model": str(other), "quantization": INT4},
    }


@pytest.mark.parametrize("kind", ["self", "truncated", "ngram", "model"])
def test_run_makes_a_pair_whose_drafts_change_nothing(kind: str, model: Path, other: Path, tmp_path: Path) -> None:
    """Catches a draft kind that does not survive the way from recipe to pair, or that changes greedy output."""
    out = tmp_path / "out"
    folder = pipeline.run(job(tmp_path, model, _drafts(other)[kind]), out, progress=QUIET, despite="to be safe")
    assert qspec.check(folder)
    assert (
        read_manifest(folder).despite == ""
    )  # a sound pair carries no excuse, which a later fault would be covered by
    assert qspec.obstacles(folder) == []
    if kind == "self":  # what the plan warns of is said at the start, logged, and kept with the numbers
        told = "KV formats fp8_e4m3 (target) and auto (draft)"
        assert f"warning: {told}" in (out / "run.log").read_text(encoding="utf-8")
        assert told in (out / "report/report.md").read_text(encoding="utf-8").replace("\\", "")
        assert any(warning.startswith(told) for warning in read_manifest(folder).warnings)
        assert told in prepare(folder, str(tmp_path / "there")).card.replace("\\", "")
    assert {p.name for p in (out / "report").iterdir()} == {*(f"report.{end}" for end in ENDS), "results.json"}
    assert not (out / "work").exists()
    results = Results.read(out / "report" / "results.json")
    assert results.speed is not None
    assert all(e.equal == e.n == 2 for e in results.speed.equality)
    pair = qspec.load_pair(folder)
    drafted, plain = (pair.generate("The quick", 24, speculative=on) for on in (True, False))
    assert drafted.generation.tokens == plain.generation.tokens
    assert drafted.text == plain.text


def test_a_pair_for_a_gpu_is_measured_on_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark or an evaluation that the GPU's engine cannot follow, and a speed that no GPU has shown."""
    recipe = job(tmp_path, model, device="h200", dtype="float32")
    without = pipeline.run(recipe, tmp_path / "without", progress=QUIET)
    assert Results.read(without.parent / "report" / "results.json").speed is None
    monkeypatch.setattr(open_pair, "gpu_for", lambda device: torch.device("cpu"))
    folder = pipeline.run(recipe, tmp_path / "out", progress=QUIET)
    results = Results.read(folder.parent / "report" / "results.json")
    assert results.environment["engine"].startswith("CUDA engine")
    assert results.speed is not None
    assert all(e.equal == e.n == 2 for e in results.speed.equality)


def test_sections_that_are_null_measure_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a stage that runs although it is switched off, or whose absence reads like a result."""
    told = {"evaluation": None, "benchmark": None}
    fields = job(tmp_path, model).as_dict() | told
    recipe = Recipe.of(fields, (), "recipe.yaml")
    monkeypatch.setattr(pipeline, "bench", lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(arms, "evaluate", lambda *_, **__: pytest.fail("evaluated"))
    folder = pipeline.run(recipe, tmp_path / "out", progress=QUIET)
    results = Results.read(tmp_path / "out" / "report" / "results.json")
    assert (results.speed, results.accuracy) == (None, Accuracy())
    page = (tmp_path / "out" / "report" / "report.md").read_text("utf-8")
    assert "Speed was not measured." in page
    assert "Accuracy was not measured." in page
    assert cli.main(["report", str(folder), "--fail-if", "speedup<1"]) == 2
    assert "was not measured" in capsys.readouterr().err
    assert Recipe.read(tmp_path / "out" / "recipe.yaml") == recipe
    assert pipeline.run(recipe, tmp_path / "out", resume=True, progress=QUIET) == folder


def test_a_job_of_days_waits_for_a_word(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches compute that starts on an estimate above the budget, and a run that has begun and is refused for it."""
    recipe = job(tmp_path, model, budget={"minutes": 1e-9}, benchmark=None)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "load_originals", lambda *_: pytest.fail("loaded"))
        with pytest.raises(RecipeError, match=r"budget\.minutes 1e-09: .* are estimated, .* qspec run --long"):
            pipeline.run(recipe, tmp_path / "out", progress=QUIET)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "package", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(recipe, tmp_path / "out", progress=QUIET, long=True)
    assert pipeline.run(recipe, tmp_path / "out", resume=True, progress=QUIET).exists()


def test_a_run_resumed_elsewhere_asks_what_it_began_with(model: Path, tmp_path: Path) -> None:
    """Catches a run that cannot go on because this machine has more cores and would ask more questions."""
    recipe = job(tmp_path, model, evaluation={"fidelity": None})
    (tmp_path / "out").mkdir()
    begun = recipe.model_copy(update={"evaluation": EvaluationSpec(fidelity=None, tasks=(TaskSpec(limit=3),))})
    (tmp_path / "out" / "recipe.yaml").write_text(begun.dump(), encoding="utf-8")
    assert pipeline._as_begun(recipe, tmp_path / "out") == begun
    own = recipe.model_copy(update={"evaluation": EvaluationSpec(fidelity=None, tasks=(TaskSpec(limit=9),))})
    assert pipeline._as_begun(own, tmp_path / "out") == own


def test_fast_kernels_generate_what_their_twins_do(model: Path, tmp_path: Path) -> None:
    """Catches an engine whose fast path drifts from the reference on the packaged files."""
    folder = pipeline.run(job(tmp_path, model), tmp_path / "out", progress=QUIET)
    fast, twin = (pipeline.open_pair(folder, kernels) for kernels in ("auto", "reference"))
    tokens = torch.arange(5, 60)
    got, want = fast.target.forward(tokens), twin.target.forward(tokens)
    # a last-bit difference may flip an INT8 activation or FP8 cache code (1/127, 1/16 of a value) here and there
    assert (got - want).norm() < 0.03 * want.norm()


def test_halves_load_in_transformers_and_agree_with_our_engine(model: Path, tmp_path: Path) -> None:
    """Catches a checkpoint that only we can read, or that means something else to transformers."""
    pair = qspec.load_pair(pipeline.run(job(tmp_path, model), tmp_path / "out", progress=QUIET))
    assert pair.draft.model is not None
    halves = {"target": pair.target, "draft": Decoder.from_quantized(pair.draft.model)}
    for name, decoder in halves.items():
        decoder.truncate(0)
        theirs, ours = logits(transformers_model(pair.folder / name)), decoder.forward(IDS[0])
        # transformers scales INT8 activations by amax / 127.5, we and vLLM by amax / 127, so all codes differ a little
        # (5.6 % here); our INT4 kernel computes in bfloat16
        assert (ours - theirs).norm() < 0.08 * theirs.norm()


def test_sampling_is_reproducible_and_streams_its_text(model: Path, tmp_path: Path) -> None:
    """Catches hidden random state, and streamed pieces that do not add up to the answer."""
    pair = qspec.load_pair(pipeline.run(job(tmp_path, model), tmp_path / "out", progress=QUIET))
    pieces: list[str] = []
    first = pair.generate("Numbers", 24, temperature=1.0, seed=3, on_text=pieces.append)
    again = pair.generate("Numbers", 24, temperature=1.0, seed=3)
    assert first.generation.tokens == again.generation.tokens
    assert "".join(pieces) == first.text
    assert first.stats is not None
    assert first.stats.tokens_per_step >= 1
    with pytest.raises(RecipeError, match="seed"):
        pair.generate("Numbers", 4, seed=10**30)


@pytest.mark.parametrize("stage", ["quantize_halves", "package", "measure_accuracy", "_bench", "report", "seal"])
def test_resume_after_a_death_in_any_stage(
    stage: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stage that leaves halves behind, or work that a resumed run does again or skips."""
    recipe, out = job(tmp_path, model), tmp_path / "out"

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, stage, die)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(recipe, out, progress=QUIET)
    resumed = pipeline.run(recipe, out, resume=True, progress=QUIET)
    whole = pipeline.run(recipe, tmp_path / "whole", progress=QUIET)
    for file in ("target/model.safetensors", "draft/model.safetensors"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    assert qspec.check(resumed)
    assert pipeline.run(recipe, out, resume=True, progress=QUIET) == resumed


def test_folder_with_a_run_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    """Catches a second run that destroys the first, and a resume that mixes two recipes."""
    recipe, out = job(tmp_path, model, NGRAM_DRAFT), tmp_path / "out"
    pipeline.run(recipe, out, progress=QUIET)
    before = (out / "pair" / "pair.json").read_bytes()
    with pytest.raises(OutputError, match="holds a run already"):
        pipeline.run(recipe, out, progress=QUIET)
    with pytest.raises(OutputError, match="another recipe"):
        pipeline.run(recipe.model_copy(update={"seed": 1}), out, resume=True, progress=QUIET)
    assert (out / "pair" / "pair.json").read_bytes() == before


def _with_an_outlier_channel(folder: Path) -> Path:
    """A model whose float output is as before, and whose INT8 inputs hold one channel and nothing else."""
    path, channel, by = folder / "model.safetensors", 5, 2e4
    tensors = load_file(path)
    parts = {"input_layernorm": "self_attn.{q,k,v}_proj", "post_attention_layernorm": "mlp.{gate,up}_proj"}
    for layer in ("model.layers.0", "model.layers.1"):
        for norm, linears in parts.items():
            tensors[f"{layer}.{norm}.weight"][channel] *= by
            block, names = linears.removesuffix("}_proj").split(".{")
            for name in names.split(","):
                tensors[f"{layer}.{block}.{name}_proj.weight"][:, channel] /= by
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _verb(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and all output of a command."""
    status = main(list(arguments))
    said = capsys.readouterr()
    return status, said.out + said.err


def test_gibberish_is_kept_and_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a pair that writes one token for ever, KL 1 of at most .2, and is ready, intact and published."""
    model = _with_an_outlier_channel(tiny_model("llama", tmp_path / "model"))
    recipe = job(tmp_path, model, NGRAM_DRAFT, target={"model": str(model), "quantization": {"scheme": "W8A8"}})
    (tmp_path / "recipe.yaml").write_text(recipe.dump(), encoding="utf-8")
    out, there = tmp_path / "out", tmp_path / "there"
    run, pair = ("run", str(tmp_path / "recipe.yaml"), "--out", str(out)), out / "pair"
    status, said = _verb(capsys, *run)
    assert status == 4
    assert "made and kept, but not ready: the target: KL " in said
    assert "short answers are empty or repeat themselves" in said
    assert "not ready: the target: KL " in (out / "run.log").read_text(encoding="utf-8")
    assert '<li class="danger"><b>not ready</b>' in (out / "report/report.html").read_text(encoding="utf-8")
    status, said = _verb(capsys, "check", str(pair))
    assert (status, "not ready: the target: KL " in said, "intact" in said) == (0, True, True)
    status, said = _verb(capsys, "publish", str(pair), "--to", str(there))
    assert (status, "is not ready, and not to be published" in said, there.exists()) == (2, True, False)

    status, said = _verb(capsys, *run, "--resume", "--despite", "a demonstration")
    assert (status, "accepted although not ready" in said) == (0, True)
    manifest = read_manifest(pair)
    assert manifest.despite == "a demonstration"
    assert "a demonstration" in (pair / str(manifest.report) / "report.md").read_text(encoding="utf-8")
    status, said = _verb(capsys, "check", str(pair))
    assert (status, "accepted despite that: a demonstration" in said, "not ready: " in said) == (0, True, True)
    status, _ = _verb(capsys, "publish", str(pair), "--to", str(there))
    assert status == 0
    assert "a demonstration (the target: KL " in (there / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("despite", ["", "it is for a test of kernels"])
def test_quality_that_was_not_measured_is_no_pass(
    despite: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a recipe that switches the measurement off and gets a ready pair for it, or a reason that is lost."""
    recipe = job(tmp_path, model, NGRAM_DRAFT, evaluation={"fidelity": None, "tasks": []})
    (tmp_path / "recipe.yaml").write_text(recipe.dump(), encoding="utf-8")
    run = ["run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")]
    status, said = _verb(capsys, *run, *(["--despite", despite] if despite else []))
    assert (status, "quality was not measured" in said) == (0 if despite else 4, True)
    assert read_manifest(tmp_path / "out/pair").despite == despite
    assert qspec.obstacles(tmp_path / "out/pair") == ["quality was not measured (evaluation.fidelity)"]


@pytest.mark.parametrize(("half", "kind"), [("draft", "self"), ("target", "truncated")])
def test_a_spoilt_half_is_not_ready(
    half: str, kind: str, model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a wrong scale in either half: the original drafted with the same spoilt copy, so nothing was lost."""
    made = pipeline.quantize_halves

    def spoilt(*arguments: Any) -> list[QuantizedModel]:
        halves = dict(zip(("target", "draft"), made(*arguments), strict=True))
        name = "model.layers.0.mlp.down_proj"
        linear = halves[half].linears[name]
        linear = replace(linear, weight=replace(linear.weight, scale=64 * linear.weight.scale))
        halves[half] = replace(halves[half], linears={**halves[half].linears, name: linear})
        return list(halves.values())

    quantization = {"scheme": "W8A8"}
    draft = _drafts(other)[kind] | {"quantization": quantization}
    recipe = job(tmp_path, model, draft, target={"model": str(model), "quantization": quantization})
    monkeypatch.setattr(pipeline, "quantize_halves", spoilt)
    found = qspec.obstacles(pipeline.run(recipe, tmp_path / "spoilt", progress=QUIET))
    assert found
    assert all(reason.startswith(f"the {half}: ") for reason in found)


def test_two_jobs_in_one_folder(model: Path, tmp_path: Path) -> None:
    """Catches two runs that tidy each other's half-written folders away, hours after both began."""
    out, training = tmp_path / "out", {"layers": 1, "positions": 64}
    draft = {"kind": "model", "model": str(out / "draft"), "training": training}
    tried = [lambda: pipeline.run(job(tmp_path, model, NGRAM_DRAFT), out, progress=QUIET)]
    tried += [lambda: pipeline.train_draft(job(tmp_path, model, draft), out, QUIET)]
    tried += [lambda: tune(job(tmp_path, model, NGRAM_DRAFT), out, QUIET)]
    with sole_writer(out):
        for again in tried:
            with pytest.raises(OutputError, match="is written by another qspec that runs now; wait"):
                again()
        assert list(out.iterdir()) == []
    with sole_writer(out):
        pass


def test_refusals_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    """Catches an output folder that exists although the job never started."""
    out = tmp_path / "out"
    odd = {"model": str(model), "quantization": INT4 | {"group_size": 48}}
    with pytest.raises(QspecError, match="group"):
        pipeline.run(job(tmp_path, model, target=odd), out, progress=QUIET)
    with pytest.raises(SourceError):
        pipeline.run(job(tmp_path, tmp_path / "absent"), out, progress=QUIET)
    missing = {"fidelity": {"data": str(tmp_path / "absent.txt")}, "tasks": []}
    with pytest.raises(SourceError, match=r"absent\.txt"):
        pipeline.run(job(tmp_path, model, evaluation=missing), out, progress=QUIET)
    assert not out.exists()


@pytest.mark.parametrize("verb", ["run", "train-draft", "tune", "quantize"])
@pytest.mark.parametrize("way", ["file", "dangling link", "read-only"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_loaded(
    verb: str, way: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a model of many gigabytes that is loaded, or hours of compute, before the output folder is found bad."""
    parent = tmp_path / "parent"
    if way == "file":
        parent.touch()
    elif way == "dangling link":
        parent.symlink_to("nowhere")
    else:  # as anybody but root sees a folder without permission, and everybody a file system that is read-only
        parent.mkdir()
        monkeypatch.setattr(provenance.os, "access", lambda path, _: Path(path) != parent)

    def loaded(spec: ModelSpec) -> None:
        raise AssertionError(f"{spec.model} was loaded")

    monkeypatch.setattr(pipeline, "load", loaded)
    out = parent / "out"
    draft = {"kind": "model", "model": str(out / "draft"), "training": {"layers": 1, "positions": 64}}
    jobs: dict[str, Callable[[], object]] = {
        "run": lambda: pipeline.run(job(tmp_path, model), out, progress=QUIET),
        "train-draft": lambda: pipeline.train_draft(job(tmp_path, model, draft), out, QUIET),
        "tune": lambda: tune(job(tmp_path, model), out, QUIET),
        "quantize": lambda: qspec.quantize(str(model), out, scheme="FP8_DYNAMIC"),
    }
    with pytest.raises(OutputError, match=rf"/out: cannot be .*{parent} (is no folder|takes no new files)"):
        jobs[verb]()
    assert not out.exists()


def test_a_folder_that_servers_misread_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches hours of compute in front of a pair that may not be packaged under its name."""
    monkeypatch.setattr(pipeline, "load_originals", None)
    with pytest.raises(OutputError, match="vLLM reads 'eagle-' in a path as a kind of draft; choose another folder"):
        pipeline.run(job(tmp_path, model), tmp_path / "eagle-1", progress=QUIET)


def test_draft_with_another_tokenizer_is_refused_before_compute(model: Path, tmp_path: Path) -> None:
    """Catches a draft whose ids mean other tokens: equal sizes, and an acceptance of nothing."""
    import json

    foreign = tiny_model("llama", tmp_path / "foreign", seed=1)
    path = foreign / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    first, second = [token for token, index in vocab.items() if index in (50, 51)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content), encoding="utf-8")
    out = tmp_path / "out"
    draft = {"kind": "model", "model": str(foreign), "quantization": INT4}
    with pytest.raises(RecipeError, match="2 tokens"):
        pipeline.run(job(tmp_path, model, draft), out, progress=QUIET)
    assert not out.exists()


def test_quantize_writes_one_checkpoint(model: Path, tmp_path: Path) -> None:
    """Catches a Python API that differs from what recipes do."""
    text = tmp_path / "calibration.txt"
    recipe = job(tmp_path, model)
    made = qspec.quantize(
        str(model), tmp_path / "alone", calibration={"data": [{"name": str(text)}], "samples": 4, "length": 32}, **INT8
    )
    pair = pipeline.run(recipe, tmp_path / "out", progress=QUIET)
    assert (tmp_path / "alone" / "model.safetensors").read_bytes() == (pair / "target/model.safetensors").read_bytes()
    assert len(made.linears) == 14
    with pytest.raises(OutputError, match="exists already"):
        qspec.quantize(str(model), tmp_path / "alone", scheme="FP8_DYNAMIC")


def test_error_feedback_reaches_the_checkpoint_and_the_notes(model: Path, tmp_path: Path) -> None:
    """Catches `method: gptq` that rounds to nearest after all."""
    (tmp_path / "text.txt").write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    calibration = {"data": [{"name": str(tmp_path / "text.txt")}], "samples": 4, "length": 64}
    fields: dict[str, Any] = {"scheme": "W4A16", "group_size": 32, "calibration": calibration}
    plain = qspec.quantize(str(model), tmp_path / "plain", **fields)
    fed = qspec.quantize(str(model), tmp_path / "fed", method="gptq", **fields)
    assert plain.notes == ()
    assert fed.notes[0].startswith("GPTQ: ")
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(fed.linears[name].weight.scale, plain.linears[name].weight.scale)
    written = compressed.read(tmp_path / "fed").linears[name].weight.codes
    assert torch.equal(written, fed.linears[name].weight.codes)
    assert not torch.equal(written, plain.linears[name].weight.codes)


def test_gptq_is_what_the_recipe_gets(model: Path, tmp_path: Path) -> None:
    """Catches a method that a recipe may ask for and the job leaves out."""
    text = {"data": [{"name": str(tmp_path / "calibration.txt")}], "samples": 4, "length": 32}
    job(tmp_path, model)  # writes the text
    made = {
        method: qspec.quantize(str(model), tmp_path / method, calibration=text, method=method, **INT4)
        for method in ("rtn", "gptq")
    }
    pairs = [(made["rtn"].linears[name].weight, made["gptq"].linears[name].weight) for name in made["rtn"].linears]
    assert all(torch.equal(rounded.scale, fed_back.scale) for rounded, fed_back in pairs)
    assert any(not torch.equal(rounded.codes, fed_back.codes) for rounded, fed_back in pairs)
    assert any("GPTQ" in note for note in made["gptq"].notes)


def test_recipe_reads_back_from_the_output_folder(model: Path, tmp_path: Path) -> None:
    """Catches an output folder that cannot say how it was made."""
    recipe = job(tmp_path, model, NGRAM_DRAFT)
    pipeline.run(recipe, tmp_path / "out", progress=QUIET)
    assert Recipe.read(tmp_path / "out" / "recipe.yaml") == recipe
