"""The report: what it claims, that its three forms agree, and that nothing in it can become markup."""

import csv
from html.parser import HTMLParser
import json
import math
from pathlib import Path
import re

from markupsafe import escape
import pytest

from qspec import cli
from qspec.numerics.statistics.paired import geometric_mean
from qspec.readable import Numeral, Range, number, percent, size
from qspec.report import headline, verdict
from qspec.report.document import Document, Dots, Finding, Heading, Paragraph, Plot, Table, Tiles, tables
from qspec.report.measured import measured
from qspec.report.page import document, report
from qspec.report.render import html as report_html, markdown as report_markdown
from qspec.report.render.plots import Drawn
from qspec.schema.results import (
    Accuracy,
    Answers,
    BatchSpeed,
    Measurement,
    Mismatch,
    Ratio,
    Results,
    SourceCounts,
    Spread,
)
from tests.example_results import HOSTILE, answer, arm, example, measurement, ratio, speed, task


def _findings(results: Results) -> dict[str, str]:
    return {finding.text: finding.tone for finding in verdict.findings(results)}


def _tone(results: Results, words: str) -> str:
    tones = [tone for text, tone in _findings(results).items() if words in text]
    assert len(tones) == 1, (words, list(_findings(results)))
    return tones[0]


def test_a_terminal_gets_a_screenful(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Would catch 350 lines where the answer is asked for, a short form that leaves out a finding or a limit, and one
    that does not say where the rest lies.
    """
    baseline = Path(__file__).resolve().parents[2] / "eval/baselines/smollm2-135m-int8-cpu.json"
    assert cli.main(["report", str(baseline)]) == 0
    short = capsys.readouterr().out
    assert cli.main(["report", str(baseline), "--full"]) == 0
    full = capsys.readouterr().out
    assert len(short.splitlines()) < 64 < 300 < len(full.splitlines())
    report(example(), tmp_path / "report")
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert cli.main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"All of it: --full, or\n- {tmp_path}/report/report.html" in shown
    words = " ".join(shown.split())
    assert page["findings"]
    assert all(" ".join(finding["text"].split()) in words for finding in page["findings"])
    assert "What these numbers do not show" in shown


def test_the_verdict_comes_first():
    """Would catch a report that makes its reader search for the answer, and a loss that stands among what is proven."""
    page = document(example())
    sections: dict[str, list[object]] = {"": []}
    for block in page.blocks:
        if isinstance(block, Heading):
            sections[block.text] = []
        else:
            list(sections.values())[-1].append(block)
    names = ["", "Proven", "Not proven, or lost", "What it costs", "Answers side by side", "Accuracy"]
    assert list(sections)[:6] == names
    assert [type(block) for block in sections[""]] == [Plot, Tiles]
    proven, open_ = ([f for f in sections[name] if isinstance(f, Finding)] for name in names[1:3])
    assert "36 of 36 greedy answers equal" in proven[0].text
    assert {f.tone for f in proven} == {"good", "plain"}
    assert {f.tone for f in open_} == {"bad", "open"}
    assert len(proven) + len(open_) == sum(isinstance(b, Finding) for b in page.blocks)


def test_the_picture_shows_every_arm_where_its_accuracy_is():
    """Would catch drafts that seem to cost accuracy, an original that lost some, and arms whose drafts did nothing."""
    results = example()
    (plot,) = headline.picture(results)
    found = {series.name: series.points[0] for series in plot.series}
    kl = (0.0213, pytest.approx((0.9 * 0.0213, 1.1 * 0.0213)))
    own, quantized, pair = (found[arm] for arm in ("original", "quantized", "quantized + draft"))
    assert (own.x, own.y, own.x_interval, own.y_interval) == (1.0, 1.0, None, None)
    assert quantized.y == pair.y == 0.3 / 0.32
    assert pair.x_interval == pytest.approx((1.83 * 1.32, 1.83 * 1.52))
    untested = results.model_copy(update={"accuracy": results.accuracy.model_copy(update={"tasks": ()})})
    (plot,) = headline.picture(untested)
    assert "KL" in plot.y
    points = {series.name: series.points[0] for series in plot.series}
    assert points["original"].y == 0.0
    assert (points["quantized + draft"].y, points["quantized + draft"].y_interval) == kl
    (plot,) = headline.picture(lucky(0.2, 0.2, brought=0.0))
    assert "quantized + prompt lookup" not in [series.name for series in plot.series]
    assert headline.picture(results.model_copy(update={"accuracy": Accuracy()})) == []
    assert headline.picture(results.model_copy(update={"speed": None})) == []


def test_what_both_arms_wrote_stands_side_by_side():
    """Would catch answers that are equal among those that differ, and text of a model that becomes markup."""
    rows = (answer("a dog ran"), answer(HOSTILE), answer("a\ncat"))
    accuracy = example().accuracy.model_copy(update={"answers": Answers(rows=rows)})
    (_, table) = headline.differing_answers(example().model_copy(update={"accuracy": accuracy}))
    assert isinstance(table, Table)
    assert table.caption.endswith("2 of 3 differ")
    assert table.rows == (("2", "a dog ran", HOSTILE), ("3", "a dog ran", "a cat"))


def test_the_cost_is_in_bytes():
    """Would catch a draft whose bytes are nowhere, and a share of something else than the original."""
    (_, table) = headline.cost(example())
    assert isinstance(table, Table)
    assert table.rows[0][:3] == ("original", "135 MB", "100 %")
    assert table.rows[2][3] == "28.0 MB"


def test_the_cost_is_in_minutes_too():
    """Would catch a report that nobody can plan by, and a pair without a benchmark whose minutes are nowhere."""
    timed = example().model_copy(update={"seconds": {"quantize target": 90.0, "evaluate": 210.0}, "speed": None})
    (_, line) = headline.cost(timed)
    assert line == Paragraph("The run took 5.0 min: quantize target 90.0 s, evaluate 3.5 min.")


@pytest.mark.parametrize(
    ("value", "ci", "tone", "words"),
    [
        (1.4, (1.3, 1.5), "good", "faster, 1.40× (95 % CI 1.30 to 1.50, 12 prompts)"),
        (0.8, (0.7, 0.9), "bad", "slower"),
        (1.1, (0.9, 1.3), "open", "no difference in speed shown"),
    ],
)
def test_faster_and_slower_need_their_interval(value: float, ci: tuple[float, float], tone: str, words: str):
    """Would catch a gain claimed from an interval that holds 1."""
    found = verdict._faster(ratio("a", "b", value, ci))
    assert found.tone == tone
    assert words in found.text


def test_one_prompt_decides_nothing():
    """Would catch a verdict from a single prompt, whose bootstrap interval has no width."""
    speedup = Measurement(metric="t", value=3.0, unit="x", n=1, ci=(3.0, 3.0))
    single = Ratio(arm="a", baseline="b", temperature=0.0, speedup=speedup, per_prompt=(3.0,))
    assert verdict._faster(single).tone == "open"


def test_a_draft_that_slows_down_is_advised_against():
    """Would catch the negative result that no peer reports; a draft that pays must not be advised against."""
    slow = example().model_copy(update={"speed": speed(0.85)})
    advice = (
        "quantized + draft against quantized: slower, 0.850× (95 % CI 0.750 to 0.950, 12 prompts); do not speculate"
    )
    assert _tone(slow, advice) == "bad"
    assert not any("do not speculate" in text for text in _findings(example()))
    blocks = document(slow).blocks
    lost = blocks[[getattr(block, "text", "") for block in blocks].index("Not proven, or lost") :]
    assert any(
        isinstance(b, Finding) and b.text.startswith("quantized + draft against quantized: slower") for b in lost
    )


def test_a_first_token_that_does_not_come_earlier_is_told():
    """Would catch a gain in decoding that hides that there is none in prefill."""
    assert _tone(example(), "prefill is not shown to be faster: quantized needs 85.3 ms, original 85.3") == "open"


def test_a_subject_that_loses_is_named():
    """Would catch a loss in one subject that the mean over all hides, and one that looking at many explains."""
    found = task()
    lost = found.sub_tasks[0]
    assert lost.difference is not None
    sure = lost.difference.model_copy(update={"ci": (-0.2, -0.05)})
    clear = found.model_copy(update={"sub_tasks": (lost.model_copy(update={"difference": sure, "p_value": 0.01}),)})
    results = example().model_copy(update={"accuracy": Accuracy(tasks=(clear,))})
    assert _tone(results, "mmlu_pro_law loses, corrected for the number of subjects: 30.0 % to 20.0 %") == "bad"
    assert not any("mmlu_pro_law" in text for text in _findings(example()))


def test_the_fastest_arm_is_named():
    """Would catch a reader left to find the arm to use, or one named that is not the fastest."""
    assert _tone(example(), "fastest arm by 6 of the prompts: quantized + draft") == "plain"
    slow = example().model_copy(update={"speed": speed(0.85)})
    words = "fastest arm by 6 of the prompts: quantized, 1.18× the speed of quantized + draft on the others (95 % CI"
    assert _tone(slow, words) == "open"


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_few_prompts_name_no_fastest_arm(prompts: int):
    """Would catch "fastest arm by 1 of the prompts"."""
    found = speed()
    ratios = tuple(
        r.model_copy(update={"per_prompt": r.per_prompt[:prompts], "prompts": r.prompts[:prompts]})
        for r in found.ratios
    )
    few = example().model_copy(update={"speed": found.model_copy(update={"ratios": ratios})})
    assert not any("fastest arm" in text for text in _findings(few))


def lucky(half: float, others: float, brought: float) -> Results:
    """The pair beside a lookup that is faster by `half` on the prompts that choose, and by `others` on the rest.

    brought: tokens that the lookup's drafts add to a step.
    """
    found = speed()
    base = next(r for r in found.ratios if (r.arm, r.baseline) == ("quantized + draft", "original"))
    own = tuple(
        value * (1 + part + 0.01 * (i % 3))
        for i, (value, part) in enumerate(zip(base.per_prompt, (half, others) * 6, strict=True))
    )
    mean, ci = geometric_mean(own)
    speedup = base.speedup.model_copy(update={"value": mean, "ci": ci})
    rival = base.model_copy(update={"arm": "quantized + prompt lookup", "per_prompt": own, "speedup": speedup})
    beside = rival.model_copy(update={"baseline": "quantized"})
    acceptance = found.acceptance[0].model_copy(
        update={"arm": rival.arm, "tokens_per_step": 1 + brought, "accepted": 0, "drafted": 4, "steps": 364}
    )
    forecast = found.predictions[0].model_copy(
        update={"arm": rival.arm, "predicted": mean / 1.83, "measured": mean / 1.83}
    )
    changed = {
        "arms": (*found.arms, arm("quantized + prompt lookup", 160.0, True)),
        "ratios": (*found.ratios, rival, beside),
        "acceptance": (*found.acceptance, acceptance),
        "predictions": (*found.predictions, forecast),
    }
    return example().model_copy(update={"speed": found.model_copy(update=changed)})


def test_the_headline_is_the_pairs_own():
    """Would catch "prompt lookup decodes at 3.01×" in place of the pair: the luckiest arm of several."""
    results = lucky(0.2, 0.2, brought=0.3)
    assert document(results).lead.startswith("Quantized + draft decodes at 2.60× the speed of original (95 % CI")
    (glance,) = [block for block in document(results).blocks if isinstance(block, Tiles)]
    assert [tile.value for tile in glance.tiles if tile.label.endswith("over original")] == ["2.60×"]
    assert _tone(results, "fastest arm by 6 of the prompts: quantized + prompt lookup, 1.2") == "open"


def test_a_winner_is_judged_on_prompts_that_did_not_choose_it():
    """Would catch an arm that wins on the prompts that chose it, by luck, and nowhere else."""
    results = lucky(0.2, -0.1, brought=0.3)
    words = "fastest arm by 6 of the prompts: quantized + prompt lookup, but not shown to beat the pair: 0.9"
    assert _tone(results, words) == "plain"


def test_drafts_that_did_nothing_win_nothing():
    """Would catch a lookup that drafted nothing in 98.9 % of its steps and had 0 of 4 accepted, at "3.01×"."""
    results = lucky(0.2, 0.2, brought=0.0)
    found = _findings(results)
    assert not any("prompt lookup against" in text for text in found)
    assert _tone(results, "prompt lookup: its drafts did nothing (0 of 4 accepted in 364 steps), so no speed") == "open"
    assert _tone(results, "fastest arm by 6 of the prompts: quantized + draft") == "plain"
    assert "prompt lookup: its drafts did nothing (0 of 4 accepted in 364 steps)" in document(results).lead
    idle = example().speed
    assert idle is not None
    own = tuple(a.model_copy(update={"tokens_per_step": 1.001, "accepted": 0}) for a in idle.acceptance)
    still = example().model_copy(update={"speed": idle.model_copy(update={"acceptance": own})})
    assert document(still).lead.startswith("Quantized decodes at 1.83× the speed of original (95 % CI")
    assert "Quantized + draft: its drafts did nothing" in document(still).lead


def test_nothing_is_said_of_a_single_prompt():
    """Would catch "shows no gain (2.71×)" of one prompt, and intervals and changes that no number can be read from."""
    found = speed()
    ratios = tuple(
        r.model_copy(update={"speedup": r.speedup.model_copy(update={"n": n, "ci": ci, "detectable": 1.2e10})})
        for r, n, ci in zip(found.ratios, (1, 2, 2), (None, (4.99e-9, 8.46e9), (0.00176, 2577683.0)), strict=True)
    )
    results = example().model_copy(update={"speed": found.model_copy(update={"ratios": ratios})})
    texts = _findings(results)
    assert not any("no gain" in text or "no difference in speed" in text for text in texts)
    assert _tone(results, "quantized against original: 1.83× (too few prompts to say: 1)") == "open"
    assert _tone(results, "quantized + draft against quantized: 1.42× (too few prompts to say: 2, need about") == "open"
    markdown = report_markdown.render(document(results))
    assert not re.search(r"inf %|e\+09|2,577,683|\d{5,}\.\d %", markdown)
    assert "too few prompts to say: 2" in document(results).lead


def test_right_answers_that_became_less_likely_are_a_loss():
    """Would catch a report that says no loss is shown where no answer flips and each right one is less likely."""
    fall = Measurement(metric="change", value=-0.05, unit="nats/item", n=140, ci=(-0.06, -0.04), detectable=0.015)
    lost = task(0.1).model_copy(update={"likelihood": fall})
    results = example().model_copy(update={"accuracy": example().accuracy.model_copy(update={"tasks": (lost,)})})
    assert _tone(results, "likelihood of right answers: -0.050 nats per item (95 % CI -0.060 to -0.040)") == "bad"
    page = document(results)
    assert "Mmlu_pro loses 0.050 nats of the likelihood of right answers" in page.lead
    rows = [row for table in tables(page) for row in table.rows if row[0] == "likelihood of right answers, nats"]
    assert [tuple(map(str, row[1:4])) for row in rows] == [("-0.0500", "-0.0600 to -0.0400", "0.0150")]


def test_a_task_at_chance_is_left_out_of_the_verdict():
    """Would catch "no loss is shown; a drop of 7.2 points would have been" of a model that guesses."""
    guessed = task(0.1).model_copy(update={"original": task().original.model_copy(update={"value": 0.107})})
    results = example().model_copy(update={"accuracy": example().accuracy.model_copy(update={"tasks": (guessed,)})})
    assert _tone(results, "mmlu_pro (qspec): at chance: 140 items are not answered better than by guessing") == "open"
    assert _tone(results, "recovery budget 99.0 % undecided: mmlu_pro: at chance") == "open"
    page = document(results)
    assert "Accuracy was not tested by a task (mmlu_pro: at chance" in page.lead
    lines = [line for line in report_markdown.render(page).splitlines() if "mmlu" in line]
    assert len(lines) > 3
    assert not any(re.search("points (or more )?would have|7.2 %", line) for line in lines)
    assert measured(results, "recovery") == {}


def test_predictions_that_are_far_off_are_flagged():
    """Would catch "predicted 0.0626×, measured 1.61×" without a word, and curves drawn from such a model."""
    found = speed()
    wrong = found.predictions[0].model_copy(update={"predicted": 0.0626, "measured": 1.61})
    results = example().model_copy(update={"speed": found.model_copy(update={"predictions": (wrong,)})})
    words = "quantized + draft: predicted 0.0626×, measured 1.61×, off by 2472 %, beyond the tolerance of 25 %"
    assert _tone(results, words) == "open"
    page = document(results)
    assert sum(isinstance(b, Finding) and b.text.startswith(words) for b in page.blocks) == 2
    (table,) = [b for b in page.blocks if isinstance(b, Table) and "within 25 %" in b.columns]
    assert table.rows[0][table.columns.index("within 25 %")] == "no"
    assert not any(isinstance(b, Plot) and b.caption.startswith("Predicted speedup by") for b in page.blocks)
    assert not any("tolerance" in text for text in _findings(example()))


def test_answers_of_one_token_name_no_fastest_arm():
    """Would catch an arm called fastest at a speed that nobody measured."""
    none = Spread(median=math.nan, q1=math.nan, q3=math.nan, n=0, unit="tokens/s")
    found = speed()
    arms = tuple(a.model_copy(update={"decode_rate": none, "tpot": none}) for a in found.arms)
    still = example().model_copy(update={"speed": found.model_copy(update={"arms": arms, "ratios": ()})})
    assert _tone(still, "no arm was timed: every answer ended at its first token") == "open"
    assert not any("fastest" in text for text in _findings(still))
    assert report_html.render(document(still))


def test_losslessness_is_judged_by_near_ties():
    """Would catch a fault in verification that is printed as rounding, or rounding printed as a fault."""
    tie = Mismatch(prompt=1, category="qa", position=9, margin=0.004, near_tie=True)
    fault = Mismatch(prompt=2, category="qa", position=3, margin=2.5, near_tie=False)
    ties = example().model_copy(update={"speed": speed(mismatches=(tie,))})
    assert _tone(ties, "35 of 36 greedy answers equal those of quantized; the other 1 part at near ties") == "good"
    broken = example().model_copy(update={"speed": speed(mismatches=(tie, fault))})
    assert _tone(broken, "1 part where no near tie explains it: speculation is not lossless here") == "bad"


@pytest.mark.parametrize(
    ("ci", "tone", "words"),
    [((0.01, 0.04), "good", "met"), ((0.06, 0.08), "bad", "missed"), ((0.04, 0.06), "open", "undecided")],
)
def test_a_budget_is_met_missed_or_undecided(ci: tuple[float, float], tone: str, words: str):
    """Would catch a budget called met by a point estimate whose interval crosses it."""
    results = example()
    assert results.accuracy.fidelity is not None
    kl = measurement("KL", sum(ci) / 2, ci)
    fidelity = results.accuracy.fidelity.model_copy(update={"kl": kl})
    results = results.model_copy(update={"accuracy": Accuracy(fidelity=fidelity)})
    assert _tone(results, f"KL budget 0.0500 nats/token {words}") == tone


def test_other_budgets_and_tasks_speak():
    """Would catch a budget in the recipe that the report never mentions."""
    results = example()
    assert _tone(results, "recovery budget 99.0 % undecided") == "open"
    assert _tone(results, "first-token budget 2.00 s met by every arm; slowest: original, 85.3 ms") == "good"
    late = results.model_copy(update={"recipe": {"budget": {"ttft_s": 0.05}}})
    assert _tone(late, "first-token budget 0.0500 s missed (median): original (85.3 ms), quantized (85.3 ms)") == "bad"
    loss = task(0.1, "quantized is worse by 22.0 points")
    difference = loss.difference.model_copy(update={"ci": (-0.3, -0.15)})
    worse = loss.model_copy(update={"difference": difference, "p_value": 0.001})
    results = results.model_copy(update={"accuracy": Accuracy(tasks=(worse,))})
    assert _tone(results, "quantized is worse") == "bad"
    assert _tone(results, "recovery budget 99.0 % missed") == "bad"


def test_a_score_of_cut_answers_is_called_weak():
    """Would catch "no difference" concluded from answers that never reached their end."""
    cut = task().model_copy(update={"quantized_cut": 0.9})
    results = example().model_copy(update={"accuracy": Accuracy(tasks=(cut,))})
    assert _tone(results, "90.0 % of the answers were cut at the token limit, so the score says little") == "open"
    assert not any("says little" in text for text in _findings(example()))


def test_limits_are_stated():
    """Would catch a sub-sample or truncated answers that pass for the benchmark."""
    text = report_markdown.render(document(example()))
    for words in (
        "140 of 12032 items were asked",
        "answers cut at 64 tokens: 10.0 % / 12.0 %",
        "3 prompts lost their beginning",
        "one machine, one run",
        "backend hf",
    ):
        assert words in text


def test_nothing_measured_still_gives_a_page():
    """Would catch a crash on a recipe that switches evaluation and benchmark off."""
    bare = Results(name="bare", recipe={}, environment={})
    page = document(bare)
    assert "nothing was measured" in report_html.render(page)
    assert "nothing was measured" in report_markdown.render(page)


class _Page(HTMLParser):
    """Collects tags, attributes and text; fails on tags that do not nest."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text.append(data)


def test_html_is_self_contained_and_escaped():
    """Would catch a page that loads something, runs what it was given, or lets a model's name become markup."""
    text = report_html.render(document(example()))
    page = _Page(text)
    names = [tag for tag, _ in page.tags]
    assert not set(names) & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]  # the page's own
    assert not [k for _, attributes in page.tags for k in attributes if k.startswith("on") or k == "src"]
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.tags)
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    assert links
    assert {attributes["id"] for tag, attributes in page.tags if tag == "h2"} == {link[1:] for link in links}
    assert "url(" not in text
    assert "@import" not in text
    assert HOSTILE in "".join(page.text)
    assert {"viewport"} <= {attributes.get("name") for tag, attributes in page.tags if tag == "meta"}
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_every_chart_is_drawn_and_named():
    """Would catch a chart that the page leaves out, and one without words for screen readers."""
    page = _Page(report_html.render(document(example())))
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) == sum(isinstance(block, Drawn) for block in document(example()).blocks)
    assert all(chart["role"] == "img" and re.search(r"\d", chart["aria-label"] or "") for chart in charts)


