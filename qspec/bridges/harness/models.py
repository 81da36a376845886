"""The harness's model interface over whatever answers for qspec, and over transformers on a model folder."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import json
from pathlib import Path
from typing import Any, TypeVar

from qspec.bridges.harness.engine import Engine
from qspec.bridges.harness.prompts import CHAT, Answerer, Cuts
from qspec.bridges.harness.scores import TaskScores, run
from qspec.bridges.harness.served import ServedModel
from qspec.bridges.harness.tasks import stated_length
from qspec.errors import RecipeError
from qspec.nn.lm import LM
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import TaskSpec
from qspec.schema.results import Scalar

T = TypeVar("T")
R = TypeVar("R")


def evaluate(lm: LM, tokenizer: Tokenizer, task: TaskSpec, eos_ids: Collection[int], progress: Progress) -> TaskScores:
    """Run a task through qspec's engine, greedily.

    Raises `RecipeError` for an unknown task, and for answers that leave no room for a prompt.
    """
    engine = Engine(lm, tokenizer, eos_ids)
    return run(harness_model(engine, progress), engine.cuts, task, _condition(engine, lm.max_length))


def evaluate_served(served: ServedModel, task: TaskSpec, own: Mapping[str, Scalar], progress: Progress) -> TaskScores:
    """Run a task through a server, greedily; `own`: what is to be said of it beside the score."""
    condition = _condition(served, served.context) | {"api": "chat completions" if served.chat else "completions"}
    return run(harness_model(served, progress), served.cuts, task, condition, own)


def evaluate_folder(folder: Path, task: TaskSpec) -> TaskScores:
    """Run a task through the harness's transformers backend on a model folder (compressed weights included), on CPU."""
    cuts = Cuts()
    model = folder_model(folder, cuts)
    condition: dict[str, Scalar] = {"bos": bool(model.tok_encode("")), "context": model.max_length}
    condition["has_chat_template"] = bool(model.tokenizer.chat_template)
    return run(model, cuts, task, condition | LOSES)


LOSES: dict[str, Scalar] = {"truncation": "a prompt too long loses its beginning"}


def _condition(answerer: Answerer, context: int) -> dict[str, Scalar]:
    tokenizer = answerer.tokenizer
    own: dict[str, Scalar] = {"bos": bool(tokenizer.encode("")), "context": context}
    own["has_chat_template"] = bool(tokenizer.parts()["chat template"])
    return own | {"tokenizer": tokenizer.fingerprint()[:16]} | LOSES


def harness_model(answerer: Answerer, progress: Progress) -> Any:
    """The harness's model interface over `answerer`; defined here so that lm-eval is imported when it is used."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, hash_string, make_disjoint_window

    class QspecLM(TemplateLM):  # type: ignore[misc]
        max_length = answerer.window
        tokenizer_name = answerer.tokenizer.fingerprint()
        eot_token_id = min(answerer.eos_ids, default=0)
        prefix_token_id = answerer.prefix_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return answerer.encode(string, special=add_special_tokens is not False)

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            return answerer.encode_pair(context, continuation)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return scores

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            """Scores, made in the order of the tokens: a beginning that requests share is read once."""
            for (context, _c), head, tail in requests:
                if len(head) + len(tail) > answerer.window + 1:
                    answerer.cuts.prompts.add(hash_string(context))
            order = sorted(range(len(requests)), key=lambda i: (requests[i][1], requests[i][2]))
            pairs = [requests[i][1:] for i in order]
            scores = _answers(lambda pair: answerer.score(*pair), pairs, answerer.at_once, progress, "scoring")
            return [score for _, score in sorted(zip(order, scores, strict=True))]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return _answers(self._rolling, requests, answerer.at_once, progress, "scoring")

        def _rolling(self, request: Any) -> float:
            return sum(answerer.score(*window)[0] for window in self._windows(request.args[0]))

        def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
            ids = answerer.encode(text)
            return map(make_disjoint_window, get_rolling_token_windows(ids, answerer.prefix_id, self.max_length, 1))

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return _answers(lambda item: self._answer(*item.args), requests, answerer.at_once, progress, "answering")

        def _answer(self, context: str, options: Mapping[str, Any]) -> str:
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            if options.get("do_sample") and float(options.get("temperature", 1.0)) > 0:
                raise RecipeError("do_sample", "tasks are answered greedily", "use a task with do_sample: false")
            return answerer.answer(context, hash_string(context), stops, stated_length(options))

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return CHAT + json.dumps(chat_history, ensure_ascii=False)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return "the tokenizer's own"

    return QspecLM()


def _answers(ask: Callable[[T], R], questions: Iterable[T], at_once: int, progress: Progress, what: str) -> list[R]:
    """Answers in order, `at_once` at a time."""
    listed = list(questions)
    with ThreadPoolExecutor(at_once) as pool:
        answers = map(ask, listed) if at_once == 1 else pool.map(ask, listed)
        return list(progress.track(answers, what, total=len(listed), unit="request"))


def folder_model(folder: Path, cuts: Cuts) -> Any:
    """The harness's transformers model, which also notes the answers that hit the token limit.

    Of the model's `generation_config.json` it keeps the stop tokens alone: penalties would change greedy answers, and
    lengths cut them.
    """
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
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = model.model.generation_config
    model.model.generation_config = type(config)(**{name: getattr(config, name) for name in ids})
    return model
