"""Results where people have them: a run's folder, a pair's folder, or a file; and a speed study near them."""

from collections.abc import Sequence
from pathlib import Path

from qspec.errors import IntegrityError
from qspec.pair.check import read_manifest
from qspec.schema.manifest import NAME
from qspec.schema.results import Results
from qspec.schema.speed_rows import SpeedRows

PLACES = ("report/results.json", "results.json")
STUDY = "speed.json"


def read_results(reference: Path) -> Results:
    """Results of a run, a pair or a `results.json`. Raises `IntegrityError` where there are none."""
    return Results.read(results_file(reference))


def results_file(reference: Path) -> Path:
    """The file itself. Raises `IntegrityError` where there is none."""
    if not reference.is_dir():
        return reference
    report = read_manifest(reference).report if (reference / NAME).is_file() else None
    for place in (f"{report}/results.json", *PLACES) if report else PLACES:
        if (reference / place).is_file():
            return reference / place
    raise IntegrityError(str(reference), "holds no results.json", "give a run's or a pair's folder, or the file")


def study_file(reference: Path) -> Path:
    """Where a speed study belongs: beside the results; of a pair, which holds listed files only, beside its folder."""
    if (reference / NAME).is_file():
        folder = reference.absolute()
        return folder.with_name(f"{folder.name}.{STUDY}")
    return results_file(reference).with_name(STUDY)


def read_study(reference: Path) -> SpeedRows | None:
    """The speed study that lies where it belongs, if one does."""
    place = study_file(reference)
    return SpeedRows.read(place) if place.is_file() else None


def pages(references: Sequence[Path]) -> list[str]:
    """The reports that lie beside the results, as pages; the results themselves where there is none."""
    places = [results_file(reference) for reference in references]
    beside = [(place.with_name("report.html"), place) for place in places]
    return [str(page if page.is_file() else place) for page, place in beside]


def read_named(references: Sequence[Path]) -> dict[str, Results]:
    """Several by name; where two have one name, the paths tell them apart."""
    read = [read_results(reference) for reference in references]
    names = [results.name for results in read]
    unique = [name if names.count(name) == 1 else str(path) for name, path in zip(names, references, strict=True)]
    if len(set(unique)) < len(unique):
        raise IntegrityError(str(references[-1]), "is named twice", "give each pair once")
    return dict(zip(unique, read, strict=True))
