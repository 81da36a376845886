"""Functions that definitions in `eval/tasks` name: rows of data sets, items made of their texts, and code tried out.

Whether code that a model wrote passes its tests is seen in a process of its own, within limits. Limits are against
accidents, not against intent: a recipe must allow it (`run_code`), in a container.
"""

from collections.abc import Iterator, Mapping, Sequence
import hashlib
import re
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

from qspec.bridges.text import held_out, load_rows, table

_TITLE = re.compile(r"^ = [^=].*[^=] = \n?$")
"""The line above a page of WikiText; sections have more signs."""
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")
"""Between two sentences of a passage."""
_LAST_WORD = re.compile(r"(?P<context>.*[^ ]) (?P<word>[A-Za-z'-]+)[.!?]")
SHORTEST, LONGEST = 15, 70
"""Words of a passage that items are made of."""
CHOICES = 4
SECONDS = 10
MEMORY = 1 << 30
_GUARD = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def splits(test: str, train: str | None = None, **_: object) -> dict[str, Any]:
    """Whole data sets by the split that they serve as. The harness adds what it knows of the task."""
    names = {"test": test, "train": train}
    return {split: table(load_rows(name)) for split, name in names.items() if name is not None}


def wikitext_pages(**_: object) -> dict[str, Any]:
    """WikiText-2's test rows, which are lines, joined to pages."""
    lines = (str(row["text"]) for row in load_rows("wikitext2"))
    return {"test": table([{"page": page} for page in _pages(lines)])}


def last_words(data: str, **_: object) -> dict[str, Any]:
    """Passages of a data set without their last word, and that word."""
    matches = (_LAST_WORD.fullmatch(passage) for passage in _passages(data))
    return {"test": table([match.groupdict() for match in matches if match])}


def next_sentences(data: str, **_: object) -> dict[str, Any]:
    """Passages without their last sentence, and `CHOICES` that may be it: its own, and those of the next passages.

    Row: `context`, `choices`, and the place of the right one, `answer`.
    """
    parts = [_SENTENCE.split(passage) for passage in _passages(data)]
    parts = [sentences for sentences in parts if len(sentences) > 2 and len(sentences[-1].split()) > 3]
    rows = []
    for i, sentences in enumerate(parts):
        choices = [parts[(i + j) % len(parts)][-1] for j in range(CHOICES)]
        answer = int(_digest(" ".join(sentences)), 16) % CHOICES
        choices[0], choices[answer] = choices[answer], choices[0]
        rows.append({"context": " ".join(sentences[:-1]), "choices": choices, "answer": answer})
    return {"test": table(rows)}


def human_eval(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`pass@1` of an answer to a row of HumanEval: the prompt's function, completed, against the row's tests."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(program))}


def passes(program: str) -> bool:
    """Whether a program ends by itself, in time and without an error."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", _GUARD + program]
        try:
            done = subprocess.run(
                command, cwd=folder, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
            )
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a null byte in the program
            return False
    return done.returncode == 0


def _pages(lines: Iterator[str]) -> Iterator[str]:
    page, blank = "", True
    for line in lines:
        if blank and _TITLE.match(line) and page.strip():
            yield page
            page = ""
        page, blank = page + (line or "\n"), not line.strip()
    yield page


def _passages(data: str) -> list[str]:
    """First paragraphs of the rows that no calibration reads, on one line each, in the order of their digests.

    So any number of them from the front is a sample of all.
    """
    beginnings = {" ".join(text.split("\n\n")[0].split()) for text in held_out(data)}
    whole = (text for text in beginnings if text.endswith((".", "!", "?")))
    return sorted((text for text in whole if SHORTEST <= len(text.split()) <= LONGEST), key=_digest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