def test_a_table_knows_its_numbers():
    """Would catch tables that sort 9 behind 85, and percentages by their first digit."""
    rows = (("a", number(9.0), percent(0.5)), ("b", number(85.0), percent(1.1)))
    text = report_html.render(Document("t", "", (Table("c", ("", "n", "share"), rows),)))
    assert re.findall(r'data-v="([^"]+)"', text) == ["9", "0.5", "85", "1.1"]


def test_lead_and_tiles_say_the_same_as_the_numbers():
    """Would catch an answer that is kinder than its verdict: coarse tests, drafts that do not pay, a changed output."""
    page = document(example())
    assert page.lead == (
        "Quantized + draft decodes at 2.60× the speed of original (95 % CI 2.42 to 2.78, 12 prompts), at KL 0.0213 "
        "nats/token from it. Accuracy was tested coarsely: only a drop of 7 points or more would have shown. "
        "Quantized + draft pays (1.42×)."
    )
    (glance,) = [block for block in page.blocks if isinstance(block, Tiles)]
    shown = {tile.label: (tile.value, tile.tone) for tile in glance.tiles}
    assert shown["mmlu_pro score kept"] == ("93.8 %", "open")
    assert shown["quantized + draft over quantized"] == ("1.42×", "good")
    assert shown["Same greedy answers"] == ("36 of 36", "good")
    fault = Mismatch(prompt=2, category="qa", position=3, margin=2.5, near_tie=False)
    broken = document(example().model_copy(update={"speed": speed(0.85, (fault,))}))
    assert broken.lead.startswith("Drafting changes the output. ")
    assert broken.lead.endswith("Quantized + draft does not pay (0.850×).")


