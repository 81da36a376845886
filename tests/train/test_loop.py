"""Training of a speculator head: data, resume, several processes, and the pair that comes of it."""

import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from qspec import pipeline
from qspec.bridges import compressed
from qspec.errors import RecipeError, SourceError
from qspec.kept import Kept
from qspec.nn.mlp_speculator import MLPSpeculator, SpeculatorShape, initialize
from qspec.progress import Progress
from qspec.records import EMBEDDING
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schema.training import TrainingData, TrainingSpec
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.train import head as speculator_head, loop as train_draft
from qspec.train.data import Rollout, lessons, short_prompts, split
from qspec.train.head import HeadLearner, draft_ids, frequent_ids, lay_out
from qspec.tune.search import tune
from tests.arms import Letters
from tests.jobs import job, training_data
from tests.tiny import tiny_model

V, H, N = 20, 6, 2
SPEC = TrainingSpec(positions=120 * 16, batch=16, stage1=0.5, stage2_rate=1.0, rate=0.03, evaluate_every=40, loss="kl")


def rollouts(count: int, seed: int = 0) -> list[Rollout]:
    """Sequences in which a token and the next one decide the one behind; the state is one-hot in the token."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        tokens = torch.randint(0, H, (2,), generator=generator).tolist()
        while len(tokens) < 12:
            tokens.append((tokens[-1] + 2 * tokens[-2] + 1) % H)
        tokens_T = torch.tensor(tokens[:-1])
        hidden_TH = torch.nn.functional.one_hot(tokens_T, H).half()
        found.append(Rollout(tokens_T, hidden_TH, torch.tensor(tokens[1:])[:, None].int(), torch.ones(11, 1).half()))
    return found


def trained(folder: Path, spec: TrainingSpec = SPEC) -> tuple[MLPSpeculator, train_draft.Course]:
    parts = [lay_out(rollouts(8, seed), N, None, V) for seed in (0, 1, 2)]
    head = MLPSpeculator(SpeculatorShape(H, V, N, 16))
    initialize(head, torch.Generator().manual_seed(0))
    learner, stages = HeadLearner(head), (parts[0], parts[1])
    return head, train_draft.train(learner, stages, parts[2], spec, 0, folder, Progress(quiet=True))


def test_heads_learn_what_can_be_known(tmp_path):
    """Would catch heads that are shown the token they should guess, or labels of another position. The first head sees
    both tokens that decide; the second one sees the two behind.
    """
    head, course = trained(tmp_path)
    assert course.best > 2.5  # of 3: every token of a chain of two stands
    assert course.curve[-1]["step"] == course.total == 120
    assert [json.loads(line)["step"] for line in course.lines.splitlines()] == [0, 40, 80, 120]
    found = HeadLearner(head).judge(lay_out(rollouts(8, 2), N, None, V))
    assert found.score == pytest.approx(course.best, abs=1e-6)


@pytest.mark.parametrize("loss", ["cross_entropy", "kl", "overlap"])
def test_every_loss_trains(tmp_path, loss):
    """Would catch a loss without a gradient, or one that grows as the head gets better."""
    course = trained(tmp_path, SPEC.model_copy(update={"loss": loss}))[1]
    assert course.curve[-1]["loss"] < 0.8 * course.curve[1]["loss"]


def test_a_resumed_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    """Would catch an optimizer, an order of batches or a schedule that starts anew."""
    whole = trained(tmp_path / "whole")[0]
    keep = Kept.keep

    def killed(*args):
        keep(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Kept, "keep", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "killed")
    monkeypatch.undo()
    again, course = trained(tmp_path / "killed")
    assert [entry["step"] for entry in course.curve] == [0, 40, 80, 120]
    for mine, its in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_checkpoint_that_was_set_aside_is_found(tmp_path, monkeypatch):
    """Would catch hours of training begun anew for a process killed while it replaced one checkpoint by the next."""
    trained(tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.rename(folder.with_name(f".{folder.name}.previous"))
    monkeypatch.setattr(train_draft, "_save", None)  # nothing is left to train
    trained(tmp_path)
    assert folder.is_dir()


def test_other_settings_are_another_training(tmp_path, monkeypatch):
    """Would catch weights of another schedule taken for a beginning, and hours that another recipe deletes."""
    first = trained(tmp_path)[0]
    other, fresh = (trained(tmp_path / at, SPEC.model_copy(update={"rate": 0.01}))[0] for at in ("", "fresh"))
    for mine, its in zip(other.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, its)
    monkeypatch.setattr(train_draft, "_save", None)  # nothing is left to train
    for mine, its in zip(trained(tmp_path)[0].parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_two_processes_train_what_one_does(tmp_path):
    """Would catch gradients that are summed instead of averaged, or processes that read the same states."""
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import torch
        from qspec.train.processes import processes
        from tests.train.test_loop import trained
        with processes() as rank:
            head, _ = trained(Path(sys.argv[1]))
            if rank == 0:
                torch.save(list(head.parameters()), sys.argv[1] + "/weights.pt")
        """
    )
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=shared | {"RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    alone = trained(tmp_path / "alone")[0]
    for mine, its in zip(torch.load(tmp_path / "weights.pt"), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-3)  # 120 steps of sums in another order


def test_held_out_sequences_are_not_trained_on():
    """Would catch a greedy answer that stands in both: it would be learned by heart and then judged."""
    some = rollouts(6)
    train, judged = split([*some, some[0]], 0.2)
    assert len(judged) == 1
    assert not any(torch.equal(one.tokens_T, judged[0].tokens_T) for one in train)


def test_draft_ids_map_back():
    """Would catch an id that becomes its neighbour, or one that is not known and becomes the last one."""
    ids_D = frequent_ids(rollouts(4), 3, V)
    assert ids_D is not None
    numbers = draft_ids(torch.arange(V), ids_D, V)
    assert torch.equal(ids_D[numbers[numbers >= 0]], (numbers >= 0).nonzero().flatten())
    assert int((numbers >= 0).sum()) == 3
    assert frequent_ids(rollouts(1), 0, V) is None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A recipe and the head that was trained for it."""
    folder = tmp_path_factory.mktemp("mlp")
    model = tiny_model("llama", folder / "tiny")
    data = training_data(folder, text_tokens=64)
    training = {"data": data, "positions": 640, "batch": 32, "loss": "kl", "evaluate_every": 5}
    draft = {"kind": "mlp_speculator", "model": str(folder / "out/head"), "n_predict": 2, "inner_dim": 16}
    draft |= {"draft_vocab": 100, "shared": True, "scale_input": True, "training": training}
    recipe = job(folder, model, draft)
    head = pipeline.train_draft(recipe, folder / "out", Progress(quiet=True))
    return recipe, head, folder


def test_a_recipe_becomes_a_head_and_a_pair(made):
    """Would catch a trained head that the pair does not hold, cannot open, or does not draft with."""
    recipe, head, folder = made
    facts = json.loads((head / "config.json").read_text())["qspec"]
    assert facts["draft_vocab"] == 100
    assert (head / "curve.jsonl").exists()
    pair_folder = pipeline.run(recipe, folder / "run", progress=Progress(quiet=True))
    assert any("2 speculator heads for 100 of 300 ids" in line for line in pipeline.check(pair_folder))
    pair = pipeline.open_pair(pair_folder)
    assert isinstance(pair.drafter, MlpDrafter)
    drafting, plain = (pair.generate("the quick", 20, speculative=drafts).generation for drafts in (True, False))
    assert drafting.tokens == plain.tokens
    assert sum(step.drafted for step in drafting.steps) > 0


def test_a_head_may_begin_with_the_targets_rows(made, tmp_path, monkeypatch):
    """Would catch a way to begin that a recipe cannot ask for, or asks for in vain."""
    recipe, _, folder = made
    out, begun = Path(shutil.copytree(folder / "out", tmp_path / "out")), []
    shutil.rmtree(out / "training")

    class Begun(Exception):
        pass

    def train(learner, *_):
        begun.append(learner.module)
        raise Begun

    monkeypatch.setattr(speculator_head, "train", train)
    fields = recipe.as_dict()
    fields["draft"] |= {"shared": False}
    fields["draft"]["training"] |= {"start": "target"}
    with pytest.raises(Begun):
        pipeline.train_draft(Recipe.model_validate(fields), out, Progress(quiet=True))
    (half,) = out.glob("target-*")
    rows_VH = compressed.read(half).tensors[EMBEDDING]
    alike = torch.nn.functional.cosine_similarity(begun[0].emb[1].weight[7].detach(), rows_VH[7, :16], dim=0)
    assert float(alike) == pytest.approx(1.0)
    fields["draft"] |= {"shared": True}
    with pytest.raises(ValueError, match="shared ones are the target's"):
        Recipe.model_validate(fields)


def test_data_is_made_once(made):
    """Would catch answers that are written again by a second call, or that differ: a resumed run would mix them."""
    recipe, _, folder = made
    before = {path: path.stat().st_mtime_ns for path in (folder / "out/data").iterdir()}
    pipeline.train_draft(recipe, folder / "out", Progress(quiet=True))
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "out/data").iterdir()}


def make(made, folder: Path, **fields) -> dict[str, set[str]]:
    """Makes data of the trained recipe's target with other fields; returns the names of what is there, by stage."""
    recipe, _, home = made
    spec = recipe.draft.training.data.model_copy(update=fields)
    (half,) = (home / "out").glob("target-*")
    lessons(spec, half, compressed.read(half), recipe.seed, folder, Progress(quiet=True))
    names = content(folder)
    return {stage: {name for name in names if name.startswith(stage)} for stage in ("text", "answers")}


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ({"top": 4}, ["text", "answers"]),
        ({"states": "fp8_e4m3"}, ["text", "answers"]),
        ({"text_tokens": 96}, ["text"]),
        ({"text_length": 16}, ["text"]),
        ({"answers": 9}, ["answers"]),
        ({"answer_tokens": 17}, ["answers"]),
        ({"greedy": 0.0, "batch": 2}, ["answers"]),
        ({"held_out": 0.3}, []),
        ({"prompt_tokens": 63}, []),  # no prompt is that long
    ],
    ids=str,
)
def test_data_is_made_anew_for_what_decides_it_and_nothing_else(made, tmp_path, change, anew):
    """Would catch a head that learns from data of another recipe, and hours of answers that are written again."""
    before = make(made, tmp_path / "data")
    first = content(tmp_path / "data")
    after, fresh = make(made, tmp_path / "data", **change), make(made, tmp_path / "fresh", **change)
    assert [stage for stage in before if after[stage] != before[stage]] == anew
    assert content(tmp_path / "data") == first | content(tmp_path / "fresh")  # what was there stays
    assert all(after[stage] == before[stage] | fresh[stage] for stage in before)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"prompt_tokens": 8}, "training.data.prompt_tokens 8: leaves out each of 10,000 requests"),
        ({"prompts": [{"name": "blank.jsonl"}]}, "blank.jsonl: hold no request"),
    ],
)
def test_prompts_that_never_fit_are_refused(tmp_path, monkeypatch, changes, rule):
    """Would catch a training that looks for a prompt for ever: all are too long, or a data set asks nothing."""
    monkeypatch.chdir(tmp_path)
    Path("blank.jsonl").write_text('{"text": ""}\n')
    spec = TrainingData.model_validate(training_data(tmp_path, 64) | changes)
    with pytest.raises(SourceError, match=rule):
        next(short_prompts(spec, Letters(), 0))


