"""The speed of a finished pair, measured anew where it is."""

from dataclasses import replace
import json
from pathlib import Path
import re
import shutil

import pytest

from qspec.cli import main
from qspec.measure import bench as stage
from qspec.pair.check import measured, read_manifest, stale
from qspec.pair.package import package
from qspec.provenance import sole_writer
from qspec.schema.drafts import SelfDraft
from qspec.schema.recipe import Recipe
from qspec.schema.results import Results
from tests.pairs import change, halves, measured_of, put, recipe
from tests.tiny import TEXT

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _small_memory_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BANDWIDTH_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair, the model that it was made from, and prompts."""
    folder = tmp_path_factory.mktemp("made")
    prompts = [{"text": f"The quick brown fox {i}", "category": "prose"} for i in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    benchmark = {"prompts": str(folder / "prompts.jsonl"), "per_category": 2, "max_new_tokens": 8, "repeats": 1}
    source = {"model": str(folder / "source"), "quantization": recipe().target.quantization.model_dump(mode="json")}
    package(*halves(folder / "source"), recipe(target=source, benchmark=benchmark), folder)
    return folder


def test_a_finished_pair_is_timed_and_proved_anew(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a pair that has to be made again to be timed elsewhere, and one that measuring changes."""
    before = (made / "pair/pair.json").read_bytes()
    assert main(["bench", str(made / "pair"), "--out", str(tmp_path / "new")]) == 0
    assert re.search("decodes at|over original: too few prompts to say: 2", capsys.readouterr().out)
    found = Results.read(tmp_path / "new/results.json")
    assert found.speed is not None
    names = ["original", "original + draft", "quantized", "quantized + draft", "quantized + prompt lookup"]
    assert [arm.arm for arm in found.speed.arms] == names
    assert [(proof.n, proof.equal) for proof in found.speed.equality] == [(2, 2)] * 3
    assert found.speed.arms[2].weight_bytes < found.speed.arms[0].weight_bytes / 2
    assert found.speed.provenance is not None
    assert {path.partition("/")[0] for path in found.speed.provenance.files} == {"target", "draft"}
    assert (made / "pair/pair.json").read_bytes() == before
    assert main(["report", str(tmp_path / "new"), "--fail-if", "lossless<1", "--fail-if", "tokens_s<0.001"]) == 0
    assert main(["bench", str(made / "pair"), "--out", str(tmp_path / "new")]) == 2