def test_speed_is_shown_by_length_kind_and_batch():
    """Would catch a plot that mixes up prompts, or a guide at no effect that is missing."""
    plots = {block.caption: block for block in document(example()).blocks if isinstance(block, Plot)}
    lengths = plots["Speedup of drafting by prompt length (each point a prompt)"]
    assert [(p.label, p.x) for p in lengths.series[0].points][:4] == [
        ("chat", 40),
        ("coding", 40),
        ("summary", 40),
        ("chat", 80),
    ]
    assert lengths.guide == "one"
    gains = plots["Speedup of drafting by batch (line: 95 % CI)"]
    assert [(p.x, p.y) for p in gains.series[0].points] == [(2, 1.3), (4, 0.85)]
    positions = plots["The same by kind of prompt: quantized + draft"]
    assert [series.name for series in positions.series] == ["chat", "coding"]


def test_texts_stand_beside_each_other():
    """Would catch a loss in one language that the first text hides."""
    results = example()
    first = results.accuracy.fidelity
    assert first is not None
    ratio = measurement("perplexity ratio", 1.4, (1.3, 1.5)).model_copy(update={"condition": {"data": "korean"}})
    other = first.model_copy(update={"perplexity_ratio": ratio, "kl": ratio})
    page = document(results.model_copy(update={"accuracy": Accuracy(fidelity=first, domains=(other,))}))
    (chart,) = [b for b in page.blocks if isinstance(b, Dots) and b.caption.startswith("Perplexity, quantized over")]
    assert [(bar.label, bar.text) for bar in chart.bars] == [("wikitext2", "1.03×"), ("korean", "1.40×")]