def test_another_target_reads_and_answers_anew(made, tmp_path):
    """Would catch laws of a target that is gone, and a training that goes on with them."""
    recipe, _, folder = made
    out = Path(shutil.copytree(folder / "out", tmp_path / "out"))
    plain = recipe.target.model_copy(update={"quantization": QuantSpec(scheme="W8A8")})
    before, head = content(out / "data"), content(out / "head")
    pipeline.train_draft(recipe.model_copy(update={"target": plain}), out, Progress(quiet=True))
    after = content(out / "data")
    assert len(after) == 2 * len(before)
    assert before.items() < after.items()
    assert content(out / "head") != head
    pipeline.train_draft(recipe, out, Progress(quiet=True))
    assert content(out / "head") == head


def test_what_cannot_be_trained_is_refused(made):
    """Would catch a draft without training that fails late, and a head of other sizes than the recipe says."""
    recipe, _, folder = made
    with pytest.raises(RecipeError, match="training section"):
        pipeline.train_draft(job(folder, folder / "tiny"), folder / "no")
    other = recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"n_predict": 3})})
    with pytest.raises(RecipeError, match=r"n_predict 3: but its config.json says 2"):
        pipeline.run(other, folder / "other", progress=Progress(quiet=True))
    with pytest.raises(ValueError, match="either `positions` or `minutes`"):
        TrainingSpec()
    assert TrainingData().top == 32


