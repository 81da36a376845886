"""The named data sets of `eval/datasets.yaml`: where their rows lie and which fields carry text."""

from functools import cache
from typing import Annotated

from pydantic import Field

from qspec.errors import RecipeError
from qspec.eval_files import eval_dir
from qspec.schema.problems import closest, validate
from qspec.schema.quantization import Strict
from qspec.schema.text import parse_yaml, read_text


class LocalFile(Strict):
    """A file below the data folder; `fewshot` holds the worked examples of a task."""

    file: str
    fewshot: str | None = None


class RemoteSet(Strict):
    """A Hub data set, or `path: json` and the address of a file. `text` overrides the local files' fields."""

    path: str
    split: str
    config: str | None = None
    file: str | None = None
    rows: Annotated[int, Field(ge=1)] | None = None
    text: tuple[str, ...] | None = None


class DataSet(Strict):
    """One entry of `eval/datasets.yaml`; the file's head explains the fields."""

    local: LocalFile
    remote: RemoteSet
    text: tuple[str, ...]
    join: str = "\n\n"
    prompt: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    category: str | None = None
    kind: str | None = None
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)


@cache
def read_datasets() -> dict[str, DataSet]:
    """All named data sets."""
    path = eval_dir() / "datasets.yaml"
    entries = parse_yaml(read_text(path, "data set list"), path.name)
    return {name: validate(DataSet, entry, f"{path.name}: {name}") for name, entry in entries.items()}


def dataset(name: str) -> DataSet:
    """The data set of that name; raises `RecipeError` with the closest valid ones."""
    known = read_datasets()
    if name not in known:
        fix = f"{closest(name, list(known))}use a .jsonl, .parquet or .txt file, or one of: {', '.join(known)}"
        raise RecipeError(f"data set {name!r}", "is neither a named data set nor a file", fix)
    return known[name]
