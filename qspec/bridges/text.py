"""Text for calibration, fidelity and speed: named data sets (`eval/datasets.yaml`) and the user's own files.

Rows come from the folder `$QSPEC_DATA` (default `../shared/data`) when it holds the file, else through `datasets`.
Calibration reads the first half of a data set's rows, `windows` and `held_out` the second, so a model is never judged
on the text it was calibrated on.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
import json
import logging
import os
from pathlib import Path
import random
import re
from typing import Any, TypeVar

from qspec.bridges.hub import offline_without_hub
from qspec.errors import RecipeError, SourceError
from qspec.records import Tokenizer
from qspec.schema.datasets import DataSet, LocalFile, RemoteSet, dataset, read_datasets
from qspec.schema.problems import closest
from qspec.schema.recipe import CalibrationSpec, Recipe

T = TypeVar("T")
Row = dict[str, Any]
SUFFIXES = (".jsonl", ".parquet", ".txt")
_SPACE = re.compile(r"\s+")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")

log = logging.getLogger("qspec")


@dataclass(frozen=True)
class BenchmarkPrompt:
    """One request of a benchmark: what the user says first."""

    category: str
    text: str


@dataclass(frozen=True)
class Whereabouts:
    """Where a data set is looked for: the first file that is absent, else the first one.

    remote: None for a user's own file; offline: the variable that forbids to fetch, or empty.
    """

    path: Path
    present: bool
    remote: str | None = None
    offline: str = ""


@dataclass(frozen=True)
class _Source:
    """A data set where its rows come from: the file at `path`, or the Hub when that is None."""

    name: str
    entry: DataSet
    path: Path | None

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that carry a row's text there."""
        return self.entry.text if self.path is not None else self.entry.remote.text or self.entry.text

    def rows(self, limit: int | None = None) -> list[Row]:
        if self.path is not None:
            return list(islice(_read_file(self.path), limit))
        most = min(n for n in (limit, self.entry.remote.rows, 10**9) if n is not None)
        return list(islice(_stream(self.name, self.entry.remote), most))


def load_rows(name: str, limit: int | None = None) -> list[Row]:
    """Rows of a named data set or of a `.jsonl`, `.parquet` or `.txt` file (rows: paragraphs), at most `limit`.

    Raises `RecipeError` for a name that is neither, `SourceError` when the rows cannot be had.
    """
    return _find(name).rows(limit)


def held_out(name: str) -> list[str]:
    """Texts of the second half of a data set's rows, without those that stand in the first half too."""
    source = _find(name)
    first, second = _halves([_text(row, source.fields) for row in source.rows()])
    known = set(first)
    return [text for text in second if text not in known]


def table(rows: Sequence[Row]) -> Any:
    """Rows as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list(list(rows))


def data_names(recipe: Recipe, calibrates: bool = True) -> list[str]:
    """Every data set that the recipe reads, once; without the calibration text if nothing `calibrates`."""
    names = [source.name for source in recipe.calibration.data if calibrates]
    fidelity, needle = recipe.evaluation.fidelity, recipe.evaluation.needle
    names += [fidelity.data, *fidelity.domains] if fidelity else []
    names += [needle.data] if needle else []
    names += [task.name for task in recipe.evaluation.tasks if task.name in read_datasets()]
    names += [recipe.benchmark.prompts] if recipe.benchmark else []
    return list(dict.fromkeys(names))


@contextmanager
def cached_without_hub() -> Iterator[None]:
    """Within it data sets come from this machine alone where the Hub does not answer at once."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    with offline_without_hub() as offline:
        datasets.config.HF_HUB_OFFLINE = before or offline
        try:
            yield
        finally:
            datasets.config.HF_HUB_OFFLINE = before


def local_files(name: str) -> dict[str, Path]:
    """Files of a named data set on this machine: `test`, and `fewshot` if it has worked examples; {} when absent."""
    local = dataset(name).local
    files = {"test": data_file(local.file), "fewshot": data_file(local.fewshot) if local.fewshot else None}
    paths = {key: path for key, path in files.items() if path is not None}
    return paths if "test" in paths and (local.fewshot is None or "fewshot" in paths) else {}