def test_markdown_escapes_markup():
    """Would catch text that becomes a tag, a link, a table cell or a code fence in Markdown."""
    text = report_markdown.render(document(example()))
    outside = re.sub(r"(`{3,})\n.*?\n\1", "", text, flags=re.S)
    assert "<script>" not in outside
    assert not re.search(r"(?<!\\)\]\(", outside)
    tables = [line for line in outside.splitlines() if line.startswith("|")]
    assert tables
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in tables if "python" in line or "cpu" in line}) == 1
    hostile = Document("# t", "- item", (Table("c", ("", "v"), (("a|b", "`1`"),)),))
    assert r"a\|b" in report_markdown.render(hostile)


def test_all_files_hold_the_same_numbers(tmp_path: Path):
    """Would catch a page that rounds or computes on its own, beside results that say otherwise."""
    path = report(example(), tmp_path / "report")
    assert path.name == "report.html"
    assert Results.read(path.with_name("results.json")) == example()
    assert '<a href="results.json">results.json</a>' in path.read_text(encoding="utf-8")
    html, markdown = path.read_text(encoding="utf-8"), path.with_name("report.md").read_text(encoding="utf-8")
    with path.with_name("report.csv").open(encoding="utf-8", newline="") as lines:
        cells = list(csv.DictReader(lines))
    data = json.loads(path.with_name("report.json").read_text(encoding="utf-8"))
    by_json = [cell for table in data["tables"] for row in table["rows"] for cell in row[1:]]
    shown = [cell for table in tables(document(example())) for row in table.rows for cell in row[1:]]
    assert [cell["text"] for cell in cells] == [cell["text"] for cell in by_json] == shown
    for cell, row, entry in zip(shown, cells, by_json, strict=True):
        assert escape(cell) in html
        assert report_markdown._text(cell) in markdown
        if isinstance(cell, Numeral) and math.isfinite(cell.value):
            assert float(row["value"]) == entry["value"] == cell.value
        if isinstance(cell, Range):
            assert (float(row["low"]), float(row["high"])) == (entry["low"], entry["high"]) == cell.ends
    assert data["findings"][0] == {"verdict": "pass", "text": verdict.findings(example())[0].text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.4249, "1.42"),
        (12345.6, "12,346"),
        (0.000341, "0.000341"),
        (0.0, "0"),
        (99.96, "100.0"),
        (float("nan"), "–"),
        (float("-inf"), "-∞"),
        (3e-9, "3.00e-09"),
    ],
)
def test_numbers_are_readable(value: float, text: str):
    """Would catch exponents for ordinary numbers, lost digits, and a crash on what is not finite."""
    assert number(value) == text


