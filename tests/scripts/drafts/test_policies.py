"""The comparison of drafts and policies: what it keeps, and the rows that it makes of it."""

from pathlib import Path

import pytest

from qspec.eval_files import eval_dir
from qspec.measure.arm import Run
from qspec.schema.results import Mismatch
from qspec.speculation.types import Generation, StepRecord
from scripts.drafts import policies as bench_spec
from scripts.drafts.matrix import SpecSubject, read_spec_matrix

ROOT = Path(__file__).resolve().parents[3]


def _run(arm: str, prompt: int, steps: list[StepRecord]) -> Run:
    tokens = list(range(1 + sum(s.accepted + 1 for s in steps)))
    return Run(arm, 0.0, 0, prompt, Generation(tokens, steps, 0.1, sum(s.t_draft + s.t_verify for s in steps)))


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bench_spec.Comparison:
    monkeypatch.setattr(bench_spec, "WORK", tmp_path)
    name, subject = next(iter(read_spec_matrix(eval_dir() / "matrices/spec_bench.yaml", SpecSubject).items()))
    return bench_spec.Comparison(name, subject)


def _keep(comparison: bench_spec.Comparison, category: str, prompt: int, accepted: int) -> bench_spec.Kept:
    plain = [StepRecord(0, 0, 0.0, 1.0, 0.0)] * 6
    drafting = [StepRecord(2, accepted, 0.1, 1.0, 0.0, 2, "suffix")] * (6 // (accepted + 1))
    runs = [_run(bench_spec.PLAIN, prompt, plain)] + [_run(name, prompt, drafting) for name in comparison.cells]
    differing = [
        (
            next(iter(comparison.cells)),
            Mismatch(prompt=prompt, category=category, position=1, margin=1.0, near_tie=False),
        )
    ]
    kept = bench_spec.Kept(category, "C++ core", runs, differing if accepted else [])
    with comparison.path.open("a", encoding="utf-8") as file:
        file.write(kept.line())
    return kept


def test_what_is_kept_reads_back(comparison: bench_spec.Comparison) -> None:
    """Catches a record that loses a step's source or an answer's difference on its way through the file."""
    kept = _keep(comparison, "math", 3, 1)
    assert comparison.kept() == {(0.0, 0, 3): kept}


def test_rows_pair_each_draft_with_plain_decoding_by_category(comparison: bench_spec.Comparison) -> None:
    """Catches prompts of one category counted for another, arms compared with each other, and lost differences."""
    _keep(comparison, "math", 0, 2)
    _keep(comparison, "qa", 1, 0)
    rows = list(bench_spec.rows_of(comparison))
    assert len(rows) == 3 * len(comparison.cells)
    by = {(r["drafter"], r["policy"], r["category"]): r for r in rows}
    draft, policy = next(iter(comparison.cells.values()))
    everything, math, qa = (by[draft, policy, category] for category in ("all", "math", "qa"))
    assert (everything["n"], math["n"], qa["n"]) == (2, 1, 1)
    assert math["speedup"] == pytest.approx(6 / 2.2, abs=1e-3)
    assert qa["speedup"] == pytest.approx(6 / 6.6, abs=1e-3)
    assert (math["alpha"], qa["alpha"], math["tokens_per_step"]) == (1.0, 0.0, 3.0)
    assert (everything["equal"], math["equal"], qa["equal"]) == (0.5, 0.0, 1.0)
    assert math["lossless"] is False
