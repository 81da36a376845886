"""Run a task of the harness on one of its models, and keep each item's score with what it was measured under."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
import hashlib
import math
from typing import Any

from qspec.bridges.harness.prompts import Cuts
from qspec.bridges.harness.tasks import find_tasks
from qspec.errors import RecipeError
from qspec.schema.recipe import TaskSpec
from qspec.schema.results import Scalar


@dataclass(frozen=True)
class Sample:
    """One scored item. `cut`: its answer hit the token limit; `prompt_cut`: its prompt lost its beginning.

    answer: hash of what was written, where the item is answered in words. likelihood: log-likelihood of the right
    answer (nats), where answers are given and scored.
    """

    task: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    score: float
    cut: bool
    prompt_cut: bool
    answer: str = ""
    likelihood: float | None = None


@dataclass(frozen=True)
class TaskScores:
    """A task on one arm: items in order, the metric's name, and what it was measured under.

    condition: equal in arms that are compared; own: what this arm alone has, as the server that was asked.
    """

    metric: str
    samples: list[Sample]
    condition: dict[str, Scalar]
    own: dict[str, Scalar] = field(default_factory=dict)


def run(
    model: Any, cuts: Cuts, task: TaskSpec, condition: Mapping[str, Scalar], own: Mapping[str, Scalar] | None = None
) -> TaskScores:
    """Ask `model` (the harness's interface) a task, greedily. Raises `RecipeError` for an unknown one."""
    from lm_eval import simple_evaluate

    with find_tasks(task) as (names, manager):
        report = simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=task.num_fewshot,
            limit=task.limit,
            gen_kwargs=None if task.max_gen_toks is None else {"max_gen_toks": task.max_gen_toks},
            apply_chat_template=task.chat_template,
            fewshot_as_multiturn=task.chat_template,
            task_manager=manager,
            bootstrap_iters=0,
            confirm_run_unsafe_code=task.run_code,
        )
    metric, samples = _items(report, cuts, task)
    return TaskScores(metric, samples, {**condition, **_stated(report, task, samples)}, dict(own or {}))


def _items(report: Mapping[str, Any], cuts: Cuts, task: TaskSpec) -> tuple[str, list[Sample]]:
    """Items of all sub-tasks under the first filter, by the first metric that the task states and that scores items."""
    samples_of: Mapping[str, list[Any]] = report["samples"]
    first, config = next(iter(samples_of.values()))[0], report["configs"][next(iter(samples_of))]
    metric = next((m for m in _metrics(config, first["metrics"]) if _score(first[m]) is not None), None)
    if metric is None:
        raise RecipeError(f"task {task.name!r}", "has no score per item to compare arms by", "use another task")
    samples: list[Sample] = []
    for name, items in samples_of.items():
        for item in (item for item in items if item["filter"] == items[0]["filter"]):
            key = item["prompt_hash"]
            flags = (key in cuts.answers, key in cuts.prompts)
            score, right = _score(item[metric]) or 0.0, _likelihood(item, report["configs"][name])
            answer = _answer(item["resps"])
            samples.append(Sample(name, item["doc_id"], item["doc_hash"], key, score, *flags, answer, right))
    label = metric if isinstance(first[metric], int | float) else f"1 / {metric}"
    return f"{label},{first['filter']}", samples


def _metrics(config: Mapping[str, Any], computed: Sequence[str]) -> list[str]:
    """Metrics in the order in which the task states them, those that it does not state last.

    Of a given answer the harness scores `perplexity` as a log-likelihood, which has no share to be kept: it comes last.
    """
    stated = [entry["metric"] for entry in config.get("metric_list") or () if isinstance(entry["metric"], str)]
    order = [metric for metric in stated if metric in computed]
    order += [metric for metric in computed if metric not in order]
    return sorted(order, key=lambda metric: config.get("output_type") == "loglikelihood" and metric == "perplexity")


def _likelihood(item: Mapping[str, Any], config: Mapping[str, Any]) -> float | None:
    """Log-likelihood (nats) of an item's right answer; None where answers are written, or where several are right."""
    if config.get("output_type") not in ("loglikelihood", "multiple_choice"):
        return None
    given, right = [float(response[0][0]) for response in item["resps"]], item["target"]
    if config["output_type"] == "loglikelihood":
        return given[0]
    if isinstance(right, str):
        choices = [continuation.strip() for _, continuation in item["arguments"]]
        right = choices.index(right.strip()) if choices.count(right.strip()) == 1 else None
    return given[right] if isinstance(right, int) and 0 <= right < len(given) else None


def _answer(responses: Any) -> str:
    """Hash of the first answer, where it is text."""
    first = responses[0][0]
    return hashlib.sha256(first.encode()).hexdigest()[:16] if isinstance(first, str) else ""


def _score(value: object) -> float | None:
    """One item's score, more is better: a number, or 1 over the perplexity of a text's (log-likelihood, units)."""
    match value:
        case int() | float():
            return float(value)
        case (float(loglikelihood), int(units)) if units > 0:
            return math.exp(loglikelihood / units)
    return None


def _stated(report: Mapping[str, Any], task: TaskSpec, samples: Iterable[Sample]) -> dict[str, Scalar]:
    tasks = list(report["samples"])
    config = report["configs"][tasks[0]]
    digest = hashlib.sha256("".join(sample.prompt_hash for sample in samples).encode())
    return {
        "harness": str(report["lm_eval_version"]),
        "task_version": ", ".join(sorted({str(report["versions"][name]) for name in tasks})),
        "fewshot": ", ".join(sorted({str(report["n-shot"][name]) for name in tasks})),
        "fewshot_form": "turns of a conversation" if task.chat_template else "one text",
        "limit_per_task": task.limit,
        "rows_available": sum(report["n-samples"][name]["original"] for name in tasks),
        "chat_template": task.chat_template,
        "continues_text": bool((config.get("metadata") or {}).get("continues_text")),
        "max_gen_toks": (config.get("generation_kwargs") or {}).get("max_gen_toks"),
        "prompts": digest.hexdigest()[:16],
        "chance": _chance(report),
    }


def _chance(report: Mapping[str, Any]) -> float:
    """Mean score of guessing: one over the options of every item; 0 for an item that states none."""
    shares: list[float] = []
    for name, items in report["samples"].items():
        chosen = report["configs"][name].get("output_type") == "multiple_choice"
        for item in items:
            options = item["resps"] if chosen else _options(item["doc"])
            shares.append(1 / len(options) if options else 0.0)
    return round(sum(shares) / len(shares), 4)


def _options(doc: object) -> Sequence[Any]:
    """Options that an item lists in its prompt, to be answered in words."""
    listed = (doc.get("options") or doc.get("choices")) if isinstance(doc, Mapping) else None
    return listed if isinstance(listed, list) else ()
