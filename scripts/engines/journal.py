"""What a comparison of engines keeps between runs: rounds in a journal, distances from the original in files."""

import json
from pathlib import Path
import re
from typing import Any

from qspec.provenance import atomic_write
from scripts.common import digest
from scripts.engines.build_peers import fidelity_subject
from scripts.engines.matrix import EngineMatrix
from scripts.engines.rows import Answer

WORK = Path("runs/bench_engines")
JOURNAL = WORK / "journal.jsonl"
Kept = dict[str, dict[int, Answer]]
"""Answers by the key of their cell and by round."""


def file_stem(name: str) -> str:
    """An engine's name without what file names do not take."""
    return re.sub("[^A-Za-z0-9+]+", "-", name)


def distance_path(name: str, matrix: EngineMatrix) -> Path:
    """Where an engine's distances are kept: by all that decides them."""
    engine = matrix.engines[name]
    settings = [engine.worker, engine.weights, engine.options, fidelity_subject(matrix).model_dump(mode="json")]
    return WORK / f"kl-{file_stem(name)}-{digest(settings)}.json"


def note(entry: dict[str, Any]) -> None:
    with JOURNAL.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_journal(drop: set[str]) -> tuple[Kept, dict[str, dict[str, Any]]]:
    """Answers and the engines' facts, by key; those of `drop` are left out, and removed from the file."""
    lines = JOURNAL.read_text(encoding="utf-8").splitlines() if JOURNAL.exists() else []
    entries = [entry for line in lines if (entry := json.loads(line))["key"] not in drop]
    if drop:
        atomic_write(JOURNAL, "".join(json.dumps(entry) + "\n" for entry in entries))
    kept: Kept = {}
    for entry in entries:
        kept.setdefault(entry["key"], {})[entry["round"]] = Answer(**entry["answer"])
    return kept, {entry["key"]: entry["facts"] for entry in entries}