def where_from(name: str) -> Whereabouts:
    """Whether rows of `name` lie on this machine, and where else they are to be had; reads and fetches nothing."""
    if name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        return Whereabouts(path.absolute(), path.is_file())
    entry = dataset(name)
    paths = [_data_folder().absolute() / file for file in (entry.local.file, entry.local.fewshot) if file]
    missing = [path for path in paths if not path.is_file()]
    remote = entry.remote.file or f"the Hub data set {entry.remote.path}"
    set_on = [key for key in _OFFLINE if os.environ.get(key, "").lower() in ("1", "true", "yes", "on")]
    return Whereabouts((missing or paths)[0], not missing, remote, set_on[0] if set_on else "")


def origin(name: str) -> str:
    """Where the rows of `name` come from, as a report states it: a file's name or a Hub data set."""
    source = _find(name)
    return source.path.name if source.path is not None else source.entry.remote.file or source.entry.remote.path


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> tuple[list[int], bool]:
    """A request as it is served, and whether through a chat template; a model without one gets plain text."""
    try:
        return tokenizer.chat([{"role": "user", "content": prompt}]), True
    except SourceError:
        return tokenizer.encode(prompt), False


def calibration_rows(spec: CalibrationSpec, tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    """`spec.samples` token rows of `spec.length` (chat rows may be shorter), tokenised as served: BOS, or the template.

    Sources share the samples by weight, and the others make up for one that is short (a warning in the log); the rows
    are spread over the first half of each. Raises `SourceError` if all together hold fewer, with how many they hold.
    """
    sources, most = [_find(data.name) for data in spec.data], [spec.samples] * len(spec.data)
    texts = [] if spec.chat_template else [_Running.halves(source)[0] for source in sources]

    def read(i: int, count: int) -> list[list[int]]:
        generator = random.Random(f"{seed} {spec.data[i].name}")
        if spec.chat_template:
            half, _ = _halves(sources[i].rows())
            return _conversations(half, sources[i], count, spec.length, tokenizer, generator)
        starts = [(n + generator.random()) / count for n in range(count)]
        return texts[i].windows(starts, spec.length, tokenizer)

    by_source: list[list[list[int]]] = [[] for _ in sources]
    weights = [data.weight for data in spec.data]
    while [len(rows) for rows in by_source] != (shares := _shares(weights, most, spec.samples)):
        for i, share in enumerate(shares):
            if len(by_source[i]) != share:
                by_source[i] = read(i, share)
                most[i] = len(by_source[i]) if len(by_source[i]) < share else most[i]
    kind = "conversations" if spec.chat_template else f"rows of {spec.length} tokens"
    held = ", ".join(f"{len(rows)} of {data.name}" for rows, data in zip(by_source, spec.data, strict=True))
    if (total := sum(map(len, by_source))) < spec.samples:
        rule = f"the first half holds {total} {kind} ({held}), and {spec.samples} are asked for"
        raise SourceError("calibration data", rule, "ask for fewer or shorter ones, or add text")
    if short := [data.name for data, limit in zip(spec.data, most, strict=True) if limit < spec.samples]:
        log.warning("calibration data %s is short: the %d %s are %s", ", ".join(short), spec.samples, kind, held)
    return [row for rows in by_source for row in rows]


def windows(name: str, count: int, length: int, tokenizer: Tokenizer) -> list[list[int]]:
    """`count` windows of `length` tokens from the second half of a data set: in order, apart, BOS first.

    Raises `SourceError` for a text that holds fewer, with how many it holds.
    """
    starts = [i / count for i in range(count)]
    windows = _Running.halves(_find(name))[1].windows(starts, length, tokenizer)
    if len(windows) < count:
        rule = f"its second half holds {len(windows)} windows of {length} tokens, and {count} are asked for"
        raise SourceError(f"held-out text {name}", rule, "ask for fewer or shorter ones, or add text")
    return windows


def prompts(
    name: str,
    per_category: int | None,
    categories: Sequence[str] | None = None,
    fits: Callable[[str], bool] | None = None,
) -> list[BenchmarkPrompt]:
    """The first `per_category` requests (None: all) of every category (first turns) that `fits` lets pass.

    A data set may group its categories (Spec-Bench's eight of MT-bench are `multi_turn`); by default the groups count,
    and both kinds of name may be asked for. Raises `SourceError` for a category that has fewer, with how many it has.
    """
    source = _find(name)
    entry, rows, fields = source.entry, source.rows(), source.entry.prompt or source.fields
    group = {member: wide for wide, members in entry.groups.items() for member in members}
    own = [_category(row, entry) for row in rows]
    wide = [group.get(category, category) for category in own]
    wanted = tuple(categories) if categories is not None else tuple(dict.fromkeys(wide))
    chosen: list[BenchmarkPrompt] = []
    for category in wanted:
        matching = (row for row, a, b in zip(rows, own, wide, strict=True) if category in (a, b))
        texts = (_text(row, fields) for row in matching)
        fitting = (text for text in texts if text and (fits is None or fits(text)))
        if category not in own and category not in wide:
            valid = sorted({*own, *wide})
            fix = f"{closest(category, valid)}use one of: {', '.join(valid)}"
            raise RecipeError(f"prompt category {category!r}", f"does not exist in {name}", fix)
        taken = [BenchmarkPrompt(category, text) for text in islice(fitting, per_category)]
        if len(taken) < (per_category or 0):
            rule = f"holds {len(taken)} that fit the context, and {per_category} are asked for"
            fix = "lower per_category (null: all there are), shorten max_new_tokens, or name other categories"
            raise SourceError(f"prompts {name}, category {category}", rule, fix)
        chosen += taken
    if not chosen:
        raise SourceError(name, "holds no prompt that fits the context", "shorten max_new_tokens or use other prompts")
    return chosen


def requests(name: str) -> list[str]:
    """The request of every row of a data set: its prompt fields, or its text where it has none; empty ones left out."""
    source = _find(name)
    texts = (_text(row, source.entry.prompt or source.fields).strip() for row in source.rows())
    return [text for text in texts if text]


def _find(name: str) -> _Source:
    """The data set of a name; a user's own file gets an entry with the usual field names."""
    if name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        if not path.is_file():
            raise SourceError(name, "does not exist", "give the path of a .jsonl, .parquet or .txt file")
        own = RemoteSet(path=path.name, split="train")
        entry = DataSet(local=LocalFile(file=name), remote=own, text=("text",), category="category")
        return _Source(name, entry, path)
    entry = dataset(name)
    return _Source(name, entry, data_file(entry.local.file))


def data_file(file: str) -> Path | None:
    """A file of the data folder (`$QSPEC_DATA`), None where it is absent."""
    path = _data_folder() / file
    return path if path.is_file() else None


def _data_folder() -> Path:
    return Path(os.environ.get("QSPEC_DATA", "../shared/data")).expanduser()


def _read_file(path: Path) -> Iterator[Row]:
    try:
        yield from _file_rows(path)
    except (OSError, ValueError) as error:  # no permission; bytes that are no UTF-8; Parquet's own, a ValueError
        rule = f"cannot be read ({' '.join(str(error).split())[:120]})"
        raise SourceError(str(path), rule, "give UTF-8 text, or an intact Parquet file") from error


def _file_rows(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".parquet":
            yield from _load_dataset("parquet", data_files=str(path), split="train")
        case ".txt":
            yield from ({"text": part} for part in path.read_text(encoding="utf-8-sig").split("\n\n") if part.strip())
        case _:
            with path.open(encoding="utf-8-sig") as lines:
                yield from (_json_row(line, path, number) for number, line in enumerate(lines, 1) if line.strip())


def _json_row(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise SourceError(f"{path}, line {number}", "is no JSON object", "write one JSON object per line")
    return row


def _stream(name: str, remote: RemoteSet) -> Iterator[Row]:
    """Rows of a remote set, fetched as they are read."""
    try:
        files = {"data_files": remote.file} if remote.file else {"name": remote.config}
        yield from _load_dataset(remote.path, split=remote.split, **files)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        rule = f"cannot be read from {remote.path} ({type(error).__name__}: {reason})"
        fix = "go online, or set QSPEC_DATA to a folder that holds its file, or name a local file"
        raise SourceError(f"data set {name}", rule, fix) from error


def _load_dataset(path: str, **options: Any) -> Iterable[Row]:
    from datasets import load_dataset

    rows: Iterable[Row] = load_dataset(path, streaming=True, **options)
    return rows


def _text(row: Row, fields: Sequence[str]) -> str:
    """The fields' text, joined by an empty line; a list gives its items on lines."""
    parts = ("\n".join(_items(row, field.split("."))) for field in fields)
    return "\n\n".join(part for part in parts if part)


def _items(value: Any, path: Sequence[str]) -> list[str]:
    """Text under a dotted path; a list is entered at an index, else in all its items."""
    if isinstance(value, list):
        if path and path[0].isdigit():
            return _items(value[int(path[0])], path[1:]) if int(path[0]) < len(value) else []
        return [text for item in value for text in _items(item, path)]
    if path:
        return _items(value.get(path[0]), path[1:]) if isinstance(value, dict) else []
    return [] if value is None else [str(value)]


def _category(row: Row, entry: DataSet) -> str:
    return str(row.get(entry.category, "text")) if entry.category else entry.kind or "text"


def _shares(weights: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """Split `total` by weight (largest remainders), none above its `most`: the others get what is left over."""
    shares, others = list(most), list(range(len(weights)))
    while others:
        left = total - sum(limit for i, limit in enumerate(most) if i not in others)
        exact = {i: left * weights[i] / sum(weights[i] for i in others) for i in others}
        shares = [int(exact[i]) if i in exact else limit for i, limit in enumerate(most)]
        for i in sorted(others, key=lambda i: shares[i] - exact[i])[: total - sum(shares)]:
            shares[i] += 1
        if all(shares[i] <= most[i] for i in others):
            break
        others = [i for i in others if shares[i] <= most[i]]
    return [min(share, limit) for share, limit in zip(shares, most, strict=True)]


def _halves(rows: list[T]) -> tuple[list[T], list[T]]:
    """The rows that are read first, and those that models are judged on."""
    return rows[: max(1, len(rows) // 2)], rows[len(rows) // 2 :]


@dataclass(frozen=True)
class _Running:
    """Rows as one text, and where in it each begins."""

    text: str
    starts: list[int]

    @classmethod
    def halves(cls, source: _Source) -> "tuple[_Running, _Running]":
        """Both halves of a data set's rows, or of the text of its only one."""
        texts = [_text(row, source.fields) for row in source.rows()]
        if len(texts) == 1:
            middle = _next_word(texts[0], len(texts[0]) // 2)
            return cls(texts[0][:middle], [0]), cls(texts[0][middle:], [0])
        first, second = (cls.of(half, source.entry.join) for half in _halves(texts))
        return first, second

    @classmethod
    def of(cls, texts: Sequence[str], join: str) -> "_Running":
        lengths = (len(text) + len(join) for text in texts[:-1])
        return cls(join.join(texts), list(accumulate(lengths, initial=0))[: len(texts)])

    def windows(self, starts: Sequence[float], length: int, tokenizer: Tokenizer) -> list[list[int]]:
        """Windows of `length` tokens that begin at rows `starts` (shares of all) or, in one that is used up, behind it.

        Where these do not all fit, they are taken evenly from all that the text holds, back to back; where there are
        fewer than `starts`, all of them.
        """
        windows, row = list[list[int]](), 0
        for start in starts:
            row = max(row, int(start * len(self.starts)))
            if row == len(self.starts) or (window := self._window(self.starts[row], length, tokenizer)) is None:
                break
            windows.append(window[0])
            row = bisect_left(self.starts, window[1])
        if len(windows) == len(starts):
            return windows
        windows, at = [], 0
        while (window := self._window(at, length, tokenizer)) is not None:
            windows.append(window[0])
            at = _next_word(self.text, window[1])
        if len(windows) <= len(starts):
            return windows
        return [windows[i * len(windows) // len(starts)] for i in range(len(starts))]

    def _window(self, at: int, length: int, tokenizer: Tokenizer) -> tuple[list[int], int] | None:
        """`length` tokens from character `at` on, and the first character that is in none of them; None: too few."""
        budget = 6 * length
        while True:
            ids = tokenizer.encode(self.text[at : at + budget])
            if len(ids) >= length:
                # a decoder may trim spaces or merge a cut character
                return ids[:length], at + len(tokenizer.decode(ids[:length])) + 8
            if at + budget >= len(self.text):
                return None
            budget *= 2


def _next_word(text: str, at: int) -> int:
    """The first character behind white space from `at` on, or `at` where that is far: Chinese has none."""
    space = _SPACE.search(text, at, at + 64)
    return space.end() if space else at


def _conversations(
    rows: Sequence[Row],
    source: _Source,
    samples: int,
    length: int,
    tokenizer: Tokenizer,
    generator: random.Random,
) -> list[list[int]]:
    """Rows as one exchange each, through the chat template, with the reference answer where there is one."""
    conversations: list[list[int]] = []
    entry = source.entry
    for row in generator.sample(list(rows), len(rows)):
        user = _text(row, entry.prompt or source.fields)
        if user and len(conversations) < samples:
            answer = tokenizer.encode(_text(row, entry.answer), special=False) if entry.answer else []
            conversations.append([*tokenizer.chat([{"role": "user", "content": user}]), *answer][:length])
    return conversations
