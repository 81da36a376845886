"""The report of one pair, verdict first, then the numbers behind it; and what the command line asks for: one pair or
several, with gates in front where there are any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qspec.errors import RecipeError
from qspec.provenance import atomic_write
from qspec.readable import percent
from qspec.report.accuracy import accuracy_blocks, lost_contexts, needle_blocks, needle_finding
from qspec.report.document import Block, Details, Document, Finding, Heading, Table
from qspec.report.drafts import acceptance_blocks, prediction_blocks
from qspec.report.files import read_named, read_results, read_study, study_file
from qspec.report.gate import GateOutcome, judge, parse, sentence
from qspec.report.headline import cost, differing_answers, lead, picture, tiles
from qspec.report.pairs import comparison
from qspec.report.render import data as report_data, html as report_html, markdown as report_markdown
from qspec.report.speed import speed_blocks, time_blocks
from qspec.report.study import study_blocks
from qspec.report.verdict import findings
from qspec.schema.results import Results
from qspec.schema.speed_rows import SpeedRows
from qspec.schema.text import dump_yaml


def report(results: Results, folder: Path) -> Path:
    """Write `results.json` and the report in all its forms into `folder`; returns the page's path."""
    atomic_write(folder / "results.json", results.dump())
    return write(document(results), folder, "results.json")


def write(page: Document, folder: Path, *beside: str) -> Path:
    """Write `report.html`, `.md`, `.csv` and `.json` into `folder`; returns the page's path.

    beside: names of other files of numbers that lie there, for the page to link to.
    """
    atomic_write(folder / "report.md", report_markdown.render(page))
    atomic_write(folder / "report.csv", report_data.as_csv(page))
    atomic_write(folder / "report.json", report_data.as_json(page))
    links = (*beside, "report.csv", "report.json", "report.md")
    atomic_write(folder / "report.html", report_html.render(page, links))
    return folder / "report.html"


def document(results: Results, study: SpeedRows | None = None) -> Document:
    """The report of `results` as blocks; study: of speed by lengths and batch."""
    device, cpu = str(results.recipe.get("device", "")), results.environment.get("cpu", "")
    about = [str(results.recipe.get("description", "")), f"{device}: {cpu}" if device == "cpu" and cpu else device]
    needles = results.accuracy.needles
    listed = [*_mixed(results), *findings(results)]
    if needles is not None:
        listed += [needle_finding(needles), *lost_contexts(needles)]
    blocks = [*_verdict(results, listed), *cost(results), *differing_answers(results)]
    blocks += accuracy_blocks(results.accuracy)
    if needles is not None:
        blocks += needle_blocks(needles)
    if results.speed is not None:
        parts = (speed_blocks, acceptance_blocks, prediction_blocks, time_blocks)
        blocks += [block for part in parts for block in part(results.speed)]
    if study is not None:
        blocks += study_blocks(results, study)
    blocks += [*_limits(results, study), *_notes(results), *_provenance(results)]
    subtitle = " · ".join(part for part in about if part)
    return Document(f"{results.name}: quantized speculative pair", subtitle, tuple(blocks), lead(results))


def _verdict(results: Results, listed: Sequence[Finding]) -> list[Block]:
    """A picture and the numbers at a glance, then what is proven, and what is not: losses before open questions."""
    alarms = [finding for finding in listed if finding.tone == "danger"]
    proven = sorted((f for f in listed if f.tone in ("good", "plain")), key=lambda f: f.tone == "plain")
    against = sorted((f for f in listed if f.tone in ("bad", "open")), key=lambda f: f.tone == "open")
    glance = tiles(results)
    blocks: list[Block] = [*alarms, *picture(results), *([glance] if glance.tiles else [])]
    blocks += [Heading("Proven", brief=True), *proven] if proven else []
    return blocks + ([Heading("Not proven, or lost", brief=True), *against] if against else [])


def _notes(results: Results) -> list[Block]:
    if not any(results.notes.values()):
        return []
    notes = [Details(f"{model} ({len(lines)} notes)", lines) for model, lines in results.notes.items() if lines]
    return [Heading("Quantization notes"), *notes]


