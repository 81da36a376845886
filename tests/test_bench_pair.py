"""The speed of a finished pair, measured anew where it is."""

import json
from pathlib import Path
import shutil

import pytest

from qspec.cli import main
from qspec.measure import bench as stage
from qspec.pair.check import measured, read_manifest, weight_digests
from qspec.pair.package import package, seal
from qspec.report.page import report
from qspec.schema.results import Results
from tests.example_results import example
from tests.pairs import halves, recipe

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
    assert "decodes at" in capsys.readouterr().out
    found = Results.read(tmp_path / "new/results.json")
    assert found.speed is not None
    names = ["original", "original + draft", "quantized", "quantized + draft", "quantized + prompt lookup"]
    assert [arm.arm for arm in found.speed.arms] == names
    assert [(proof.n, proof.equal) for proof in found.speed.equality] == [(2, 2)] * 3
    assert found.speed.arms[2].weight_bytes < found.speed.arms[0].weight_bytes / 2
    assert found.digests
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
    assert any("original was not run" in limit for limit in found.limits)
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
    before = example().model_copy(update={"digests": weight_digests(read_manifest(pair)), "speed": None})
    report(before, tmp_path / "report")
    seal(pair, before.model_dump(mode="json"), tmp_path / "report")
    assert read_manifest(pair).lossless is None
    told = ["bench", str(pair), "--no-original", "--keep", "--out"]
    assert main([*told, str(tmp_path / "no"), "--set", "speculation.draft_length.k=1"]) == 2
    assert "changes more than the benchmark" in capsys.readouterr().err
    assert main([*told, str(tmp_path / "new")]) == 0
    assert main(["check", str(pair)]) == 0
    found, manifest = measured(pair), read_manifest(pair)
    assert found is not None
    assert found.accuracy == before.accuracy
    assert found.speed == Results.read(tmp_path / "new/results.json").speed
    assert found.limits[0].startswith("Accuracy was measured earlier (")
    assert manifest.lossless is not None
    assert [proof["equal"] for proof in manifest.lossless["equality"]] == [2, 2]
    assert any(kept["metric"] == "acceptance rate alpha" for kept in manifest.measurements)
    assert main([*told, str(tmp_path / "again")]) == 0
    again = measured(pair)
    assert again is not None
    assert again.limits == found.limits  # still of where accuracy was measured, not of the benchmark in between