def test_sizes_and_shares():
    """Would catch binary units under decimal names."""
    assert (size(135e6), size(23_040), size(12)) == ("135 MB", "23.0 kB", "12.0 B")
    assert percent(0.9421) == "94.2 %"


def test_a_cap_by_batch_follows_from_the_measured_sizes() -> None:
    """Catches a loss in batches that is told without what to do about it, and a cap that no measurement asks for."""

    def told(length: dict[str, object], width: float = 0.05, **gains: float) -> list[str]:
        batches = tuple(
            b.model_copy(update={"speedup": measurement("rate", g, (g - width, g + width), n=6)}) if b.speedup else b
            for b in speed().batches
            for g in [gains[f"b{b.batch}"]]
        )
        recipe = example().recipe | {"speculation": {"draft_length": {"by_batch": [], "k": 3, "max_k": 8, **length}}}
        found = example().model_copy(
            update={"recipe": recipe, "speed": speed().model_copy(update={"batches": batches})}
        )
        caps = [f.text.partition("draft_length.by_batch: ")[2] for f in verdict.findings(found)]
        return [cap for cap in caps if cap]

    assert told({"policy": "optimal"}, b2=1.3, b4=0.9) == ["[[1, 3, 8], [4, 4, 0]]"]
    assert told({"policy": "fixed"}, b2=0.9, b4=0.8) == ["[[1, 1, 3], [2, 4, 0]]"]
    assert told({"policy": "optimal"}, b2=0.9, b4=1.1) == []  # the largest pays
    assert told({"policy": "optimal"}, b2=1.3, b4=1.04) == [
        "[[1, 3, 8], [4, 4, 0]]"
    ]  # the estimate pays, its low end not
    assert told({"policy": "optimal"}, width=0.8, b2=1.3, b4=0.9) == [
        "[[1, 1, 8], [2, 4, 0]]"
    ]  # alone it is shown to pay
    assert told({"policy": "optimal", "by_batch": [[1, 3, 8], [4, 4, 0]]}, b2=1.3, b4=0.9) == []  # it is there