def _limits(results: Results, study: SpeedRows | None) -> list[Block]:
    """The limits of these numbers."""
    lines = [*_unmeasured(results), *_from_elsewhere(results), *results.limits, *results.accuracy.skipped]
    for task in results.accuracy.tasks:
        name, available = f"{task.task} ({task.backend})", task.original.condition.get("rows_available")
        if isinstance(available, int) and available > task.original.n:
            lines.append(f"{name}: {task.original.n} of {available} items were asked.")
        if max(task.original_cut, task.quantized_cut) > 0:
            shares = f"{percent(task.original_cut)} / {percent(task.quantized_cut)}"
            limit = task.original.condition.get("max_gen_toks")
            lines.append(f"{name}: answers cut at {limit} tokens: {shares} (original / quantized).")
        if task.prompts_cut:
            lines.append(f"{name}: {task.prompts_cut} prompts lost their beginning (context).")
    if results.speed is not None and not results.speed.batches and study is None:
        lines.append("Speed was measured with one request at a time; batches behave differently.")
    if not lines:
        return []
    return [Heading("Limits", brief=True), Details("What these numbers do not show", tuple(lines), folded=False)]


def _unmeasured(results: Results) -> list[str]:
    """A sentence for each measurement that is missing."""
    speed, device = results.speed, results.recipe.get("device", "cpu")
    lines = [] if results.accuracy.parts() else ["Accuracy was not measured."]
    if speed is None:
        elsewhere = device != "cpu" and results.recipe.get("benchmark", {}) is not None
        where = f": the pair is for {device}, measure it there" * elsewhere
        lines.append(f"Speed was not measured{where}.")
    elif speed.arms and all(arm.arm != "original" for arm in speed.arms):
        lines.append("The original was not run: nothing here is a speedup over it.")
    return lines


def _from_elsewhere(results: Results) -> list[str]:
    """Measurements of another machine or release than the speed."""
    places: dict[str, list[str]] = {}
    for name, part in results.parts():
        if part.provenance is not None:
            places.setdefault(_place(part.provenance.environment), []).append(name)
    here = _place(results.environment)
    return [f"Measured elsewhere: {', '.join(names)} ({place})." for place, names in places.items() if place != here]


def _mixed(results: Results) -> list[Finding]:
    """Whether all numbers are of one pair: some may have been measured before a half changed."""
    digests: dict[str, set[str]] = {}
    for _, part in results.parts():
        for path, digest in part.provenance.files.items() if part.provenance else ():
            digests.setdefault(path, set()).add(digest)
    changed = sorted(path for path, known in digests.items() if len(known) > 1)
    if not changed:
        return []
    text = f"these are not all numbers of one pair: {', '.join(changed)} changed between them"
    return [Finding("bad", f"{text}, and qspec check says which to measure again")]


def _place(environment: Mapping[str, str]) -> str:
    return f"{environment.get('cpu', 'another machine')}, qspec {environment.get('qspec', 'unknown')}"


def _provenance(results: Results) -> list[Block]:
    environment = tuple(sorted(results.environment.items()))
    blocks: list[Block] = [Heading("Provenance"), Table("Environment", ("", "value"), environment)]
    weights: dict[tuple[str, str], list[str]] = {}
    for name, part in results.parts():
        for path, digest in part.provenance.files.items() if part.provenance else ():
            if path.endswith(".safetensors"):
                weights.setdefault((path, digest), []).append(name)
    if weights:
        rows = tuple((path, digest, ", ".join(names)) for (path, digest), names in sorted(weights.items()))
        blocks.append(Table("sha256", ("", "digest", "measured"), rows))
    return [*blocks, Details("Recipe", tuple(dump_yaml(results.recipe).splitlines()), code=True)]


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
    missed = any(outcome.missed for listed in outcomes.values() for outcome in listed)
    return replace(page, blocks=(*front, *page.blocks)), missed


def _gates(outcomes: Mapping[str, Sequence[GateOutcome]], against: Results | None) -> list[Block]:
    over = f"recovery and speedup over {against.name}" if against else "recovery and speedup over the original"
    several = len(outcomes) > 1
    sentences = [sentence(o, name if several else "") for name, listed in outcomes.items() for o in listed]
    return [Heading(f"Gates ({over})", brief=True), *sorted(sentences, key=lambda finding: finding.tone != "bad")]