def test_a_pair_is_timed_without_its_original(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a fetched pair that cannot be timed where the model that it was made from is not, or does not fit."""
    alone = Path(shutil.copytree(made, tmp_path / "alone", ignore=shutil.ignore_patterns("source")))
    (made / "source").rename(made / "moved")
    try:
        told = ["bench", str(alone / "pair"), "--out", str(tmp_path / "new")]
        assert main(told) == 2
        assert "--no-original" in capsys.readouterr().err
        assert main([*told, "--no-original"]) == 0
    finally:
        (made / "moved").rename(made / "source")
    found = Results.read(tmp_path / "new/results.json")
    assert found.speed is not None
    assert [arm.arm for arm in found.speed.arms] == ["quantized", "quantized + draft", "quantized + prompt lookup"]
    assert "The original was not run" in (tmp_path / "new/report.md").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path / "new"), "--fail-if", "speedup<1"]) == 2  # not measured is no pass
    assert main(["report", str(tmp_path / "new"), "--fail-if", "speculation<0.001"]) == 0


def test_other_weights_are_not_taken_for_the_original(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a speedup and a KL over a model that has changed at its source since."""
    weights = made / "source/model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-4] + bytes(4))
        for verb in ("bench", "evaluate"):
            assert main([verb, str(made / "pair"), "--out", str(tmp_path / verb)]) == 2
            assert "the pair was made from" in capsys.readouterr().err
    finally:
        weights.write_bytes(kept)


def test_only_what_leaves_the_halves_alone_can_be_changed(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a draft length that does not arrive, and numbers under the name of a pair that nobody has."""
    told = ["bench", str(made / "pair"), "--no-original", "--out", str(tmp_path / "new")]
    assert main([*told, "--set", "draft.layers=2"]) == 2
    assert "changes more than the benchmark and the speculation" in capsys.readouterr().err
    assert main([*told, "--set", "speculation.draft_length.k=1", "--set", "benchmark.max_new_tokens=6"]) == 0
    found = Results.read(tmp_path / "new/results.json")
    assert found.speed is not None
    assert {len(a.per_position) for a in found.speed.acceptance if a.drafted} == {1}
    assert found.recipe["speculation"]["draft_length"]["k"] == 1
    manifest = read_manifest(made / "pair")
    assert manifest.recipe["speculation"]["draft_length"]["k"] == 3


def test_another_device_is_not_timed_here(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch the speed of a CPU under the name of a GPU."""
    source = {"model": str(made / "source"), "quantization": recipe().target.quantization.model_dump(mode="json")}
    package(*halves(tmp_path / "source"), recipe(target=source, device="h100"), tmp_path)
    assert main(["bench", str(tmp_path / "pair"), "--out", str(tmp_path / "new")]) == 2
    assert "device h100: is what the pair is for" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_pair_can_carry_what_was_measured_later(made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a pair whose speed and proof can only be those of where it was made, or whose accuracy is lost."""
    pair = Path(shutil.copytree(made / "pair", tmp_path / "pair"))
    before = measured_of(pair, _recipe_of(pair)).model_copy(update={"speed": None})
    put(before, pair, tmp_path / "report")
    assert read_manifest(pair).lossless is None
    told = ["bench", str(pair), "--no-original", "--keep", "--out"]
    assert main([*told, str(tmp_path / "no"), "--set", "speculation.draft_length.k=1"]) == 2
    assert "changes more than the benchmark" in capsys.readouterr().err
    assert main([*told, str(tmp_path / "new")]) == 0
    assert main(["check", str(pair)]) == 0
    manifest = read_manifest(pair)
    found = measured(pair, manifest)
    assert found is not None
    assert found.accuracy == before.accuracy
    assert found == Results.read(tmp_path / "new/results.json")
    assert stale(manifest, found) == []
    assert manifest.lossless is not None
    assert [proof["equal"] for proof in manifest.lossless["equality"]] == [2, 2]
    assert {kept["metric"] for kept in manifest.measurements} > {"acceptance rate alpha", "KL(original || quantized)"}
    assert main([*told, str(tmp_path / "again")]) == 0
    again = measured(pair, read_manifest(pair))
    assert again is not None
    assert again.accuracy == before.accuracy
    with sole_writer(pair):
        assert main([*told, str(tmp_path / "third")]) == 2
        assert "is written by another qspec" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def _recipe_of(pair: Path) -> Recipe:
    return Recipe.model_validate(read_manifest(pair).recipe)


def _publish(pair: Path, to: Path) -> int:
    return main(["publish", str(pair), "--to", str(to)])


@pytest.fixture
def whole(made: Path, tmp_path: Path) -> Path:
    """A copy of the pair, whose accuracy and then speed were measured."""
    pair = Path(shutil.copytree(made / "pair", tmp_path / "pair"))
    assert _evaluate(pair, tmp_path, "text") == 0
    assert _bench(pair, tmp_path, "first") == 0
    return pair


def _evaluate(pair: Path, folder: Path, text: str) -> int:
    path = folder / f"{text}.txt"
    path.write_text("\n\n".join([TEXT] * 12), encoding="utf-8")
    fidelity = json.dumps({"data": str(path), "windows": 2, "length": 32})
    command = ["--keep", "--set", f"evaluation.fidelity={fidelity}", "--set", "evaluation.tasks=[]"]
    return main(["evaluate", str(pair), *command, "--out", str(folder / f"of {text}")])


def _bench(pair: Path, folder: Path, name: str) -> int:
    return main(["bench", str(pair), "--no-original", "--keep", "--out", str(folder / name)])


def test_speed_says_nothing_of_a_changed_target_s_accuracy(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch a target whose scales were multiplied by 64, published with the accuracy of the one before once its
    speed was measured again; and accuracy that cannot be measured again.
    """
    assert _publish(whole, tmp_path / "as it was") == 0
    change(whole, "target", "down_proj.weight_scale", 64.0)
    assert _publish(whole, tmp_path / "no") == 2
    assert _bench(whole, tmp_path, "again") == 0
    assert "still to be measured again: fidelity on text.txt" in capsys.readouterr().err
    parts = "fidelity on text.txt, short answers, the draft's fidelity"
    stays = f"{parts}: target/model.safetensors is not the file that was measured"
    assert _publish(whole, tmp_path / "no") == 2
    assert stays in capsys.readouterr().err
    assert main(["check", str(whole)]) == 0
    assert f"not ready: {stays}" in capsys.readouterr().out
    assert main(["report", str(whole)]) == 0
    assert "not all numbers of one pair: target/model.safetensors changed" in " ".join(capsys.readouterr().out.split())
    kept = {one["metric"] for one in read_manifest(whole).measurements}
    assert "KL(original || quantized)" not in kept
    assert "acceptance rate alpha" in kept
    (tmp_path / "of text").rename(tmp_path / "before")
    assert _evaluate(whole, tmp_path, "text") == 0
    assert main(["check", str(whole)]) == 0
    assert "stale" not in capsys.readouterr().out
    results = measured(whole, read_manifest(whole))
    assert results is not None
    assert results.speed == Results.read(tmp_path / "again/results.json").speed
    assert _publish(whole, tmp_path / "no") == 2
    assert "the target: KL " in capsys.readouterr().err  # measured anew, and far from the model that it was made from


@pytest.mark.parametrize("half", ["draft", "target"])
def test_accuracy_that_is_measured_again_says_nothing_of_the_speed(half: str, whole: Path, tmp_path: Path) -> None:
    """Would catch the acceptance of another draft, or the proof of another target, kept as this pair's."""
    change(whole, half, "_scale", 1.5)
    assert _evaluate(whole, tmp_path, "other") == 0
    manifest = read_manifest(whole)
    assert manifest.lossless is None
    results = measured(whole, manifest)
    assert results is not None
    names = [reason.partition(":")[0] for reason in stale(manifest, results)]
    assert names == (["speed"] if half == "draft" else ["fidelity on text.txt, speed"])
    assert [text.data for text in results.accuracy.texts] == ["other.txt", "text.txt"]
    assert _publish(whole, tmp_path / "no") == 2


def test_answers_of_what_may_be_another_model_are_not_kept(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch the score of any server at all, put into a pair as its own."""
    command = ["evaluate", str(whole), "--keep", "--out", str(tmp_path / "new"), "--set", "evaluation.fidelity=null"]
    task = ["--set", "evaluation.tasks=[{name: gsm8k, limit: 1}]"]
    servers = ["--original", "http://127.0.0.1:9/v1", "--quantized", "http://127.0.0.1:9/v1"]
    assert main([*command, *task, "--backend", "api", *servers]) == 2
    assert "does not show that the server runs this pair's files; leave out --keep" in capsys.readouterr().err
    assert main([*command, *task, "--backend", "vllm", "--", "--kv-cache-dtype", "auto"]) == 2
    assert "is given by hand" in capsys.readouterr().err


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_proof_names_drafts_that_never_stand(spoilt: bool, made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Would catch `--prove` that finds no accepted token and calls the pair intact, or a bench that says nothing."""
    target, _ = halves(tmp_path / "source")
    draft = target
    if spoilt:  # the least likely token comes first
        draft = replace(target, tensors={**target.tensors, "model.norm.weight": -target.tensors["model.norm.weight"]})
    source = {"model": str(tmp_path / "source"), "quantization": recipe().target.quantization.model_dump(mode="json")}
    benchmark = {"prompts": str(made / "prompts.jsonl"), "per_category": 2, "max_new_tokens": 48, "repeats": 1}
    draft_spec = SelfDraft(kind="self", quantization=recipe().target.quantization)
    asked = recipe(target=source, benchmark=benchmark).model_copy(update={"draft": draft_spec})
    pair = package(target, draft, asked, tmp_path)
    assert main(["check", str(pair), "--prove"]) == (2 if spoilt else 0)
    said = capsys.readouterr()
    assert ("the draft is spoilt, or belongs to another target" in said.err) == spoilt
    assert ("drafted tokens stand" in said.out) != spoilt
    assert main(["bench", str(pair), "--no-original", "--out", str(tmp_path / "new")]) == 0
    assert ("the draft is spoilt" in (tmp_path / "new/report.md").read_text(encoding="utf-8")) == spoilt