def test_the_model_of_speculation_is_drawn_over_what_decides_it() -> None:
    """Catches curves at another acceptance or cost than the measured ones, and a gain where drafting loses."""
    plots = {b.caption: b for b in document(example()).blocks if isinstance(b, Plot)}
    length, alpha, cost = (
        {p.x: p.y for p in plots[f"Predicted speedup by {what}"].series[0].points}
        for what in (
            "draft length",
            "acceptance, at the best length",
            "cost of a draft token, at the best length",
        )
    )
    expected = (1 - 0.71**6) / (1 - 0.71) / (5 * 0.2 + 1.3)  # theorem 3.8 with a verification that costs 1.3
    assert length[5] == pytest.approx(expected)
    assert length[0] == alpha[0.1] == 1.0
    assert max(length.values()) == pytest.approx(cost[0.2])  # the measured cost, at the best length
    assert list(alpha.values()) == sorted(alpha.values())
    assert list(cost.values()) == sorted(cost.values(), reverse=True)
    assert cost[1.0] == 1.0  # not to draft


def test_temperatures_are_drawn_where_there_are_several() -> None:
    """Catches a sweep whose rows have to be put side by side by the reader."""
    assert not any("temperature" in b.caption for b in document(example()).blocks if isinstance(b, Plot))
    cool, warm = speed(), speed(1.1)
    both = cool.model_copy(
        update={
            name: (*getattr(cool, name), *(row.model_copy(update={"temperature": 1.0}) for row in getattr(warm, name)))
            for name in ("arms", "ratios", "acceptance")
        }
    )
    plots = {b.caption: b for b in document(example().model_copy(update={"speed": both})).blocks if isinstance(b, Plot)}
    (series,) = plots["Speedup of drafting by temperature"].series
    found = [(point.x, point.y) for point in series.points]
    assert found == [(0.0, 1.42), (1.0, 1.1)]
    assert [point.x for point in plots["Acceptance by temperature"].series[0].points] == [0.0, 1.0]


