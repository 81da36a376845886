"""The report that the command line asks for: one pair or several, with gates in front where there are any."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qspec.errors import RecipeError
from qspec.schema.results import Results
from qspec.stages.document import Block, Document, Heading
from qspec.stages.gate import Outcome, judge, parse, sentence
from qspec.stages.report import document
from qspec.stages.report_pairs import comparison
from qspec.stages.results_files import read_named, read_results


def gated(references: Sequence[Path], baseline: Path | None, conditions: Sequence[str]) -> tuple[Document, bool]:
    """The document, and whether a gate was missed. `baseline`: what `recovery` and `speedup` are over.

    Raises `RecipeError` for conditions that are none, `SourceError` for metrics that were not measured.
    """
    gates = [parse(condition) for condition in conditions]
    if baseline is not None and not gates:
        raise RecipeError(f"--against {baseline}", "changes nothing without a gate", "add --fail-if 'recovery<0.99'")
    pairs, against = read_named(references), read_results(baseline) if baseline is not None else None
    outcomes = {name: judge(gates, results, against) for name, results in pairs.items()}
    page = document(*pairs.values()) if len(pairs) == 1 else comparison(pairs)
    front = _gates(outcomes, against) if gates else []
    missed = any(outcome.missed for found in outcomes.values() for outcome in found)
    return replace(page, blocks=(*front, *page.blocks)), missed


def _gates(outcomes: Mapping[str, Sequence[Outcome]], against: Results | None) -> list[Block]:
    over = f"recovery and speedup over {against.name}" if against else "recovery and speedup over the original"
    several = len(outcomes) > 1
    found = [sentence(o, name if several else "") for name, listed in outcomes.items() for o in listed]
    return [Heading(f"Gates ({over})"), *sorted(found, key=lambda finding: finding.tone != "bad")]
