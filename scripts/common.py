"""What benchmarks of a matrix share: their options, names of what they keep, and the form of a baseline file."""

import argparse
from collections.abc import Callable, Iterable, Mapping
import json
from pathlib import Path
from typing import Any
import warnings

import torch

from qspec.eval_files import eval_dir
from qspec.provenance import atomic_write, digest_of
from scripts.measured import code_state


def read_options(
    description: str | None, matrix: str, add: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> argparse.Namespace:
    """The options of the command line, threads set, warnings off; `matrix`: the default one's file; `add` adds more."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", type=Path, default=eval_dir() / "matrices" / matrix)
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--threads", type=int)
    add(parser)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    return options


def digest(settings: Any) -> str:
    """Of all that decides a number: what a changed setting gives is kept under another name."""
    return digest_of(settings)[:12]


def write_baseline(path: Path, environment: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write {environment, rows}, a line per row; a new environment gets the date and the commit of the code."""
    text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    facts = json.dumps(code_state() | dict(environment), indent=1)
    atomic_write(path, f'{{"environment": {facts},\n"rows": [\n{text}\n]}}\n')
