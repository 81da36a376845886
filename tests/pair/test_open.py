"""A pair from its files: the draft and the policy that its recipe asks for, and answers that they do not change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qspec.nn.cuda.decoder import CudaDecoder
from qspec.pair import open as stage
from qspec.pair.drafters.registry import draft_lm, draft_policy
from qspec.pair.open import LoadedPair, open_pair
from qspec.pair.package import package
from qspec.schema.drafts import SelfDraft
from qspec.schema.recipe import Recipe
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from tests.pairs import DRAFTS, halves, recipe

LOOKUP = DRAFTS["self"] | {"lookup": "suffix"}
SUFFIX = {"kind": "suffix", "min_match": 1, "memory_mb": 1}
POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "confidence", "k": 3, "max_k": 8, "threshold": 0.2},
    {"policy": "optimal", "k": 3, "max_k": 8},
    {"policy": "optimal", "k": 3, "by_batch": [[1, 8, 2]]},
)

SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.1, "top_p": 0.95, "seed": 9})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedPair]:
    """A one-layer copy of the target behind suffix lookup, the same alone, and lookup alone."""
    folder = tmp_path_factory.mktemp("pairs")
    target, draft = halves(folder / "source")
    base = recipe().model_dump()
    jobs = {name: Recipe.model_validate(base | {"draft": d}) for name, d in (("both", LOOKUP), ("suffix", SUFFIX))}
    made = {name: package(target, draft if name == "both" else None, job, folder / name) for name, job in jobs.items()}
    return {"self": open_pair(package(target, draft, recipe(), folder / "self"))} | {
        name: open_pair(pair) for name, pair in made.items()
    }


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy['policy']} {len(policy)}")
@pytest.mark.parametrize("name", ["self", "both", "suffix"])
def test_answers_are_those_of_plain_decoding(
    pairs: dict[str, LoadedPair], name: str, policy: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Catches a draft kind or policy of the recipe that the engine runs at the price of another answer."""
    fields = {"draft_length": {**policy}}
    job = Recipe.model_validate(pairs[name].recipe.model_dump() | {"speculation": fields})
    pair = replace(pairs[name], policy=draft_policy(job.speculation.draft_length))
    steps = []
    for _ in range(2):
        plain = pair.generate("the quick", 24, speculative=False, **sampling).generation
        drafted = pair.generate("the quick", 24, domain="fox", **sampling).generation
        assert drafted.tokens == plain.tokens
        assert not any(step.drafted for step in plain.steps)
        steps += drafted.steps
    assert any(step.drafted for step in steps)


def test_drafters_are_those_of_the_recipe(pairs: dict[str, LoadedPair]) -> None:
    """Catches a lookup that is ignored, and new drafters that share a memory with the old one."""
    assert isinstance(pairs["both"].recipe.draft, SelfDraft)
    kinds = {name: type(pair.drafter) for name, pair in pairs.items()}
    assert kinds == {"self": ModelDrafter, "both": CombinedDrafter, "suffix": SuffixDrafter}
    for name, pair in pairs.items():
        assert type(pair.new_drafter()) is kinds[name]
        assert pair.new_drafter() is not pair.drafter or name == "self"


def test_a_pair_without_weights_says_its_kind(pairs: dict[str, LoadedPair], tmp_path: Path) -> None:
    """Catches a suffix pair that is listed as n-gram, or that ships a draft folder."""
    manifest = pairs["suffix"].manifest
    assert (manifest.draft.kind, manifest.draft.folder) == ("suffix", None)
    assert manifest.speculation["suffix"]["memory_mb"] == 1
    assert manifest.vllm_speculative_config == {
        "method": "suffix",
        "num_speculative_tokens": 3,
        "suffix_decoding_max_tree_depth": 35,
    }


TREES: dict[str, dict[str, Any]] = {
    "self": DRAFTS["self"] | {"tree": {"width": 2, "depth": 3, "nodes": 6}},
    "both": LOOKUP | {"tree": {"width": 2, "depth": 3, "nodes": 6}},
    "suffix": SUFFIX | {"branches": 3},
}


