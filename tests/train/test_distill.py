"""Draft models made of the target's layers: what stays, how it is trained, and what is written."""

from dataclasses import replace
import json
import os
from pathlib import Path
import subprocess
import sys
import textwrap

import pytest
import torch

from qspec import pipeline
from qspec.bridges import compressed
from qspec.bridges.hf import load_folder, open_trainable
from qspec.errors import RecipeError
from qspec.kept import Kept
from qspec.models.layers import keep_layers
from qspec.nn.eager.decoder import Decoder
from qspec.numerics.statistics.fidelity import kl_divergence
from qspec.pair.drafters.registry import kind_of
from qspec.planning.preview import preview
from qspec.progress import Progress
from qspec.schema.recipe import Recipe
from qspec.schema.training import DistillSpec
from qspec.train import loop as train_draft, model as distill
from qspec.train.data import Rollout, SequenceData, lessons
from qspec.train.model import FACTS, ModelLearner, choose_layers
from tests.jobs import job, training_data
from tests.served import transformers_model
from tests.tiny import VOCAB_SIZE, tiny_model

SPEC = DistillSpec(layers=1, positions=36 * 64, batch=64, stage1=0.5, rate=3e-3, evaluate_every=12)
QUIET = Progress(quiet=True)


def rollouts(decoder: Decoder, count: int, seed: int = 0) -> list[Rollout]:
    """What `decoder` thinks of random text behind prompts of several lengths."""
    generator, found = torch.Generator().manual_seed(seed), []
    for i in range(count):
        tokens_T = torch.randint(5, VOCAB_SIZE, (12 + i % 5,), generator=generator)
        decoder.truncate(0)
        laws_TV = decoder.forward(tokens_T).softmax(-1)
        probs_TK, ids_TK = laws_TV.topk(16)
        behind = slice(i % 3, None)
        law = decoder.hidden(len(tokens_T))[behind].half(), ids_TK[behind].int(), probs_TK[behind].half()
        found.append(Rollout(tokens_T[behind], *law, False, tokens_T[: i % 3].int()))
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def taught(one: Rollout) -> Rollout:
    """The same sequence under a law that two tokens decide: six ids follow each other, known with certainty."""
    tokens = one.tokens_T[:2].remainder(6).tolist()
    while len(tokens) <= len(one.tokens_T):
        tokens.append((tokens[-1] + 2 * tokens[-2] + 1) % 6)
    tokens_T, ids_TK = torch.tensor(tokens[:-1]) + 5, torch.tensor(tokens[1:])[:, None].int() + 5
    return replace(one, tokens_T=tokens_T, ids_TK=ids_TK, probs_TK=torch.ones_like(ids_TK).half())


@pytest.fixture(scope="module")
def parts(tiny) -> list[SequenceData]:
    decoder = Decoder.from_float(load_folder(tiny))
    return [SequenceData([taught(one) for one in rollouts(decoder, 24, seed)]) for seed in range(3)]


def trained(tiny: Path, parts: list[SequenceData], folder: Path, spec: DistillSpec = SPEC):
    """The tiny model with frozen embedding and head."""
    module = open_trainable(tiny, load_folder(tiny).arch)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("layers" in name)
    learner = ModelLearner(module, spec)
    return module, train_draft.train(learner, (parts[0], parts[1]), parts[2], spec, 0, folder, QUIET)


@pytest.mark.parametrize(
    "change",
    [{}, {"loss": "overlap"}, {"loss": "cross_entropy"}, {"hidden": 0.1}, {"compute": "bfloat16"}],
    ids=lambda change: str(change),
)
def test_acceptance_on_held_out_text_rises(tmp_path, tiny, parts, change):
    """Would catch laws of another row, a prompt that is left out or counted, and a loss that leads elsewhere."""
    module, course = trained(tiny, parts, tmp_path, SPEC.model_copy(update=change))
    assert course.best > course.curve[0]["score"] + 0.2  # of 1
    assert course.curve[-1]["loss"] < course.curve[1]["loss"]
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_the_target_itself_agrees_with_its_laws(tiny):
    """Would catch states, laws and rows that are shifted against each other: the target accepts all of its own."""
    learner = ModelLearner(open_trainable(tiny, load_folder(tiny).arch), SPEC)
    own = rollouts(Decoder.from_float(load_folder(tiny)), 6)
    found = learner.judge(SequenceData(own))
    kept = torch.cat([one.probs_TK.float().sum(-1) for one in own]).mean()
    assert found.greedy[0] == 1
    assert found.sampled[0] == pytest.approx(float(kept), abs=1e-3)  # laws are kept as float16
    logits_TV, hidden_TH = learner._read(own[1])
    torch.testing.assert_close(hidden_TH, own[1].states_MS.float(), atol=5e-3, rtol=1e-3)  # so are states
    assert len(logits_TV) == len(own[1].tokens_T)


