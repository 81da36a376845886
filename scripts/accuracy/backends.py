"""Ask a pair's tasks of every backend, original and quantized target, and compare what they say item by item.

One pair's tasks through qspec's engine, transformers, vLLM (started here) and a running server of the same files:
prompts, scores and answers item by item. Rows go to eval/baselines/backends_cpu.json, finished backends stay in
runs/bench_backends. `scripts/study build_peers --only vllm` installs vLLM; without AVX-512 the pair's KV has to be
null.
  --pair DIR    --python FILE of an environment with vLLM    --again   ask anew    --out FILE
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
import shutil

from qspec.bridges.vllm import server as vllm
from qspec.errors import QspecError
from qspec.pair.check import half_digests, read_manifest
from qspec.provenance import environment
from qspec.remeasure import evaluate_pair
from qspec.schema.recipe import Backend
from qspec.schema.results import Results, TaskRow
from qspec.serving.vllm import NEUTRAL, serving
from scripts.common import digest, write_baseline
from scripts.engines.build_peers import python_of
from scripts.vllm.run import ENVIRONMENT, SMALL, Row

WORK = Path("runs/bench_backends")
BACKENDS: tuple[Backend, ...] = ("qspec", "hf", "vllm", "api")
SUBJECTS = ["biology", "history", "law", "math"]
TASKS = [
    {"name": "wikitext", "num_fewshot": 0, "limit": 1},
    {"name": "mmlu_pro", "num_fewshot": 0, "limit": 2, "subjects": SUBJECTS, "max_gen_toks": 24},
]
Side = tuple[Backend, str]
SIDES: tuple[tuple[Side, Side], ...] = (
    (("qspec", "original"), ("hf", "original")),
    (("qspec", "original"), ("vllm", "original")),
    (("hf", "original"), ("vllm", "original")),
    (("qspec", "quantized"), ("hf", "quantized")),
    (("qspec", "quantized"), ("vllm", "quantized")),
    (("hf", "quantized"), ("vllm", "quantized")),
    (("vllm", "quantized"), ("api", "quantized")),
    (("api", "quantized"), ("api", "original")),
    (("qspec", "original"), ("qspec", "quantized")),
)
"""Who is compared with whom. `api` is one server of the target for both arms: what it says twice."""
PORT = 8233


@dataclass(frozen=True)
class Item:
    """What an arm said; `answer`: its hash, where items are answered in words."""

    prompt: str
    score: float
    answer: str


def results_of(pair: Path, backend: Backend, python: Path, again: bool) -> Results:
    """Kept, or measured now."""
    out = WORK / f"{backend}-{digest([half_digests(read_manifest(pair)), TASKS])}"
    if again:
        shutil.rmtree(out, ignore_errors=True)
    if not out.exists():
        overrides = ["evaluation.fidelity=null", "evaluation.needle=null", f"evaluation.tasks={json.dumps(TASKS)}"]
        if backend == "api":
            job, url = serving(pair, draft=False, more=SMALL), f"http://127.0.0.1:{PORT}/v1"
            overrides.append(f"evaluation.api={{original: '{url}', quantized: '{url}'}}")
            with vllm.server(python, job.model, (*NEUTRAL, *job.arguments), "127.0.0.1", PORT, 900):
                return evaluate_pair(pair, out, tuple(overrides), backend)
        return evaluate_pair(pair, out, tuple(overrides), backend, python, more=SMALL)
    return Results.read(out / "results.json")


def items(results: Results, task: str, arm: str) -> dict[tuple[str, int], Item]:
    (task_results,) = (t for t in results.accuracy.tasks if t.task == task)
    return {(row.task, row.doc_id): _item(row, arm) for row in task_results.rows}


def _item(row: TaskRow, arm: str) -> Item:
    score, answer = (row.original, row.original_answer) if arm == "original" else (row.quantized, row.quantized_answer)
    return Item(row.prompt_hash, score, answer)


def rows_of(by_backend: Mapping[Backend, Results]) -> Iterator[Row]:
    for task in (str(task["name"]) for task in TASKS):
        for sides in SIDES:
            (a, arm_a), (b, arm_b) = sides
            both = items(by_backend[a], task, arm_a), items(by_backend[b], task, arm_b)
            yield {"task": task, "of": f"{a}: {arm_a}", "and": f"{b}: {arm_b}"} | compare(*both)


def compare(a: Mapping[tuple[str, int], Item], b: Mapping[tuple[str, int], Item]) -> Row:
    """Items with the same prompt, score and answer; of texts the largest distance, in nats per word."""
    if a.keys() != b.keys():
        raise QspecError(f"{len(a)} and {len(b)} items", "are not the same ones", "ask anew: --again")
    both = [(a[key], b[key]) for key in a]
    row: Row = {
        "items": len(both),
        "same_prompt": sum(one.prompt == other.prompt for one, other in both),
        "scores": [round(sum(item.score for item in side.values()) / len(both), 6) for side in (a, b)],
        "same_score": sum(one.score == other.score for one, other in both),
    }
    if all(one.answer for one, _ in both):
        return row | {"same_answer": sum(one.answer == other.answer for one, other in both)}
    return row | {"nats_per_word_apart": round(max(abs(math.log(one.score / other.score)) for one, other in both), 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, default=Path("runs/smollm2-135m-int8-cpu/pair"))
    parser.add_argument("--python", type=Path, default=python_of("vllm"), help="of an environment with vLLM")
    parser.add_argument("--out", type=Path, default=Path("eval/baselines/backends_cpu.json"))
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    facts = environment() | {"vllm": vllm.version(args.python)}
    by_backend = {backend: results_of(args.pair, backend, args.python, args.again) for backend in BACKENDS}
    rows = [{"pair": read_manifest(args.pair).name} | row for row in rows_of(by_backend)]
    write_baseline(args.out, facts, rows)
    print(*map(json.dumps, rows), sep="\n")


if __name__ == "__main__":
    main()
