"""Tasks that servers answer: all of one arm's, then the other's, so that one machine serves one model at a time."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from qspec.bridges import harness
from qspec.bridges.harness.served import ServedModel
from qspec.bridges.openai_api import Api
from qspec.bridges.vllm import server as vllm
from qspec.errors import RecipeError
from qspec.measure.evaluate import compare
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import ApiSpec, Recipe
from qspec.schema.results import TaskResult
from qspec.serving.vllm import NEUTRAL, Serving

ARMS = ("original", "quantized")
HOST, PATIENCE = "127.0.0.1", 900.0


@dataclass(frozen=True)
class Servers:
    """Who answers for each arm. open: an arm's API, while it is served; context: tokens that both hold."""

    open: Callable[[str], AbstractContextManager[Api]]
    context: int
    chat: bool = False
    at_once: int = 8


@contextmanager
def running(spec: ApiSpec | None) -> Iterator[Servers]:
    """Servers that somebody has started. Raises `SourceError` for one that does not answer, before anything is asked.

    Their contexts are what they state; `RecipeError` where neither they nor the recipe do.
    """
    if spec is None:
        fix = "give evaluation.api two addresses: --original URL --quantized URL"
        raise RecipeError("backend api", "has no servers to ask", fix)
    with ExitStack() as opened:
        apis = {
            "original": Api(spec.original, spec.original_model),
            "quantized": Api(spec.quantized, spec.quantized_model),
        }
        for api in apis.values():
            opened.callback(api.close)
        stated = [api.facts().context for api in apis.values()]
        context = spec.context or min((length for length in stated if length), default=None)
        if context is None:
            raise RecipeError("the servers", "do not state their context length", "set evaluation.api.context")

        @contextmanager
        def open_arm(arm: str) -> Iterator[Api]:
            yield apis[arm]

        yield Servers(open_arm, context, spec.chat, spec.concurrency)


@contextmanager
def started(python: Path, jobs: dict[str, Serving], context: int) -> Iterator[Servers]:
    """vLLM servers of the environment of `python`, each started when its arm is asked, and stopped behind that."""
    vllm.version(python)

    @contextmanager
    def open_arm(arm: str) -> Iterator[Api]:
        job, port = jobs[arm], vllm.free_port(HOST)
        with vllm.server(python, job.model, (*NEUTRAL, *job.arguments), HOST, port, PATIENCE):
            api = Api(f"http://{HOST}:{port}/v1")
            try:
                yield api
            finally:
                api.close()

    yield Servers(open_arm, context)


def evaluate_served(
    recipe: Recipe, backend: str, servers: Servers, tokenizer: Tokenizer, eos_ids: Collection[int], progress: Progress
) -> list[TaskResult]:
    """Tasks of the recipe that name `backend`, on both arms. tokenizer, eos_ids: of the pair."""
    tasks = [task for task in recipe.evaluation.tasks if backend in task.backends]
    for task in tasks:
        harness.require(task, servers.context)
    scores: dict[str, list[harness.TaskScores]] = {}
    for arm in ARMS if tasks else ():
        with servers.open(arm) as api:
            facts = api.facts()
            own = {"model": facts.name, "server": facts.engine}
            for task in tasks:
                served = ServedModel(api, tokenizer, eos_ids, servers.context, servers.chat, servers.at_once)
                scores.setdefault(arm, []).append(harness.evaluate_served(served, task, own, progress))
    return [compare(task, backend, *arms) for task, *arms in zip(tasks, *scores.values(), strict=True)]
