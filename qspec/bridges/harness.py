"""lm-evaluation-harness: a task on one arm, through qspec's own engine or through transformers on a folder.

Items keep the harness's hashes, so that two arms are compared item by item. `mmlu_pro` runs offline when
`$QSPEC_DATA` holds its rows: the harness's own task files with only the data path exchanged.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
import json
from pathlib import Path
import tempfile
from typing import Any

from qspec.bridges.harness_engine import CHAT, Cuts, Engine, require_room
from qspec.bridges.text import local_files
from qspec.errors import RecipeError, SourceError
from qspec.eval_files import eval_dir
from qspec.nn.lm import LM
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.problems import closest
from qspec.schema.recipe import MMLU_PRO_SUBJECTS, TaskSpec
from qspec.schema.results import Scalar

DEFAULT_GEN_TOKS = 256
"""Answer length of generative tasks that state none, as in the harness's own models."""


@dataclass(frozen=True)
class Sample:
    """One scored item. `cut`: its answer hit the token limit; `prompt_cut`: its prompt lost its beginning."""

    task: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    score: float
    cut: bool
    prompt_cut: bool


@dataclass(frozen=True)
class Scores:
    """A task on one arm: items in order, the metric's name, and what it was measured under."""

    metric: str
    samples: list[Sample]
    condition: dict[str, Scalar]


def require(task: TaskSpec, context: int) -> None:
    """Load a task's definition and rows, so that one that cannot run in `context` tokens is refused before compute."""
    with _tasks(task) as (names, manager):
        try:
            found = list(manager.load(names)["tasks"].values())
        except (OSError, ValueError, RuntimeError) as error:
            rule = f"cannot be loaded ({' '.join(str(error).split())[:120]})"
            fix = "go online, set QSPEC_DATA to a folder that holds its rows, or remove the task"
            raise SourceError(f"task {task.name!r}", rule, fix) from error
    for item in found:
        if item.OUTPUT_TYPE == "generate_until":
            require_room(task.max_gen_toks or _stated_length(item.config.generation_kwargs), context)


def _stated_length(options: Mapping[str, Any] | None) -> int:
    options = options or {}
    return int(options.get("max_gen_toks") or options.get("max_new_tokens") or DEFAULT_GEN_TOKS)


def evaluate(lm: LM, tokenizer: Tokenizer, task: TaskSpec, eos_ids: Collection[int], progress: Progress) -> Scores:
    """Run a task through qspec's engine, greedily.

    Raises `RecipeError` for an unknown task, and for answers that leave no room for a prompt.
    """
    engine = Engine(lm, tokenizer, eos_ids)
    condition: dict[str, Scalar] = {"bos": bool(tokenizer.encode("")), "context": lm.max_length}
    return _run(_engine_model(engine, progress), engine.cuts, task, condition)


def evaluate_folder(folder: Path, task: TaskSpec) -> Scores:
    """Run a task through the harness's transformers backend on a model folder (compressed weights included), on CPU."""
    cuts = Cuts()
    model = _folder_model(folder, cuts)
    condition: dict[str, Scalar] = {"bos": bool(model.tok_encode("")), "context": model.max_length}
    return _run(model, cuts, task, condition)


def _run(model: Any, cuts: Cuts, task: TaskSpec, condition: Mapping[str, Scalar]) -> Scores:
    from lm_eval import simple_evaluate

    with _tasks(task) as (names, manager):
        gen_kwargs = None if task.max_gen_toks is None else {"max_gen_toks": task.max_gen_toks}
        report = simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=task.num_fewshot,
            limit=task.limit,
            gen_kwargs=gen_kwargs,
            apply_chat_template=task.chat_template,
            fewshot_as_multiturn=task.chat_template,
            task_manager=manager,
            bootstrap_iters=0,
        )
    return _scores(report, cuts, task, condition)


def _scores(report: Mapping[str, Any], cuts: Cuts, task: TaskSpec, condition: Mapping[str, Scalar]) -> Scores:
    """Items of all sub-tasks under the first filter, by the first metric that scores single items."""
    samples: list[Sample] = []
    first = next(iter(report["samples"].values()))[0]
    metric = next((m for m in first["metrics"] if isinstance(first[m], (int, float))), None)
    if metric is None:
        raise RecipeError(f"task {task.name!r}", "has no score per item to compare arms by", "use another task")
    for name, items in report["samples"].items():
        for item in (item for item in items if item["filter"] == items[0]["filter"]):
            key = item["prompt_hash"]
            flags = (key in cuts.answers, key in cuts.prompts)
            samples.append(Sample(name, item["doc_id"], item["doc_hash"], key, float(item[metric]), *flags))
    tasks = list(report["samples"])
    config = report["configs"][tasks[0]]
    stated: dict[str, Scalar] = {
        "harness": str(report["lm_eval_version"]),
        "task_version": ", ".join(sorted({str(report["versions"][name]) for name in tasks})),
        "fewshot": ", ".join(sorted({str(report["n-shot"][name]) for name in tasks})),
        "limit_per_task": task.limit,
        "rows_available": sum(report["n-samples"][name]["original"] for name in tasks),
        "chat_template": task.chat_template,
        "max_gen_toks": (config.get("generation_kwargs") or {}).get("max_gen_toks"),
    }
    return Scores(f"{metric},{first['filter']}", samples, {**condition, **stated})