@pytest.mark.parametrize("name", TREES)
def test_trees_of_the_recipe_change_no_answer(pairs: dict[str, LoadedPair], name: str, tmp_path: Path) -> None:
    """Catches a tree that the recipe asks for and the pair drafts chains for, or that costs another answer."""
    job = Recipe.model_validate(pairs[name].recipe.model_dump() | {"draft": TREES[name]})
    pair = open_pair(package(pairs[name].model, pairs[name].draft.model, job, tmp_path / "tree"))
    plain = pair.generate("the quick", 24, speculative=False).generation
    asked = [pair.generate("the quick", 24).generation for _ in range(2)]
    assert [answer.tokens for answer in asked] == [plain.tokens] * 2
    assert any(step.nodes > step.drafted > 0 for answer in asked for step in answer.steps)


def test_trees_are_refused_where_a_cache_rounds_by_position() -> None:
    """Catches a recipe that is quantized for an hour before its first tree is refused."""
    grouped = {"format": "int4", "granularity": "token_head", "residual": 64}
    job = recipe("ngram").model_dump() | {"draft": DRAFTS["ngram"] | {"branches": 2}}
    job["target"]["quantization"]["kv"] = grouped
    with pytest.raises(ValueError, match="target kv: channel scales and residual"):
        Recipe.model_validate(job)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("name", ["self", "both", "suffix"])
def test_a_batch_answers_as_one_by_one(
    pairs: dict[str, LoadedPair], name: str, speculative: bool, sampling: dict[str, Any]
) -> None:
    """Catches requests of a batch that share a draft cache, a policy, a seed or a stream of text."""
    pair, asked = pairs[name], ["the quick", "brown fox jumps", "over"]
    each = [sampling | {"seed": sampling["seed"] + i} if sampling else sampling for i in range(3)]
    want = [pair.generate(prompt, 16, speculative=False, **one) for prompt, one in zip(asked, each, strict=True)]
    said = ["", "", ""]

    def hear(i: int, text: str) -> None:
        said[i] += text

    got = pair.generate_batch(asked, 16, speculative=speculative, on_text=hear, **sampling)
    assert [answer.generation.tokens for answer in got] == [answer.generation.tokens for answer in want]
    assert said == [answer.text for answer in got] == [answer.text for answer in want]
    drafted = any(step.drafted for answer in got for step in answer.generation.steps)
    assert drafted == speculative or name == "suffix"
    assert pair.generate_batch([]) == []


def test_policies_learn_from_batch_to_batch(pairs: dict[str, LoadedPair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches first looks at a draft that every batch pays for anew, and costs of one size taken for another's."""
    pair, made = pairs["suffix"], list[object]()
    monkeypatch.setattr(stage, "request_policy", lambda spec: made.append(spec) or draft_policy(spec))
    pair.batch_policies.clear()
    for count in (2, 2, 3, 2):
        pair.generate_batch(["the quick"] * count, 4)
    assert len(made) == 2 + 3


@pytest.mark.parametrize("policy", ["fixed", "heuristic"])
def test_a_pair_for_a_gpu_runs_on_one(
    policy: str, pairs: dict[str, LoadedPair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a half that stays on the CPU, forks of a cache without room, a GPU that gives other answers, and one that
    waits for the host at every step of fixed drafts."""
    monkeypatch.setattr(stage, "gpu_for", lambda device: torch.device("cpu") if device == "h200" else None)
    fields = {"device": "h200", "dtype": "float32", "speculation": {"draft_length": {"policy": policy, "k": 3}}}
    job, passes = Recipe.model_validate(pairs["self"].recipe.model_dump() | fields), list[int]()
    many = CudaDecoder.forward_many.__func__
    watched = classmethod(lambda cls, sequences, *rest: passes.append(1) or many(cls, sequences, *rest))
    monkeypatch.setattr(CudaDecoder, "forward_many", watched)
    pair = open_pair(package(pairs["self"].model, pairs["self"].draft.model, job, tmp_path / "gpu"))
    assert isinstance(pair.target, CudaDecoder)
    assert isinstance(draft_lm(pair.drafter), CudaDecoder)
    asked = ["the quick", "brown fox jumps", "over"]
    want = [pair.generate(prompt, 16, speculative=False).generation.tokens for prompt in asked]
    drafted = pair.generate(asked[0], 16)
    assert (drafted.generation.tokens, any(step.drafted for step in drafted.generation.steps)) == (want[0], True)
    assert drafted.stats is not None
    assert [answer.generation.tokens for answer in pair.generate_batch(asked, 16)] == want
    assert bool(passes) == (policy == "heuristic")
