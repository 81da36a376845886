"""Training of an EAGLE-3 head: chains against the head's own drafting, losses, resume, and what comes of it."""

import json

import pytest
import torch

from qspec import pipeline
from qspec.bridges.hf import load_folder
from qspec.kept import Kept
from qspec.nn.eagle3 import Eagle3, Eagle3Shape, HeadCache, initialize
from qspec.nn.engines import open_decoder
from qspec.progress import Progress
from qspec.schema.training import Eagle3Spec, TrainingData
from qspec.train.data import ANSWERS, TEXT, Rollout, SequenceData, StageSources, made_data
from qspec.train.eagle3 import Chains, Eagle3Learner, unrolled
from qspec.train.loop import Course, train
from tests.jobs import job, training_data
from tests.tiny import tiny_model

V, TAPS, H = 24, (0, 1), 16
SHAPE = Eagle3Shape(
    hidden_size=H,
    target_hidden=6,
    taps=TAPS,
    intermediate_size=24,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    vocab_size=V,
    draft_vocab=10,
)
SPEC = Eagle3Spec(steps=3, positions=60 * 40, batch=40, stage1=0.2, stage2_rate=1.0, rate=0.02, evaluate_every=20)
QUIET = Progress(quiet=True)


def a_head(shape: Eagle3Shape = SHAPE) -> Eagle3:
    generator = torch.Generator().manual_seed(0)
    head = Eagle3(shape, torch.arange(shape.draft_vocab), torch.randn(V, shape.hidden_size, generator=generator))
    initialize(head, generator)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return head


def rollouts(count: int, seed: int = 0) -> list[Rollout]:
    """Sequences in which a token and the next one decide the one behind; the state is one-hot in the token.

    Prompts of several lengths; ids are the head's, every fourth of them unknown to it.
    """
    generator, found = torch.Generator().manual_seed(seed), []
    for i in range(count):
        tokens = torch.randint(0, 6, (2,), generator=generator).tolist()
        while len(tokens) < 14:
            tokens.append((tokens[-1] + 2 * tokens[-2] + 1) % 6)
        tokens_T, prompt = torch.tensor(tokens[:-1]), i % 4
        states_MS = torch.nn.functional.one_hot(tokens_T, 6).half().repeat(1, len(TAPS))
        ids_TK = torch.tensor(tokens[1:])[:, None].int()
        law = ids_TK[prompt:], torch.ones_like(ids_TK[prompt:]).half()
        found.append(Rollout(tokens_T[prompt:], states_MS, *law, False, tokens_T[:prompt].int()))
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"norm_output": True, "fc_norm": True}, {"n_layers": 2, "n_kv_heads": 4}], ids=str
)
@torch.no_grad()
def test_chains_are_what_drafting_computes(changes):
    """Would catch a mask, a position, a token or a key of another step: a head would learn what it never drafts."""
    head, steps = a_head(Eagle3Shape(**(vars(SHAPE) | changes))), 4
    chains = Chains(rollouts(5), steps)
    got = torch.stack(list(unrolled(head, chains)), 1).split(chains.sizes)
    for one, starts_C, y_CTH in zip(chains.sequences, chains.starts, got, strict=True):
        tokens_L = torch.cat([one.prompt_P, one.tokens_T]).long()
        assert starts_C[-1] + steps == len(tokens_L) - 1
        for p, y_TH in zip(starts_C.tolist(), y_CTH, strict=True):
            cache = HeadCache(head.shape)
            f_TH = head.fuse(one.states_MS[: p + 1].float())
            y_1H = head.run(f_TH, tokens_L[1 : p + 2], torch.arange(p + 1), cache)[-1:]
            for step in range(steps):
                torch.testing.assert_close(y_1H[0], y_TH[step], atol=1e-4, rtol=1e-4)
                token_1 = tokens_L[p + step + 2 : p + step + 3]
                if step + 1 < steps:
                    y_1H = head.run(head.feed(y_1H), token_1, torch.tensor([p + step + 1]), cache)


def test_a_row_of_a_chain_is_judged_by_what_follows_its_token():
    """Would catch distributions that are shifted against the rows, by a prompt or by a step."""
    chains = Chains(rollouts(4), 3)
    for step in range(3):
        after = []
        for one, starts_C in zip(chains.sequences, chains.starts, strict=True):
            tokens_L = torch.cat([one.prompt_P, one.tokens_T]).long()
            before, read = tokens_L[starts_C + step], tokens_L[starts_C + step + 1]
            after.append((read + 2 * before + 1) % 6)
        assert torch.equal(chains.targets(step)[0][:, 0].long(), torch.cat(after))


def trained(folder, spec: Eagle3Spec = SPEC) -> tuple[Eagle3, Course]:
    text, answers, judged = (SequenceData(rollouts(12, seed)) for seed in range(3))
    head = a_head()
    return head, train(Eagle3Learner(head, spec), (text, answers), judged, spec, 0, folder, QUIET)