@contextmanager
def _tasks(task: TaskSpec) -> Iterator[tuple[list[str], Any]]:
    """What to ask the harness for, and its index of tasks; generated files live as long as the context."""
    names = [task.name] if task.subjects is None else [f"{task.name}_{subject}" for subject in task.subjects]
    own = [eval_dir() / "tasks" / f"{name}.yaml" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        if task.name == "mmlu_pro":
            yield [str(path) for path in _mmlu_pro_files(task, Path(folder))], _index(defaults=False)
        elif all(path.is_file() for path in own):
            yield [str(path) for path in own], _index(defaults=False)
        else:
            _check_known(names, _index(defaults=True).all_tasks)
            yield names, _index(defaults=True)


@cache
def _index(defaults: bool) -> Any:
    """The harness's index of tasks; reading its thousands of definitions takes most of a minute, so once."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=defaults)


def _check_known(names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            fix = f"{closest(name, known)}`lm_eval ls tasks` lists them"
            raise RecipeError(f"task {name!r}", "is unknown to lm-eval and has no file in eval/tasks", fix)


def _mmlu_pro_files(task: TaskSpec, folder: Path) -> list[Path]:
    """Task files of the chosen subjects: the harness's own, over the local rows where there are any."""
    import lm_eval.tasks

    source = Path(lm_eval.tasks.__file__).parent / "mmlu_pro"
    chosen = [subject.replace(" ", "_") for subject in task.subjects or MMLU_PRO_SUBJECTS]
    originals = [source / f"mmlu_pro_{subject}.yaml" for subject in chosen]
    data = local_files("mmlu_pro")
    return [_local_task(original, data, folder) for original in originals] if data else originals


def _local_task(original: Path, data: Mapping[str, Path], folder: Path) -> Path:
    """A task file (JSON is YAML) that includes `original` and reads the local rows."""
    files = {"test": str(data["test"]), "validation": str(data["fewshot"])}
    content = {
        "include": str(original),
        "task": original.stem,
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": files},
    }
    path = folder / original.name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _engine_model(engine: Engine, progress: Progress) -> Any:
    """The harness's model interface over an `Engine`; defined here so that lm-eval is imported when it is used."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, hash_string, make_disjoint_window

    class QspecLM(TemplateLM):  # type: ignore[misc]
        max_length = engine.lm.max_length
        tokenizer_name = engine.tokenizer.fingerprint()
        eot_token_id = min(engine.eos_ids, default=0)
        prefix_token_id = engine.prefix_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return engine.encode(string, special=add_special_tokens is not False)

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            return engine.encode_pair(context, continuation)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            for (context, _c), head, tail in requests:
                if len(head) + len(tail) > engine.lm.max_length + 1:
                    engine.cuts.prompts.add(hash_string(context))
            items = progress.track(requests, "scoring", total=len(requests), unit="request")
            return [engine.score(head, tail) for _, head, tail in items]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [sum(engine.score(*w)[0] for w in self._windows(r.args[0])) for r in requests]

        def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
            ids = engine.encode(text)
            return map(make_disjoint_window, get_rolling_token_windows(ids, engine.prefix_id, self.max_length, 1))

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            items = progress.track(requests, "answering", total=len(requests), unit="request")
            return [self._answer(*request.args) for request in items]

        def _answer(self, context: str, options: Mapping[str, Any]) -> str:
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            if options.get("do_sample") and float(options.get("temperature", 1.0)) > 0:
                raise RecipeError("do_sample", "tasks are answered greedily", "use a task with do_sample: false")
            return engine.answer(context, hash_string(context), stops, _stated_length(options))

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return CHAT + json.dumps(chat_history, ensure_ascii=False)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return "the tokenizer's own"

    return QspecLM()


def _folder_model(folder: Path, cuts: Cuts) -> Any:
    """The harness's transformers model, which also notes the answers that hit the token limit."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import hash_string

    class FolderLM(HFLM):  # type: ignore[misc]
        full = False

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
            out = super()._model_generate(context, max_length, stop, **options)
            self.full = out.shape[1] >= max_length and int(out[0, -1]) != self.eot_token_id
            return out

        def tok_batch_encode(self, strings: list[str], left_truncate_len: int | None = None, **options: Any) -> Any:
            if left_truncate_len is not None and len(self.tok_encode(strings[0])) > left_truncate_len:
                cuts.prompts.add(hash_string(strings[0]))
            return super().tok_batch_encode(strings, left_truncate_len=left_truncate_len, **options)

        def add_partial(self, kind: str, request: Any, result: Any) -> None:
            """Called by the harness after each answer; a full one with no stop string in it was cut."""
            if kind == "generate_until" and self.full:
                cuts.answers.add(hash_string(request[0]))

    model = FolderLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    model.set_cache_hook(model)
    return model
