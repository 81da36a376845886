"""When a pair is ready: what honest quantizations keep passes, what is broken or unmeasured does not."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qspec.eval_files import eval_dir
from qspec.report.headline import lead
from qspec.report.page import document
from qspec.report.quality import EIGHT, FEWER, LEAST_ALPHA, ceiling, lost_acceptance, quality_findings, target_ceiling
from qspec.report.render import html, markdown
from qspec.report.verdict import blockers
from qspec.schema.drafts import SelfDraft
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Recipe
from qspec.schema.results import Accuracy, Answer, Answers, Measurement, Results, Speed
from tests import example_results
from tests.example_results import answer, draft, fidelity, sound


def recipe(scheme: str = "W8A8", **fields: Any) -> dict[str, Any]:
    target = ModelSpec.model_validate({"model": "m", "quantization": {"scheme": scheme}})
    return Recipe.model_validate({"name": "t", "target": target, "draft": SelfDraft(kind="self"), **fields}).as_dict()


def results(asked: dict[str, Any] | None = None, **parts: Any) -> Results:
    accuracy = sound().model_copy(update=parts)
    return Results(name="t", recipe=recipe() if asked is None else asked, environment={}, accuracy=accuracy)


def said(*rows: Answer) -> Answers:
    return Answers(rows=rows)


def test_a_sound_pair_is_ready() -> None:
    """Would catch a gate that cries at a pair as it should be, or that says nothing of what it found."""
    assert blockers(results()) == []
    (finding,) = quality_findings(results())
    assert (finding.tone, finding.word) == ("good", "")
    assert "KL 0.0213 nats/token (at most 0.2: 8 bits or more)" in finding.text
    assert "draft: KL 0.0500, 0.700 of its tokens accepted, 0.750 before it was rounded" in finding.text


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"fidelity": fidelity(kl=22.0, agreement=0.0)}, ["the target: KL 22.0", "the target: names that model's"]),
        ({"fidelity": fidelity(kl=0.236, agreement=0.45)}, ["the target: KL 0.236", "most likely token at 45.0 %"]),
        ({"fidelity": fidelity(kl=math.nan)}, ["the target: KL no number nats/token"]),
        ({"fidelity": fidelity(kl=math.inf)}, ["the target: KL no number nats/token"]),
        ({"answers": said(*[answer(loop=1.0, text="time time")] * 3, answer())}, ["3 of 4 short answers"]),
        (
            {"answers": said(answer().model_copy(update={"finite": False}))},
            ["logits of its short answers"],
        ),
        ({"draft": draft(kl=1.4)}, ["the draft: KL 1.40 nats/token"]),
        ({"draft": draft(agreement=0.1)}, ["the draft: names that model's most likely token at 10.0 %"]),
        ({"draft": None}, ["what rounding took from the draft was not measured"]),
        ({"fidelity": None}, ["quality was not measured"]),
    ],
)
def test_what_is_broken_or_unmeasured_is_not_ready(parts: dict[str, Any], told: list[str]) -> None:
    """Would catch gibberish that is called ready: one half, one number, or one that is no number, or none at all."""
    found = blockers(results(**parts))
    assert len(found) == len(told)
    assert all(part in reason for part, reason in zip(told, found, strict=True))


def test_loops_of_the_original_and_a_single_one_are_no_fault() -> None:
    """Would catch a small model that repeats itself in float too, or one unlucky answer, called broken."""
    looping = answer(loop=1.0, original_loop=0.9)
    assert blockers(results(answers=said(*[looping] * 4))) == []
    assert blockers(results(answers=said(answer(loop=1.0), *[answer()] * 3))) == []
    assert blockers(results(answers=said(answer(loop=1.0)))) == []
    assert len(blockers(results(answers=said(answer(loop=1.0), answer(loop=1.0), looping, looping)))) == 1


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({"scheme": "W8A8", "kv": {"format": "fp8_e4m3", "granularity": "tensor"}}, EIGHT),
        ({"scheme": "none"}, EIGHT),
        ({"scheme": "W4A8"}, FEWER),
        ({"scheme": "W8A8", "rules": [{"match": "down_proj", "scheme": "W4A16"}]}, FEWER),
        ({"scheme": "W8A8", "mixed": {"bits": 6}}, FEWER),
        ({"scheme": "W4A16", "mixed": {"bits": 9, "candidates": ["W8A8", "none"]}}, EIGHT),
        ({"scheme": "W8A8", "kv": {"format": "int4", "granularity": "token_head"}}, FEWER),
        ({"scheme": "W8A8", "kv": {"value": {"format": "int4", "granularity": "token_head"}}}, FEWER),
    ],
)
def test_the_ceiling_follows_the_fewest_bits(quantization: dict[str, Any], found: Any) -> None:
    """Would catch four bits judged as eight, wherever they stand, and eight that hide behind a default."""
    half = ModelSpec.model_validate({"model": "m", "quantization": quantization}).model_dump(mode="json")
    assert ceiling(half) == found


def test_a_recipe_may_allow_more_and_not_by_asking_for_less() -> None:
    """Would catch a ceiling that no recipe can lift, and a strict budget that is judged without its interval."""
    loose = recipe(budget={"max_kl": 3.0, "min_agreement": 0.1})
    assert (target_ceiling(loose).kl, target_ceiling(loose).agreement) == (3.0, 0.1)
    assert blockers(results(loose, fidelity=fidelity(kl=2.0, agreement=0.3))) == []
    strict = recipe(budget={"max_kl": 0.01, "min_agreement": 0.99})
    assert target_ceiling(strict) == EIGHT
    told = blockers(results(strict))
    assert [reason.partition(":")[0] for reason in told] == [
        "KL budget 0.0100 nats/token missed",
        "agreement budget 99.0 % missed",
    ]


def test_honest_baselines_pass_and_damaged_ones_do_not() -> None:
    """Would catch ceilings that cry at a scheme as it was measured, on any corpus, or let through what is broken."""
    rows = json.loads((eval_dir() / "baselines/fidelity.json").read_text(encoding="utf-8"))["rows"]
    rows += json.loads((eval_dir() / "baselines/ablation.json").read_text(encoding="utf-8"))["rows"]
    ruined = {"clip by KL"}  # docs/fidelity.md: a clip that is made for INT8 ruins FP8
    judged = [(row, FEWER if "W4" in row["scheme"] else EIGHT) for row in rows if "corpus" in row]
    assert len(judged) > 150
    over = {row["method"] for row, most in judged if row["kl"] > most.kl or row["top1"] < most.agreement}
    assert over == ruined
    (damaged,) = [
        row
        for row in json.loads((eval_dir() / "baselines/proxies.json").read_text(encoding="utf-8"))["rows"]
        if row.get("scheme") == "damaged"
    ]
    assert damaged["kl"] > 10 * FEWER.kl
    assert 1 - damaged["top1_lost"] < FEWER.agreement


def speed(accepted: int, of: int, **update: Any) -> Speed:
    rate = Measurement(metric="alpha", value=accepted / of, unit="", n=of)
    made = example_results.speed()
    row = made.acceptance[0].model_copy(update={"drafted": of, "accepted": accepted, "alpha": rate, **update})
    return made.model_copy(update={"acceptance": (row,)})


def test_a_draft_of_which_nothing_stands_is_spoilt_with_no_original_beside_it() -> None:
    """Would catch `--prove` and `bench --no-original` that call a pair sound at 0 of 68: a floor needs no baseline."""
    (finding,) = lost_acceptance(speed(0, 68))
    assert finding.tone == "danger"
    assert finding.text.startswith(
        "quantized + draft: 0 of 68 drafted tokens stand, acceptance 0 (at most 0.0535, 95 %)"
    )
    assert lost_acceptance(speed(20, 68)) == []
    (few,) = lost_acceptance(speed(0, 20))
    assert (few.tone, "too few" in few.text) == ("open", True)
    forced = Measurement(metric="alpha", value=LEAST_ALPHA / 2, unit="", n=2000)
    (finding,) = lost_acceptance(speed(500, 1000, teacher_forced=forced))  # behind a lookup, which hides it in alpha
    assert finding.tone == "danger"


def test_a_lookup_that_found_nothing_is_not_spoilt() -> None:
    """Would catch prompt lookup, whose text did not repeat, called a spoilt draft: it has no weights to spoil."""
    made = speed(0, 68)
    arms = tuple(arm.model_copy(update={"draft_bytes": 0}) for arm in made.arms)
    assert lost_acceptance(made.model_copy(update={"arms": arms})) == []


def test_the_page_says_it_first_in_red_and_why_it_is_accepted() -> None:
    """Would catch a report whose first line praises the speed of a pair that writes nonsense, or hides the reason."""
    broken = results(fidelity=fidelity(kl=22.0)).model_copy(update={"despite": "a demonstration"})
    page = document(broken)
    assert '<li class="danger"><b>not ready</b><span>the target: KL 22.0 nats/token' in html.render(page)
    assert '<li class="danger"><b>despite</b><span>a demonstration</span>' in html.render(page)
    assert "- ⛔ **not ready:** the target: KL 22.0 nats/token" in markdown.render(page)
    assert lead(broken).startswith("Not ready: the target: KL 22.0 nats/token")


def test_partial_results_of_other_verbs_say_what_they_lack() -> None:
    """Would catch a bench report that is red for what it did not ask, or one without a quality that passes a pair."""
    only_speed = Results(name="t", recipe=recipe(), environment={}, speed=example_results.speed())
    assert quality_findings(only_speed) == []
    assert blockers(only_speed) != []
    off = recipe(evaluation={"fidelity": None})
    (finding,) = quality_findings(Results(name="t", recipe=off, environment={}, speed=example_results.speed()))
    assert (finding.tone, finding.word) == ("danger", "not ready")
    assert blockers(Results(name="t", recipe={}, environment={}, accuracy=Accuracy())) != []
    assert Results.model_validate_json(results(fidelity=fidelity(kl=math.nan)).dump()).accuracy.fidelity is not None


def test_results_survive_the_way_to_a_file(tmp_path: Path) -> None:
    """Would catch a reason, an answer or a draft's numbers that a sealed pair forgets."""
    made = results().model_copy(update={"despite": "why"})
    (tmp_path / "results.json").write_text(made.dump(), encoding="utf-8")
    assert Results.read(tmp_path / "results.json") == made