@pytest.mark.parametrize(
    "change", [{"loss": "kl"}, {"loss": "overlap"}, {"loss": "hybrid", "decay": 1.0}, {"steps": 1}], ids=str
)
def test_chains_learn_what_can_be_known(tmp_path, change):
    """Would catch a loss without a gradient, and steps that do not learn."""
    spec = SPEC.model_copy(update=change)
    _, course = trained(tmp_path, spec)
    assert course.best > 0.75 * (spec.steps + 1)
    assert course.curve[-1]["loss"] < 0.5 * course.curve[1]["loss"]


def test_a_resumed_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    """Would catch moments, an order or a schedule that begin anew, and a frozen layer that is trained."""
    whole, keep = trained(tmp_path / "whole")[0], Kept.keep

    def killed(*args):
        keep(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Kept, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed")
    monkeypatch.undo()
    again = trained(tmp_path / "killed")[0]
    for mine, its in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its)


@torch.no_grad()
def test_acceptance_of_a_step_counts_chains_that_reach_it():
    """Would catch a product of means: steps that fail together would be taken for independent ones."""
    data = SequenceData(rollouts(12))
    found, reached = Eagle3Learner(a_head(), SPEC).judge(data), torch.ones(0)
    chains = Chains(data.sequences, SPEC.steps)
    reached, head = torch.ones(sum(chains.sizes), dtype=torch.bool), a_head()
    for step, y_CH in enumerate(unrolled(head, chains)):
        reached &= head.logits(y_CH).argmax(-1) == chains.targets(step)[0][:, 0]
        expected = torch.tensor(found.greedy[: step + 1]).prod()
        assert float(expected) == pytest.approx(float(reached.float().mean()), abs=1e-6)
    assert found.n == len(reached)


@pytest.mark.parametrize("states", ["float16", "fp8_e4m3"])
def test_residuals_of_prompt_and_answer_are_kept(tmp_path, states):
    """Would catch rows of another sequence of the batch, a prompt without states, and taps that share one scale."""
    lm = open_decoder(load_folder(tiny_model("llama", tmp_path / "tiny")), max_length=64)
    spec = TrainingData(answers=5, answer_tokens=16, batch=2, top=4, states=states, held_out=0.2)
    prompts = [[5, 6, 7 + i] + [9] * i for i in range(5)]
    stages = [StageSources(TEXT, [[[5, 6, 7, 8]]], TAPS, {}), StageSources(ANSWERS, [prompts], TAPS, {})]
    text, answers = made_data(Kept(tmp_path / "data"), lm, stages, spec, (), 0, QUIET)
    again = made_data(Kept(tmp_path / "data"), None, stages, spec, (), 0, QUIET)[1]  # as it is kept
    assert sorted(one.prompt_P.tolist() + one.tokens_T[:1].tolist() for one in answers) == sorted(prompts)
    reader = lm.fork()
    reader.tap(TAPS)
    for one, kept in zip([*text, *answers], [*text, *again], strict=True):
        reader.truncate(0)
        reader.forward(torch.cat([one.prompt_P, one.tokens_T]).long())
        expected_MS = reader.tapped(0)
        assert torch.equal(one.states_MS, kept.states_MS)
        near = {"atol": 1e-3, "rtol": 1e-3 if states == "float16" else 0.07}
        torch.testing.assert_close(one.states_MS.float(), expected_MS, **near)
        assert len(one.ids_TK) == len(one.tokens_T)


def test_a_recipe_becomes_a_head_and_a_pair(tmp_path):
    """Would catch a trained head that the pair does not hold, cannot open, or does not draft with."""
    data = training_data(tmp_path, text_tokens=64)
    training = {"data": data, "positions": 640, "batch": 32, "steps": 2, "stage1": 0.2, "evaluate_every": 5}
    draft = {"kind": "eagle3", "model": str(tmp_path / "out/head"), "draft_vocab": 100, "training": training}
    recipe = job(tmp_path, tiny_model("llama", tmp_path / "tiny", num_hidden_layers=6), draft)
    head = pipeline.train_draft(recipe, tmp_path / "out", QUIET)
    told = json.loads((head / "config.json").read_text())["qspec"]
    assert told["training"]["steps"] == 2
    assert len(told["held_out"]["greedy"]) == len(told["held_out_int8"]["greedy"]) == 2
    assert (head / "curve.jsonl").exists()
    folder = pipeline.run(recipe, tmp_path / "run", progress=QUIET)
    assert any("for 100 of 300 ids" in line for line in pipeline.check(folder))
    pair = pipeline.open_pair(folder)
    drafting, plain = (pair.generate("the quick", 20, speculative=drafts).generation for drafts in (True, False))
    assert drafting.tokens == plain.tokens
    assert sum(step.drafted for step in drafting.steps) > 0


def test_a_stage_without_steps_needs_no_data(tmp_path):
    """Would catch a training on answers alone that is refused, or timed, for the text that it never reads."""
    spec = SPEC.model_copy(update={"stage1": 0.0, "positions": None, "minutes": 1e-6})
    head, (answers, judged) = a_head(), (SequenceData(rollouts(12, seed)) for seed in range(2))
    course = train(Eagle3Learner(head, spec), (SequenceData([]), answers), judged, spec, 0, tmp_path, QUIET)
    assert (course.first, course.total) == (0, 1)
