"""Hidden numbers: prompts that are what they say, arms that are told apart, and a KV cache that is blamed rightly."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.measure.needle import DIGITS, measure_needles, questions
from qspec.progress import Progress
from qspec.report.accuracy import lost_contexts, needle_finding
from qspec.report.document import Plot, Table
from qspec.report.gate import judge, parse
from qspec.report.page import document
from qspec.schema.recipe import NeedleSpec
from qspec.schema.results import Accuracy, Needles
from tests.arms import Letters
from tests.example_results import example

LETTERS = Letters()


class Recaller:
    """An LM that goes on as after the latest earlier place that looks the same; it sees `sight` tokens back."""

    vocab_size, max_length = 259, 8192
    LOOK = 8

    def __init__(self, sight: int) -> None:
        self.sight, self.text = sight, list[int]()

    @property
    def length(self) -> int:
        return len(self.text)

    def truncate(self, length: int) -> None:
        del self.text[length:]

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        self.text += tokens_T.tolist()
        rows = len(tokens_T) if last is None else last
        logits_TV = torch.zeros(rows, self.vocab_size)
        for row in range(rows):
            end = len(self.text) - rows + row + 1
            seen = self.text[max(0, end - self.sight) : end]
            for start in range(len(seen) - self.LOOK - 1, -1, -1):
                if seen[start : start + self.LOOK] == seen[-self.LOOK :]:
                    logits_TV[row, seen[start + self.LOOK]] = 5
                    break
        return logits_TV


@pytest.fixture
def spec(tmp_path: Path) -> NeedleSpec:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {i} tells of {i * i} things." for i in range(400)), encoding="utf-8")
    return NeedleSpec(data=str(path), lengths=(300, 900), depths=(0.1, 0.9), repeats=6)


def asked(spec: NeedleSpec, quantized: int, float_kv: int = 10_000) -> Needles:
    """Arms that see everything, `quantized` tokens back and `float_kv` tokens back."""
    sights = {"original": 10_000, "quantized": quantized, "float_kv": float_kv}
    arms = {name: (lambda sight=sight: Recaller(sight)) for name, sight in sights.items()}
    return measure_needles(arms, LETTERS, spec, 0, Progress(quiet=True))


def test_prompts_have_their_length_and_hide_one_answer(spec: NeedleSpec):
    """Would catch contexts longer than they are called, answers that stand elsewhere too, and numbers asked twice."""
    found = questions(LETTERS, spec, 0)
    assert [(q.length, q.depth) for q in found] == [(n, d) for n in (300, 900) for d in (0.1, 0.9) for _ in range(6)]
    for question in found:
        assert len(question.prompt) + len(question.answer) == question.length
        text, answer = LETTERS.decode(question.prompt), LETTERS.decode(question.answer)
        assert len(answer) == 1 + DIGITS
        assert text.count(answer) == 1
        assert question.prompt[0] == 1  # BOS stays in front
        assert text.index(answer) / len(text) == pytest.approx(question.depth, abs=0.35)
    assert len({tuple(q.answer) for q in found}) == len(found)
    assert questions(LETTERS, spec, 0) == found
    assert questions(LETTERS, spec, 1) != found


def test_a_context_without_room_for_text_is_refused(spec: NeedleSpec):
    """Would catch a prompt that is all question."""
    with pytest.raises(RecipeError, match="leaves 12 tokens of text around"):
        questions(LETTERS, spec.model_copy(update={"lengths": (140,)}), 0)


def test_what_is_lost_is_found_and_blamed(spec: NeedleSpec):
    """Would catch arms that are swapped, a loss that only long contexts have averaged away, a cache that is spared."""
    needles = asked(spec, quantized=500)
    short, long = needles.lengths
    assert {arm: m.value for arm, m in short.found.items()} == {"original": 1, "quantized": 1, "float_kv": 1}
    assert {arm: m.value for arm, m in long.found.items()} == {"original": 1, "quantized": 0.5, "float_kv": 1}
    assert long.difference.value == -0.5  # the six that were hidden early
    assert (long.recovery, long.p_value) == (0.5, pytest.approx(2 * 0.5**6))
    assert long.nll.value > 0.5 > abs(short.nll.value)
    (said,) = lost_contexts(needles)
    assert said.text.startswith("contexts of 900 tokens: quantized is worse by 50.0 points")
    assert said.text.endswith("the KV cache alone loses them: do not quantize it so from here on")
    assert needle_finding(needles).tone == "bad"
    (weights,) = lost_contexts(asked(spec, quantized=500, float_kv=500))
    assert "KV cache" not in weights.text


def test_nothing_lost_is_no_proof(spec: NeedleSpec):
    """Would catch "long contexts are safe" from two dozen numbers."""
    needles = asked(spec, quantized=10_000)
    assert lost_contexts(needles) == []
    found = needle_finding(needles)
    assert found.tone == "open"
    assert "a drop of" in found.text


def test_a_model_that_finds_none_is_no_measure(spec: NeedleSpec):
    """Would catch "nothing lost" said of a model that never found a number."""
    arms = {name: (lambda: Recaller(20)) for name in ("original", "quantized")}
    needles = measure_needles(arms, LETTERS, spec, 0, Progress(quiet=True))
    assert needle_finding(needles).text.endswith("the original finds none, so none can be lost")
    assert needles.pooled.recovery is None
    assert needles.pooled.kv_nll is None


def test_report_and_gates_know_them(spec: NeedleSpec):
    """Would catch a measurement that no page shows and no gate reaches."""
    results = example().model_copy(update={"accuracy": Accuracy(needles=asked(spec, quantized=500))})
    page = document(results)
    (plot,) = [b for b in page.blocks if isinstance(b, Plot) and b.caption.startswith("Hidden numbers")]
    assert [series.name for series in plot.series] == ["original", "quantized", "quantized, float KV cache"]
    assert [(p.x, p.y) for p in plot.series[1].points] == [(300, 1.0), (900, 0.5)]
    tables = [block for block in page.blocks if isinstance(block, Table)]
    (table,) = [table for table in tables if table.caption.startswith("Quantized against original; nll")]
    assert [row[0] for row in table.rows] == ["300", "900", "all"]
    missed = {o.label: o.missed for o in judge([parse("needle<0.98")], results)}
    assert missed == {"all": True, "300": False, "900": True}