def test_a_resumed_training_ends_with_the_same_weights(tmp_path, tiny, parts, monkeypatch):
    """Would catch a frozen weight that is stored as trained, moments that are lost, or sequences in another order."""
    whole = trained(tiny, parts, tmp_path / "whole")[0]
    keep = Kept.keep

    def killed(*args):
        keep(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Kept, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tiny, parts, tmp_path / "killed")
    monkeypatch.undo()
    again, course = trained(tiny, parts, tmp_path / "killed")
    assert [entry["step"] for entry in course.curve] == [0, 12, 24, 36]
    for mine, its in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_two_processes_train_what_one_does(tmp_path, tiny, parts):
    """Would catch sequences that both read, and shares of three and of two that count alike."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import torch
        from qspec.train.processes import processes
        from tests.train.test_distill import trained
        tiny, folder = map(Path, sys.argv[1:])
        with processes() as rank:
            module, _ = trained(tiny, torch.load(folder / "parts.pt", weights_only=False), folder)
            if rank == 0:
                torch.save(list(module.parameters()), folder / "weights.pt")
        """
    )
    torch.save(parts, tmp_path / "parts.pt")
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29572"}
    arguments = [sys.executable, "-c", program, str(tiny), str(tmp_path)]
    started = [subprocess.Popen(arguments, env=shared | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    alone = trained(tiny, parts, tmp_path / "alone")[0]
    for mine, its in zip(torch.load(tmp_path / "weights.pt"), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-3)  # 36 steps of sums in another order


def test_batches_that_cannot_be_shared_are_refused(tmp_path, tiny, parts, monkeypatch):
    """Would catch a process without a sequence: it has no gradients, and the others wait for them forever."""
    monkeypatch.setattr(train_draft, "rank_and_world", lambda: (0, 2))
    with pytest.raises(RecipeError, match=r"training\.batch 8: is 1 starts per step, for 2 processes; raise it"):
        trained(tiny, parts, tmp_path, SPEC.model_copy(update={"batch": 8}))


def test_the_layer_goes_that_is_missed_least(tmp_path):
    """Would catch layers that are numbered anew between rounds, and laws that are swapped or of another text."""
    folder = tiny_model(
        "gemma2", tmp_path / "tiny", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
    )
    model = load_folder(folder)
    texts = [list(range(5 + i, 45 + i)) for i in range(2)]
    kept, dropped = choose_layers(model, texts, 2, QUIET)
    left = list(range(4))
    for one in dropped:
        measured = {layer: _divergence(model, [i for i in left if i != layer], texts) for layer in left}
        assert one.layer == min(measured, key=measured.__getitem__)
        assert one.kl == pytest.approx(measured[one.layer], rel=1e-3)  # float32 sums over the vocabulary
        left.remove(one.layer)
    assert kept == tuple(left)


def _divergence(model, layers, texts) -> float:
    """Mean KL of a model that has some of the layers only, made anew."""
    short, whole = Decoder.from_float(keep_layers(model, layers)), Decoder.from_float(model)
    found = []
    for text in texts:
        for decoder in (short, whole):
            decoder.truncate(0)
        found.append(kl_divergence(whole.forward(torch.tensor(text)), short.forward(torch.tensor(text))))
    return float(torch.cat(found).mean())


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def made(request, tmp_path_factory) -> tuple[Recipe, Path]:
    """A recipe, and the folder that its draft was trained in."""
    folder = tmp_path_factory.mktemp(request.param)
    own = {"num_hidden_layers": 3}
    model = tiny_model(request.param, folder / "tiny", **own)
    data = training_data(folder, text_tokens=128)
    training = {"data": data, "layers": 2, "layer_tokens": 64, "positions": 640, "batch": 64, "evaluate_every": 5}
    draft = {"kind": "model", "model": str(folder / "out/draft"), "training": training}
    draft["quantization"] = {"scheme": "W8A8"}
    recipe = job(folder, model, draft)
    assert pipeline.train_draft(recipe, folder / "out", QUIET) == folder / "out/draft"
    return recipe, folder


def test_the_draft_is_an_ordinary_checkpoint(made):
    """Would catch weights under other names than transformers', and what vLLM's draft_model refuses: another
    vocabulary or architecture, or a config that counts the target's layers.
    """
    _, folder = made
    draft, target = load_folder(folder / "out/draft"), load_folder(folder / "tiny")
    assert draft.arch.n_layers == 2
    assert draft.config["vocab_size"] == target.config["vocab_size"]
    assert draft.config["architectures"] == target.config["architectures"]
    assert draft.tokenizer.fingerprint() == target.tokenizer.fingerprint()
    transformers_model(folder / "out/draft")  # every tensor finds its place
    tokens_T = torch.arange(5, 45)
    with torch.no_grad():
        theirs_TV = open_trainable(folder / "out/draft", draft.arch)(tokens_T[None]).logits[0]
    torch.testing.assert_close(Decoder.from_float(draft).forward(tokens_T), theirs_TV, atol=1e-3, rtol=1e-3)
    said = json.loads((folder / "out/draft" / FACTS).read_text())
    assert len(said["layers"]["kept"]) == 2
    assert len(said["layers"]["dropped"]) == 1
    assert (folder / "out/draft/curve.jsonl").exists()


def test_what_is_frozen_stays(made):
    """Would catch an embedding that is trained, and rounded, although draft and target should share it."""
    _, folder = made
    draft, target = load_folder(folder / "out/draft"), load_folder(folder / "tiny")
    assert torch.equal(draft.tensors["model.embed_tokens.weight"], target.tensors["model.embed_tokens.weight"])
    name = "self_attn.o_proj.weight"
    first = json.loads((folder / "out/draft" / FACTS).read_text())["layers"]["kept"][0]
    mine, its = draft.tensors[f"model.layers.0.{name}"], target.tensors[f"model.layers.{first}.{name}"]
    assert not torch.equal(mine, its)


def test_the_draft_makes_a_pair(made):
    """Would catch a draft that the main job cannot load, quantize, package or draft with."""
    recipe, folder = made
    pair_folder = pipeline.run(recipe, folder / "run", progress=QUIET)
    pair = pipeline.open_pair(pair_folder)
    drafting, plain = (pair.generate("the quick", 20, speculative=drafts).generation for drafts in (True, False))
    assert drafting.tokens == plain.tokens
    assert sum(step.drafted for step in drafting.steps) > 0


def test_a_second_call_changes_nothing(made):
    """Would catch data, layers or a training that are made anew by a call that goes on."""
    recipe, folder = made
    before = load_folder(folder / "out/draft").tensors
    before = {name: before[name].clone() for name in before}
    times = {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir() if path.name != "draft"}
    pipeline.train_draft(recipe, folder / "out", QUIET)
    after = load_folder(folder / "out/draft").tensors
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir() if path.name != "draft"}


def test_held_out_answers_have_their_prompts(made):
    """Would catch answers that a model reads without what was asked."""
    recipe, folder = made
    (half,) = (folder / "out").glob("target-*")
    spec = recipe.draft.training.data.model_copy(update={"held_out": 0.2})
    data = lessons(spec, half, compressed.read(half), recipe.seed, folder / "out/data", QUIET)
    assert all(len(one.prompt_P) > 1 for one in [*data.answers, *data.judged])
    assert len(data.judged) == 2


def test_what_cannot_be_made_is_refused(tmp_path, tiny):
    """Would catch layers that fail after the data is made, a plan that needs the trained draft, a run without it."""
    draft = {"kind": "model", "model": str(tmp_path / "out/draft")}
    training = {"layers": 2, "positions": 64}
    recipe = job(tmp_path, tiny, draft | {"training": training})
    assert "2" in str(preview(recipe)["draft"])
    with pytest.raises(RecipeError, match="is not trained yet; run `qspec train-draft`"):
        pipeline.run(recipe, tmp_path / "run", progress=QUIET)
    with pytest.raises(RecipeError, match="is nothing that is trained"):
        pipeline.train_draft(job(tmp_path, tiny), tmp_path / "no")
    for layers, message in (
        (3, r"layers 3: must leave out some of the model's 3 layers, not all; use 1 … 2"),
        ([0, 3], r"layers \[0, 3\]: must be different layers of 0 … 2 in rising order; give those that should stay"),
    ):
        with pytest.raises(RecipeError, match=message):
            pipeline.train_draft(
                job(tmp_path, tiny, draft | {"training": training | {"layers": layers}}), tmp_path / "no"
            )
    for layers in ([1, 0], [0, 0], []):
        with pytest.raises(ValueError, match="must name different layers in rising order; give those that should stay"):
            DistillSpec(layers=layers, positions=1)


@pytest.mark.parametrize(
    ("fields", "untrained"),
    [
        ({"model": "out/draft"}, True),
        ({"kind": "mlp_speculator", "model": "out/head", "training": {"positions": 64}}, True),
        ({"model": "org/name"}, False),
        ({"model": "org/draft", "revision": "main"}, False),
        ({"model": "made/draft"}, False),
        ({"model": "out/draft", "training": None}, False),
    ],
)
def test_a_path_that_looks_like_a_hub_id_is_known_by_its_end(tmp_path, monkeypatch, fields, untrained):
    """Would catch `out/draft` asked of the Hub, where the sentence is due that it has to be trained first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made/draft").mkdir(parents=True)
    given = {"kind": "model", "training": {"layers": 2, "positions": 64}} | fields
    assert kind_of(job(tmp_path, tmp_path, given).draft).untrained == untrained


def test_layers_are_chosen_anew_on_other_text(made):
    """Would catch a choice that is kept although the text that it was made on is another."""
    recipe, folder = made
    model, kept = load_folder(folder / "tiny"), Kept(folder / "chosen")
    spec = recipe.draft.training
    texts = [list(range(5 + i, 45 + i)) for i in range(2)]
    first = distill._layers(spec, model, texts[:1], kept, QUIET)
    assert distill._layers(spec, model, texts[:1], kept, QUIET) == first
    assert distill._layers(spec, model, texts[1:], kept, QUIET)["texts"] != first["texts"]
