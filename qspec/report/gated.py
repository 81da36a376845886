"""The report that the command line asks for: one pair or several, with gates in front where there are any."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qspec.errors import RecipeError
from qspec.report.document import Block, Document, Heading
from qspec.report.files import read_named, read_results, read_study, study_file
from qspec.report.gate import Outcome, judge, parse, sentence
from qspec.report.page import document
from qspec.report.pairs import comparison
from qspec.schema.results import Results
from qspec.schema.speed_rows import SpeedRows


def gated(
    references: Sequence[Path], baseline: Path | None, conditions: Sequence[str], speed: Path | None = None
) -> tuple[Document, bool]:
    """The document, and whether a gate was missed. `baseline`: what `recovery` and `speedup` are over.

    speed: a speed study of the one pair, in place of what lies beside its results. Raises `RecipeError` for conditions
    that are none, `SourceError` for metrics that were not measured.
    """
    gates = [parse(condition) for condition in conditions]
    if baseline is not None and not gates:
        raise RecipeError(f"--against {baseline}", "changes nothing without a gate", "add --fail-if 'recovery<0.99'")
    if speed is not None and len(references) > 1:
        raise RecipeError(f"--speed {speed}", "is of one pair", f"put it at {study_file(references[0])}")
    pairs, against = read_named(references), read_results(baseline) if baseline is not None else None
    studies = [SpeedRows.read(speed)] if speed is not None else [read_study(reference) for reference in references]
    outcomes = {name: judge(gates, results, against) for name, results in pairs.items()}
    if len(pairs) == 1:
        page = document(next(iter(pairs.values())), studies[0])
    else:
        page = comparison(pairs, {name: s for name, s in zip(pairs, studies, strict=True) if s is not None})
    front = _gates(outcomes, against) if gates else []
    missed = any(outcome.missed for found in outcomes.values() for outcome in found)
    return replace(page, blocks=(*front, *page.blocks)), missed


def _gates(outcomes: Mapping[str, Sequence[Outcome]], against: Results | None) -> list[Block]:
    over = f"recovery and speedup over {against.name}" if against else "recovery and speedup over the original"
    several = len(outcomes) > 1
    found = [sentence(o, name if several else "") for name, listed in outcomes.items() for o in listed]
    return [Heading(f"Gates ({over})", brief=True), *sorted(found, key=lambda finding: finding.tone != "bad")]