def test_batches_and_sources_have_their_tables() -> None:
    """Catches batches that are measured and not shown, a loss without its advice, and sources that are summed up."""
    rate = Spread(median=90.0, q1=85.0, q3=95.0, n=6, unit="tokens/s")
    plain = BatchSpeed(arm="quantized", baseline="quantized", batch=4, temperature=0.0, rate=rate)
    gain = Measurement(metric="tokens per second", value=0.8, unit="x", n=6, ci=(0.75, 0.85))
    drafts = plain.model_copy(
        update={"arm": "quantized + draft", "speedup": gain, "draft_length": 2.5, "equal": 11, "answers": 12}
    )
    found = speed()
    sources = (SourceCounts(source="lookup", steps=10, drafted=40, accepted=30),)
    acceptance = tuple(a.model_copy(update={"sources": sources, "nodes_per_step": 7.0}) for a in found.acceptance)
    measured = found.model_copy(update={"batches": (plain, drafts), "acceptance": acceptance})
    page = document(example().model_copy(update={"speed": measured}))
    tables = {block.caption: block for block in page.blocks if isinstance(block, Table)}
    (batches,) = (table for caption, table in tables.items() if caption.startswith("Tokens per second of all"))
    assert batches.rows[1][:3] == ("quantized + draft", "4", number(90.0))
    assert batches.rows[1][-1] == "11 of 12"
    assert batches.columns[-1] == "equal answers"
    sourced = tables["Acceptance by what drafted"].rows
    assert sourced[0] == ("quantized + draft: all", "lookup", "10", "40", "30", number(4.0))
    said = [(f.tone, f.text) for f in page.blocks if isinstance(f, Finding)]
    assert (
        "bad",
        f"at batch 4: quantized + draft runs at {number(0.8)}× the speed of quantized, cap it by_batch",
    ) in said
    assert any(tone == "open" and "11 of 12 greedy answers" in text for tone, text in said)
    markdown = report_markdown.render(page)
    assert "one request at a time" not in markdown