@pytest.mark.parametrize("verb", ["run", "tune"])
def test_a_head_that_is_not_trained_is_missed_before_anything_is_loaded(made, tmp_path, monkeypatch, verb):
    """Would catch a target of many gigabytes that is read, or fetched, before its missing head is told."""
    recipe = made[0]

    def loaded(spec):
        raise AssertionError(f"{spec.model} was loaded")

    monkeypatch.setattr(pipeline, "load", loaded)
    missing = {"model": str(tmp_path / "none/head")}
    draft = recipe.draft.model_copy(update=missing)
    told = "is not trained yet; run `qspec train-draft`"
    for training, error, said in ((draft.training, RecipeError, told), (None, SourceError, "is no existing file")):
        asked = recipe.model_copy(update={"draft": draft.model_copy(update={"training": training})})
        with pytest.raises(error, match=said):
            if verb == "run":
                pipeline.run(asked, tmp_path / "out", progress=Progress(quiet=True))
            else:
                tune(asked, tmp_path / "out", Progress(quiet=True))
    other = recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"n_predict": 3})})
    with pytest.raises(RecipeError, match=r"n_predict 3: but its config\.json says 2"):
        pipeline.run(other, tmp_path / "out", progress=Progress(quiet=True))
    assert not (tmp_path / "out").exists()
