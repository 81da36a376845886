"""Two models, before they become a pair."""

from collections.abc import Iterator
import json
from pathlib import Path

import pytest

from qspec.cli import main
from qspec.models import load
from qspec.planning.compatibility import compatibility
from qspec.planning.planned import resolve
from qspec.planning.remarks import findings, remarks
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Recipe
from tests.gguf_files import write_gguf
from tests.tiny import tiny_model


@pytest.fixture
def models(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    target = tiny_model("llama", tmp_path / "target", num_hidden_layers=4)
    return target, tiny_model("llama", tmp_path / "draft", seed=1, num_hidden_layers=1, vocab_size=304)


def _levels(target: Path, draft: Path) -> dict[str, str]:
    return {finding.value: finding.level for finding in compatibility(str(target), str(draft))}


def test_a_fitting_draft_is_told_its_ratio_and_what_it_may_gain(models: tuple[Path, Path]) -> None:
    """Would catch a padding difference that is taken for another tokenizer, and a ratio that nobody is warned of."""
    found = compatibility(*map(str, models))
    assert not [f for f in found if f.level == "refused"]
    assert any("differ in padding" in f.rule for f in found)
    assert any("times smaller than the target" in f.rule for f in found)
    assert any(f.value.startswith("c = ") and "0.8" in f.rule for f in found)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch vocabularies of equal size whose ids mean other tokens."""
    path = models[1] / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    vocab = state["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(state), encoding="utf-8")
    assert main(["check", str(models[0]), str(models[1])]) == 2
    said = capsys.readouterr()
    assert repr(first) in said.err
    assert "refused: 2 tokens" in said.out


def test_a_base_draft_of_an_instruct_target_is_warned_of(models: tuple[Path, Path]) -> None:
    """Would catch the pair of base and instruct models whose acceptance nobody can explain later."""
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    for path in models[1].glob("chat_template*"):
        path.unlink()
    config = models[1] / "tokenizer_config.json"
    state = json.loads(config.read_text(encoding="utf-8"))
    had = state.pop("chat_template", None)
    config.write_text(json.dumps(state), encoding="utf-8")
    ours = models[0] / "tokenizer_config.json"
    if had is None:
        ours.write_text(json.dumps(json.loads(ours.read_text(encoding="utf-8")) | template), encoding="utf-8")
    assert _levels(*models)["chat template"] == "warning"
    assert [f.level for f in findings(resolve(_recipe(*models))) if f.value == "chat template"] == ["warning"]


def _recipe(target: Path, draft: Path) -> Recipe:
    halves = {"target": {"model": str(target)}, "draft": {"kind": "model", "model": str(draft)}}
    return Recipe.model_validate({"name": "t", **halves, "evaluation": {"tasks": []}})


def test_a_plan_says_of_two_models_what_their_check_says(models: tuple[Path, Path]) -> None:
    """Would catch a warning of two models that `plan` and `run` keep to themselves, and another list for each verb."""
    path = models[1] / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["model"]["merges"] = state["model"]["merges"][:-1]
    path.write_text(json.dumps(state), encoding="utf-8")
    _config(models[1], dtype="bfloat16")
    checked = {str(finding) for finding in compatibility(*map(str, models))}
    planned = {str(finding) for finding in findings(resolve(_recipe(*models)))}
    both = sorted(checked & planned)
    assert any(told.startswith("merges of the tokenizers: differ") for told in both)
    assert any("are stored in different types" in told for told in both)


def test_a_plan_reads_each_model_once(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a header of a large file that is parsed for every question that is asked of it."""
    seen = list[Path]()
    read = load.read_config
    monkeypatch.setattr(load, "read_config", lambda folder: seen.append(folder) or read(folder))
    findings(resolve(_recipe(*models)))
    assert seen == list(models)


def test_a_plan_opens_a_gguf_file_once(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a GGUF header that is parsed for its shape, and again for its type and its tokenizer."""
    source, seen = load.load(ModelSpec(model=str(models[0]))), list[Path]()
    path = Path(write_gguf(models[0].with_name("x.gguf"), source))
    kind = load.GGUFFile
    monkeypatch.setattr(load, "GGUFFile", lambda path: seen.append(path) or kind(path))
    found = findings(resolve(_recipe(path, path)))
    assert [f.level for f in found if "tokenizer" in f.value] == []
    assert seen == [path, path]  # as target, and as draft


def test_tokenizers_of_the_hub_that_are_not_here_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a plan that downloads, or fails where there is no network."""
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    halves = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
    found = findings(resolve(_recipe(*map(Path, halves))))
    (note,) = [f for f in found if f.value.startswith("tokenizers")]
    assert (note.level, note.fix) == ("note", f"compare them now: qspec check {' '.join(halves)}")


def _config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize("half", [0, 1])
def test_a_half_that_is_quantized_already_is_refused_before_compute(
    models: tuple[Path, Path], half: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a plan, or a check of two models, that approves what `run` refuses after minutes."""
    _config(models[half], quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    assert main(["check", str(models[0]), str(models[1])]) == 2
    recipe = tmp_path / "recipe.yaml"
    draft = f"draft: {{kind: model, model: {models[1]}}}"
    recipe.write_text(f"name: t\ntarget: {{model: {models[0]}}}\n{draft}\n")
    assert main(["plan", str(recipe)]) == 2
    assert capsys.readouterr().err.count("is already quantized (method 'compressed-tensors')") == 2


def test_a_float16_source_is_warned_of_beside_fp8(models: tuple[Path, Path]) -> None:
    """Would catch `dtype: auto`, which keeps float16 and with it scales that lose bits, approved without a word."""
    _config(models[0], dtype="float16")
    half = {"scheme": "FP8"}
    fields = {"name": "t", "device": "h100", "target": {"model": str(models[0]), "quantization": half}}
    recipe = Recipe.model_validate(fields | {"draft": {"kind": "ngram"}, "evaluation": {"tasks": []}})
    warned = [f.value for f in remarks(resolve(recipe)) if f.level == "warning"]
    assert f"{models[0]} for FP8" in warned
    bfloat16 = recipe.model_copy(update={"dtype": "bfloat16"})
    assert f"{models[0]} for FP8" not in [f.value for f in remarks(resolve(bfloat16))]
