"""A kind of draft is one class: every verb knows one that a test adds."""

from collections.abc import Iterator
import json
from pathlib import Path
import re
from typing import Literal

import pytest
import torch

from qspec import cli, pipeline
from qspec.errors import RecipeError
from qspec.pair.check import check
from qspec.pair.drafters.kind import DraftKind, Weights
from qspec.pair.drafters.registry import KINDS
from qspec.pair.exports import vllm_command
from qspec.pair.open import open_pair
from qspec.progress import Progress
from qspec.records import ArchMap
from qspec.remeasure import bench_pair
from qspec.schema.drafts import DRAFTS, DraftSpec
from qspec.schema.recipe import Recipe
from qspec.speculation.types import Drafter, More, Proposal, Sampling
from tests.jobs import job
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


class RepeatDraft(DraftSpec):
    """Repeat the newest token."""

    kind: Literal["repeat"]


class RepeatDrafter:
    """The newest token, k times."""

    def propose(
        self, context: list[int], k: int, sampling: Sampling, generator: torch.Generator, more: More | None = None
    ) -> Proposal:
        return Proposal(torch.full((k,), context[-1]), None, 0.0)

    def reset(self) -> None: ...


class Repeat(DraftKind[RepeatDraft]):
    """All that qspec has to know of the kind."""

    of = RepeatDraft

    def drafter(self, weights: Weights, target: ArchMap, tokens: int) -> Drafter:
        return RepeatDrafter()


@pytest.fixture
def repeat() -> Iterator[None]:
    DRAFTS["repeat"], KINDS[RepeatDraft] = RepeatDraft, Repeat
    Recipe.model_rebuild(force=True)
    yield
    del DRAFTS["repeat"], KINDS[RepeatDraft]
    Recipe.model_rebuild(force=True)


@pytest.mark.usefixtures("repeat")
def test_a_kind_that_one_class_adds_is_known_to_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a verb that asks for kinds by name: plan, run, check, generate, bench, report; and one that has
    to be known to vLLM.
    """
    recipe = job(tmp_path, tiny_model("llama", tmp_path / "model"), {"kind": "repeat"})
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    cli.main(["plan", str(tmp_path / "recipe.yaml"), "--json"])
    assert json.loads(capsys.readouterr().out)["draft"]["kind"] == "repeat"
    pair = pipeline.run(recipe, tmp_path / "out", progress=Progress(quiet=True))
    assert any("sha256" in line for line in check(pair))
    opened = open_pair(pair)
    assert ("vllm", "draft", False) in {(line.runtime, line.part, line.served) for line in opened.manifest.served_by}
    assert "--speculative-config" not in vllm_command(recipe)
    answer = opened.generate("The quick brown fox", max_new_tokens=8)
    assert any(step.drafted for step in answer.generation.steps)
    results = bench_pair(pair, tmp_path / "again", progress=Progress(quiet=True))
    assert results.speed is not None
    assert all(found.equal == found.n for found in results.speed.equality)
    cli.main(["report", str(pair), "--out", str(tmp_path / "page")])
    assert "quantized + draft" in (tmp_path / "page" / "report.md").read_text()


def test_a_kind_that_nothing_knows_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """Would catch a kind that stays known after it was taken out, or a refusal without a fix."""
    with pytest.raises(RecipeError, match="'ngram'") as caught:
        Recipe.of({"name": "t", "target": {"model": "m"}, "draft": {"kind": "repeat"}}, (), "recipe.yaml")
    assert "draft.kind 'repeat'" in str(caught.value)


def test_no_other_part_asks_for_the_kind_of_a_draft() -> None:
    """Would catch a branch by kind that a new kind does not know of."""
    asks = re.compile(r"isinstance\([^)]*Draft\b|draft\.kind (?:==|!=|in)\b|case \w+Draft\(")
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "qspec").rglob("*.py"))}
    found = {
        name: asks.findall(text)
        for name, text in files.items()
        if asks.search(text) and not name.startswith(("qspec/schema/", "qspec/pair/drafters/"))
    }
    assert found == {}
