"""Where tasks come from: definitions in `eval/tasks`, else the harness's own.

`mmlu_pro` runs offline where `$QSPEC_DATA` holds its rows: the harness's own task files with only the data path
exchanged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
import json
import logging
from pathlib import Path
import tempfile
from typing import Any

from qspec.bridges.harness.prompts import require_room
from qspec.bridges.text import cached_without_hub, local_files
from qspec.errors import RecipeError, SourceError
from qspec.eval_files import eval_dir
from qspec.schema.problems import closest
from qspec.schema.recipe import MMLU_PRO_SUBJECTS, TaskSpec

_LEADERBOARD = "leaderboard_mmlu_pro"
"""MMLU-Pro with its choices scored in place of answers written, in one part, over the same rows."""
DEFAULT_GEN_TOKS = 256
"""Answer length of generative tasks that state none, as in the harness's own models."""


def require(task: TaskSpec, context: int) -> int:
    """Load a task's definition and rows, so that one that cannot run in `context` tokens is refused before compute.

    Returns how many questions it asks.
    """
    with find_tasks(task) as (names, manager):
        try:
            with cached_without_hub():
                loaded = list(manager.load(names)["tasks"].values())
        except (OSError, ValueError, RuntimeError) as error:
            rule = f"cannot be loaded ({' '.join(str(error).split())[:120]})"
            fix = "go online, set QSPEC_DATA to a folder that holds its rows, or remove the task"
            raise SourceError(f"task {task.name!r}", rule, fix) from error
    if not task.run_code and any(getattr(item, "UNSAFE_CODE", False) for item in loaded):
        rule = "runs the code that the model writes, on this machine"
        raise RecipeError(f"task {task.name!r}", rule, "allow it with run_code: true, in a container without secrets")
    for item in loaded:
        if item.OUTPUT_TYPE == "generate_until":
            require_room(task.max_gen_toks or stated_length(item.config.generation_kwargs), context)
    rows = [len(item.eval_docs) for item in loaded]
    return sum(rows) if task.limit is None else sum(min(task.limit, count) for count in rows)


def stated_length(options: Mapping[str, Any] | None) -> int:
    """Most tokens of an answer by a task's own options."""
    options = options or {}
    return int(options.get("max_gen_toks") or options.get("max_new_tokens") or DEFAULT_GEN_TOKS)


@contextmanager
def find_tasks(task: TaskSpec) -> Iterator[tuple[list[str], Any]]:
    """Names to ask the harness for, and its index of tasks; generated files live as long as the context."""
    names = [task.name] if task.subjects is None else [f"{task.name}_{subject}" for subject in task.subjects]
    own = [eval_dir() / "tasks" / f"{name}.yaml" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        if task.name == "mmlu_pro":
            yield [str(path) for path in _mmlu_pro_files(task, Path(folder))], _index(defaults=False)
        elif task.name == _LEADERBOARD and (data := local_files("mmlu_pro")):
            original = _definitions() / "leaderboard" / "mmlu_pro" / "mmlu_pro.yaml"
            yield [str(_local_task(original, data, Path(folder), _LEADERBOARD))], _index(defaults=False)
        elif all(path.is_file() for path in own):
            yield [str(_continued(path, Path(folder))) for path in own], _index(defaults=False)
        else:
            _check_known(names, _index(defaults=True).all_tasks)
            yield names, _index(defaults=True)


def _continued(path: Path, folder: Path) -> Path:
    """A task of `eval/tasks`; one without `output_type` continues the harness's own definition of that name."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if "output_type" in load_yaml(path, resolve_func=False):
        return path
    content = {"include": [str(_definitions() / path.stem / path.name), str(path)], "task": path.stem}
    whole = folder / path.name
    whole.write_text(json.dumps(content), encoding="utf-8")
    return whole


def _definitions() -> Path:
    """Folder of the harness's own task definitions."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


@cache
def _index(defaults: bool) -> Any:
    """The harness's index of tasks; reading its thousands of definitions takes most of a minute, so once."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval.api.task").addFilter(lambda line: "Custom kwargs can be passed" not in line.getMessage())
    return TaskManager(include_defaults=defaults)


def _check_known(names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            fix = f"{closest(name, known)}`lm_eval ls tasks` lists them"
            raise RecipeError(f"task {name!r}", "is unknown to lm-eval and has no file in eval/tasks", fix)


def _mmlu_pro_files(task: TaskSpec, folder: Path) -> list[Path]:
    """Task files of the chosen subjects: the harness's own, over the local rows where there are any."""
    source = _definitions() / "mmlu_pro"
    chosen = [subject.replace(" ", "_") for subject in task.subjects or MMLU_PRO_SUBJECTS]
    originals = [source / f"mmlu_pro_{subject}.yaml" for subject in chosen]
    data = local_files("mmlu_pro")
    return [_local_task(original, data, folder, original.stem) for original in originals] if data else originals


def _local_task(original: Path, data: Mapping[str, Path], folder: Path, name: str) -> Path:
    """A task file (JSON is YAML) that includes `original` and reads the local rows."""
    files = {"test": str(data["test"]), "validation": str(data["fewshot"])}
    content = {
        "include": str(original),
        "task": name,
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": files},
    }
    path = folder / original.name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
