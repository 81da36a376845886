"""The pair on disk: whole, described, and sealed with its results."""

from dataclasses import replace
import json
from pathlib import Path

import pytest
import torch

from qspec.bridges import compressed
from qspec.errors import IntegrityError, OutputError, PairError
from qspec.pair import package as package_stage
from qspec.pair.check import check, read_manifest
from qspec.pair.package import package, seal, stored_bytes
from qspec.pipeline import quantize_checkpoint
from qspec.quantization.rtn import quantize
from qspec.records import QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import ModelSpec
from qspec.schemes.build import build_plan
from tests.observed import load, observe
from tests.pairs import halves, recipe
from tests.served import transformers_model
from tests.tiny import tiny_model

Halves = tuple[QuantizedModel, QuantizedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return halves(tmp_path_factory.mktemp("source"))


def test_a_pair_says_what_it_is(made: Halves, tmp_path: Path) -> None:
    """Would catch a manifest that another machine cannot serve, check or trace from."""
    pair = package(*made, recipe(), tmp_path)
    assert pair == tmp_path / "pair"
    manifest = read_manifest(pair)
    listed = {entry.path for entry in manifest.files}
    assert {"target/model.safetensors", "draft/config.json", "target/tokenizer.json", "draft/qspec.json"} <= listed
    assert manifest.target.schemes == {"W8A8": 14, "none": 1}
    assert manifest.draft.schemes == {"W4A16": 7, "none": 1}
    assert manifest.target.source["sha256"] == made[0].source["sha256"]
    assert manifest.tokenizer.target_vocab == manifest.tokenizer.draft_vocab == 300
    assert manifest.tokenizer.real_vocab == 300
    assert manifest.validity.max_length == 128
    assert manifest.environment["torch"] == torch.__version__
    assert manifest.recipe == recipe().as_dict()


def test_licences_travel_with_the_weights(tmp_path: Path) -> None:
    """Would catch weights that are given away without the terms that they came under."""
    target, draft = halves(tmp_path / "source")
    terms = {"LICENSE.txt": "terms", "USE_POLICY.md": "policy"}
    for name, text in terms.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    target, draft = (replace(half, files={name: tmp_path / name for name in terms}) for half in (target, draft))
    pair = package(target, draft, recipe(), tmp_path)
    listed = {entry.path for entry in read_manifest(pair).files}
    assert {f"{half}/{name}" for half in ("target", "draft") for name in ("LICENSE.txt", "USE_POLICY.md")} <= listed
    assert (pair / "target/LICENSE.txt").read_text() == "terms"
    check(pair)


def test_files_beside_the_weights_travel_with_both_halves(tmp_path: Path) -> None:
    """Would catch sampling defaults of one half given to the other, or made up; and files that vanish unnamed."""
    made = []
    for name, temperature in (("target", 0.6), ("draft", 0.9)):
        source = tiny_model("llama", tmp_path / name)
        (source / "generation_config.json").write_text(f'{{"temperature": {temperature},  "eos_token_id": 2}}')
        (source / "README.md").write_text(f"# {name}")
        (source / "custom.py").write_text("print()")
        spec = ModelSpec(model=str(source), quantization=QuantSpec(scheme="FP8_DYNAMIC"))
        made.append(quantize_checkpoint(spec, tmp_path / f"{name}-fp8"))
    pair = package(made[0], made[1], recipe(), tmp_path)
    manifest = read_manifest(pair)
    for name, half in (("target", manifest.target), ("draft", manifest.draft)):
        for file, copy in (("generation_config.json", "generation_config.json"), ("README.md", "README.source.md")):
            assert (pair / name / copy).read_bytes() == (tmp_path / name / file).read_bytes()
        assert "Files of the source that do not come along: custom.py (code)." in half.notes
    check(pair)


def test_serving_section(made: Halves, tmp_path: Path) -> None:
    """Would catch a draft that inherits the target's quantization or KV type, and a draft length vLLM never hears."""
    manifest = read_manifest(package(*made, recipe(), tmp_path))
    assert manifest.vllm_speculative_config == {
        "method": "draft_model",
        "model": "draft",
        "num_speculative_tokens": 3,
        "quantization": "compressed-tensors",
        "kv_cache_dtype": "fp8",
    }
    assert "--kv-cache-dtype fp8" in manifest.speculation["vllm_command"]
    assert manifest.exportable
    assert manifest.reason == ""


def test_what_vllm_cannot_serve_has_a_reason(made: Halves, tmp_path: Path) -> None:
    """Would catch a pair offered for export whose KV cache the runtime turns into garbage."""
    kv = {"format": "int8", "granularity": "token_head"}
    dynamic = recipe(target={"model": "tiny", "quantization": {"scheme": "W8A8", "kv": kv}})
    manifest = read_manifest(package(*made, dynamic, tmp_path))
    assert not manifest.exportable
    assert "kv: per-token-head KV on CPU" in manifest.reason


def test_ngram_pairs_have_no_draft_folder(made: Halves, tmp_path: Path) -> None:
    """Would catch lookup settings that get lost, since no file of a draft holds them."""
    pair = package(made[0], None, recipe("ngram"), tmp_path)
    manifest = read_manifest(pair)
    assert not (pair / "draft").exists()
    assert (manifest.draft.kind, manifest.draft.folder) == ("ngram", None)
    assert manifest.speculation["ngram"] == {"min_ngram": 2, "max_ngram": 4, "branches": 1}
    assert manifest.vllm_speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert len(check(pair)) == 3


def test_both_halves_load_elsewhere(made: Halves, tmp_path: Path) -> None:
    """Would catch a half that only qspec can read."""
    pair = package(*made, recipe(), tmp_path)
    assert len(transformers_model(pair / "target").model.layers) == 2
    assert len(transformers_model(pair / "draft").model.layers) == 1


def test_dtype_follows_recipe_then_source(made: Halves, tmp_path: Path) -> None:
    """Would catch float tensors that double, or lose bits, without being asked."""
    assert read_manifest(package(*made, recipe(), tmp_path / "a")).validity.dtype == "float32"  # the source's own
    pair = package(*made, recipe(dtype="bfloat16"), tmp_path / "b")
    assert compressed.read(pair / "target").tensors["model.norm.weight"].dtype == torch.bfloat16


def test_size_is_known_before_writing(made: Halves, tmp_path: Path) -> None:
    """Would catch a disk that fills up half way because scales, packing or embeddings were not counted."""
    pair = package(*made, recipe(), tmp_path)
    for model, name in zip(made, ("target", "draft"), strict=True):
        on_disk = (pair / name / "model.safetensors").stat().st_size
        header = 8 + int.from_bytes((pair / name / "model.safetensors").read_bytes()[:8], "little")
        assert stored_bytes(model, torch.float32) == pytest.approx(on_disk - header, rel=0.01)  # shapes, KV scales


def test_a_failed_write_leaves_the_old_pair(made: Halves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a pair that is replaced before its successor has been verified."""
    pair = package(*made, recipe(), tmp_path)
    before = (pair / "pair.json").read_bytes()

    def broken(_pair: Path) -> None:
        raise IntegrityError("target/model.safetensors", "was changed", "try again")

    monkeypatch.setattr(package_stage, "examine", broken)
    with pytest.raises(IntegrityError):
        package(*made, recipe(name="other"), tmp_path)
    assert (pair / "pair.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_readers_get_what_was_made(made: Halves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a codec that writes something valid and wrong: its digests would all match."""
    write = compressed.write

    def other_codes(model: QuantizedModel, folder: Path, dtype: torch.dtype) -> None:
        layer = "model.layers.0.mlp.up_proj"
        weight = replace(model.linears[layer].weight, codes=-model.linears[layer].weight.codes)
        linear = replace(model.linears[layer], weight=weight)
        write(replace(model, linears={**model.linears, layer: linear}), folder, dtype)

    monkeypatch.setattr(compressed, "write", other_codes)
    with pytest.raises(IntegrityError, match=r"target: model\.layers\.0\.mlp\.up_proj"):
        package(*made, recipe(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_halves_that_do_not_fit(made: Halves, tmp_path: Path) -> None:
    """Would catch a draft whose ids mean other tokens: it is never accepted, and nothing says why."""
    target, draft = made
    wider = replace(draft, arch=replace(draft.arch, vocab_size=320))
    with pytest.raises(PairError, match="the target's head has 300 rows"):
        package(target, wider, recipe(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_paths_that_vllm_misreads(made: Halves, tmp_path: Path) -> None:
    """Would catch a folder name that makes vLLM load the draft as another kind of drafter."""
    with pytest.raises(OutputError, match="vLLM reads 'eagle3' in a path"):
        package(*made, recipe(), tmp_path / "my-EAGLE3-run")


def test_seal_adds_results(made: Halves, tmp_path: Path) -> None:
    """Would catch measurements or a report that travel apart from their files, and an infinity that JSON cannot say."""
    pair = package(*made, recipe(), tmp_path)
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.md").write_text("# Report\n", encoding="utf-8")
    measured = {"metric": "kl", "value": 0.01, "unit": "nats", "n": 4, "ci": [0.005, 0.015], "condition": {}}
    mismatch = {"position": 3, "margin": float("inf")}  # one answer ends where the other goes on
    equality = [{"arm": "quantized", "baseline": "quantized", "n": 2, "equal": 1, "mismatches": [mismatch]}]
    results = {"accuracy": {"fidelity": {"kl": measured}}, "speed": {"equality": equality}, "recipe": {"x": measured}}
    seal(pair, results, report)
    seal(pair, results, report)  # a second run replaces the first
    manifest = read_manifest(pair)
    assert manifest.measurements == (measured,)
    assert manifest.lossless is not None
    told = equality[0] | {"mismatches": [{"position": 3, "margin": "Infinity"}]}
    assert manifest.lossless["equality"] == [told]
    assert not any(manifest.lossless["lossy_switches"].values())
    assert f"{manifest.report}/report.md" in {entry.path for entry in manifest.files}
    assert [path.name for path in pair.rglob("report.md")] == ["report.md"]
    check(pair)


def test_seal_does_not_bless_a_changed_file(made: Halves, tmp_path: Path) -> None:
    """Would catch weights that changed between packaging and sealing, and leave with a fresh, matching digest."""
    pair = package(*made, recipe(), tmp_path)
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.md").write_text("# Report\n", encoding="utf-8")
    config = pair / "target" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("silu", "SILU"), encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"target/config\.json"):
        seal(pair, {}, report)


def test_manifest_is_plain_json(made: Halves, tmp_path: Path) -> None:
    """Would catch a field that only Python can read."""
    pair = package(*made, recipe(), tmp_path)
    assert json.loads((pair / "pair.json").read_text(encoding="utf-8"))["name"] == "tiny"


def test_outliers_are_verified_and_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a pair whose outliers are lost on disk, or that is said to run in a server that drops them."""
    sparse = {"scheme": "W8A8", "outliers": {"share": 1.0}}
    asked = recipe("ngram", target={"model": "tiny", "quantization": sparse})
    source = tmp_path / "source"
    model = quantize(load(tiny_model("llama", source)), observe(source), build_plan(asked.target.quantization))
    manifest = read_manifest(package(model, None, asked, tmp_path / "out"))
    assert not manifest.exportable
    assert "no server runs dense + sparse weights" in manifest.reason
    size = (tmp_path / "out/pair/target/model.safetensors").stat().st_size
    assert size == pytest.approx(stored_bytes(model, torch.float32), rel=0.05)  # the file's header, 15 KB
    layer = "model.layers.1.mlp.up_proj"
    linear = model.linears[layer]
    assert linear.outliers is not None
    other = replace(linear.outliers, values=linear.outliers.values.flip(0))
    changed = replace(model, linears={**model.linears, layer: replace(linear, outliers=other)})
    write = compressed.write
    monkeypatch.setattr(compressed, "write", lambda _, *rest: write(changed, *rest))
    with pytest.raises(IntegrityError, match=f"{layer}: reads back different"):
        package(model, None, asked, tmp_path / "again")
