"""A pair with an EAGLE-3 head: planned, packaged, checked, opened, run and measured as every other kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qspec import cli, pipeline
from qspec.bridges.heads import eagle3
from qspec.bridges.hf import arch_from_config
from qspec.bridges.tensors import read_tensors
from qspec.errors import PairError, RecipeError, SourceError
from qspec.models.load import load
from qspec.nn.eagle3 import Eagle3, initialize
from qspec.nn.mlp_speculator import swap_linears
from qspec.pair.check import check
from qspec.pair.drafters.registry import kind_of
from qspec.pair.head import eagle3_shape, target_rows
from qspec.pair.open import open_pair
from qspec.progress import Progress
from qspec.records import LoadedModel
from qspec.schema.drafts import Eagle3Draft
from qspec.speculation.drafters.eagle3 import Eagle3Drafter
from tests.jobs import job
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
TAPS = [0, 1, 2]
QUIET = Progress(quiet=True)


def write_head(target: LoadedModel, folder: Path, form: eagle3.Format = "native", **fields: Any) -> Path:
    """A new head with the target's output rows."""
    draft = Eagle3Draft.model_validate({"kind": "eagle3", "model": str(folder), "taps": TAPS} | fields)
    ids_D = torch.arange(3, 300, 3) if draft.draft_vocab else None
    embedding_VH, output_VH = target_rows(target)
    head = Eagle3(eagle3_shape(draft, target.arch), ids_D, embedding_VH)
    initialize(head, torch.Generator().manual_seed(0), output_VH)
    eagle3.write(head, folder, target.arch, {"seed": 0}, form, "org/target")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny")


def test_a_pair_is_made_and_measured(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a verb that knows no such kind: plan, run, check, generate, report; and a head that lost its ids."""
    head = write_head(pipeline.load(job(tmp_path, model).target), tmp_path / "head", "speculators", draft_vocab=99)
    recipe = job(tmp_path, model, {"kind": "eagle3", "model": str(head), "lookup": "ngram"})
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    cli.main(["plan", str(tmp_path / "recipe.yaml"), "--json"])
    planned = json.loads(capsys.readouterr().out)["draft"]
    assert planned["kind"] == "eagle3"
    assert planned["parameters"] > 64 * 99
    pair = pipeline.run(recipe, tmp_path / "out", progress=QUIET)
    assert any("an EAGLE-3 head on layers 0, 1, 2 for 99 of 300 ids" in line for line in check(pair))
    stored, config = read_tensors(pair / "draft"), json.loads((pair / "draft/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["qspec"] == {"seed": 0}
    assert stored["midlayer.mlp.down_proj.weight"].dtype == torch.int8
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    opened = open_pair(pair)
    assert opened.manifest.draft.kind == "eagle3"
    texts = [opened.generate("The quick brown fox", 24, speculative=on).generation.tokens for on in (True, False)]
    assert texts[0] == texts[1]
    answers = opened.generate_batch(["The lazy dog", "0, 12 and"], 12)
    assert all(answer.generation.steps for answer in answers)
    results = json.loads(next((tmp_path / "out").rglob("results.json")).read_text())
    assert all(row["equal"] == row["n"] for row in results["speed"]["equality"])
    assert 0 <= results["accuracy"]["draft"]["kl"]["value"] < 0.01  # a hundredth of what one spoilt layer makes
    assert '"method": "eagle3"' in opened.manifest.speculation["vllm_command"]


def test_layers_may_be_named_by_the_recipe(tmp_path: Path, model: Path) -> None:
    """Would catch a head whose ids of layers count otherwise, packaged with them as they are."""
    target = load(job(tmp_path, model).target)
    head = write_head(target, tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1]
    (head / "config.json").write_text(json.dumps(config))
    kind = kind_of(Eagle3Draft(kind="eagle3", model=str(head)))
    with pytest.raises(PairError, match=r"reads 192 numbers, 2 layers of the target have 128"):
        kind.require_files(target.arch)
    assert kind_of(Eagle3Draft(kind="eagle3", model=str(head), taps=tuple(TAPS))).require_files(target.arch) == head
    with pytest.raises(ValueError, match="rising order"):
        Eagle3Draft(kind="eagle3", model="m", taps=(2, 1))


def test_heads_that_do_not_fit_stop_a_run_before_compute(tmp_path: Path, model: Path) -> None:
    """Would catch a run that quantizes for an hour and then finds a head of another target, or of another size."""
    head = write_head(load(job(tmp_path, model).target), tmp_path / "head")
    draft = {"kind": "eagle3", "model": str(head), "draft_vocab": 99}
    with pytest.raises(RecipeError, match=r"draft_vocab 99: but its config\.json says 300"):
        pipeline.run(job(tmp_path, model, draft), tmp_path / "out", progress=QUIET)
    other = tiny_model("llama", tmp_path / "wide", hidden_size=128, head_dim=16)
    with pytest.raises(PairError, match="target_hidden_size 64: the target's hidden size is 128"):
        pipeline.run(job(tmp_path, other, draft | {"draft_vocab": 0}), tmp_path / "out", progress=QUIET)
    (head / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="no safetensors weights"):
        pipeline.run(job(tmp_path, model, draft | {"draft_vocab": 0}), tmp_path / "out", progress=QUIET)


def test_heads_of_the_hub_are_planned_without_them() -> None:
    """Would catch a plan that has to fetch a head, or takes its output rows for those of all ids."""
    arch = arch_from_config(json.loads((ROOT / "eval/shapes/meta-llama--Llama-3.1-8B-Instruct.json").read_text()))
    footprint = kind_of(Eagle3Draft(kind="eagle3", model="org/head")).footprint(arch, 2)
    # a layer of the target's sizes on twice its inputs, fusion of three states, 131 million in output rows
    assert footprint.parameters == pytest.approx(425e6, rel=0.01)


def test_every_layer_of_an_open_head_is_int8(tmp_path: Path, model: Path) -> None:
    """Would catch output rows that stay in float: they are the largest matrix of a head."""
    target = load(job(tmp_path, model).target)
    kind = kind_of(Eagle3Draft(kind="eagle3", model=str(write_head(target, tmp_path / "head"))))
    weights = kind.load(target, lambda: pytest.fail("a head is no draft model"))
    left = []
    swap_linears(weights.head, lambda linear: left.append(linear) or linear)
    assert left == []
    drafter = kind.drafter(weights, target.arch, 290)
    assert isinstance(drafter, Eagle3Drafter)
    assert kind.footprint(target.arch, 2).cost.kv_bytes == 2 * 2 * 16 * 4
