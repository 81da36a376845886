"""Serve a pair by vLLM with the arguments that qspec emits; compare its greedy answers and acceptance with qspec's.

A pair in vLLM (CPU build, in an environment of its own): started with the arguments that qspec emits, asked the same
prompts, compared with qspec's own engine in greedy answers and in acceptance. Rows go to eval/baselines/vllm_cpu.json
(those of other pairs stay), what vLLM answered and the pairs that are made here stay in runs/integration. Exit status
1 if answers part where no near tie explains it (scripts/vllm/near_tie.py), or acceptance differs. `scripts/study
build_peers --only vllm` installs vLLM (3.5 GB). For the pair of a speculator head, which its plugin serves, `pip
install --no-deps .` with the interpreter of that environment; without AVX-512 or AMX its KV must be null.
  --target int8|float: of a small pair made here, an INT8 copy drafts (default: int8)    --pair DIR: one that exists
  --python FILE of an environment with vLLM    --prompts N    --new N    --again: ask vLLM anew
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
from typing import Any
from urllib.request import ProxyHandler, Request as Call, build_opener

import torch

from qspec.bridges.vllm import server as vllm
from qspec.kept import Kept
from qspec.measure.arm import TokenizedPrompt
from qspec.measure.arms import load_originals
from qspec.measure.bench import load_requests
from qspec.numerics.statistics.fidelity import wilson_interval
from qspec.pair.check import half_digests, read_manifest
from qspec.pair.open import LoadedPair, open_pair
from qspec.pair.package import package
from qspec.pipeline import quantize_halves
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.schema.recipe import BenchmarkSpec, Recipe
from qspec.serving.vllm import NEUTRAL, serving
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Generation, Sampling
from scripts.common import digest, write_baseline
from scripts.engines.build_peers import python_of
from scripts.vllm.near_tie import Parting, judge, rounds_inputs

WORK = Path("runs/integration")
RECIPE = Path("recipes/smollm2-135m-self-cpu.yaml")
TARGETS = {"int8": "W8A8", "float": "none"}
"""Targets of the pairs that are made here, and their schemes."""
BASELINE = Path("eval/baselines/vllm_cpu.json")
INT8 = "INT8 products of vLLM and exact ones"
EXACT = 1e-3
"""Error of INT8 products, as a share of their size, up to which they are those of exact integers."""
SMALL = ["--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "8"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_INT4_W4A8": "0",  # the draft as qspec runs it: INT4 weights, inputs in float
    "HF_HUB_OFFLINE": "1",
}
Row = dict[str, Any]
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Served:
    """What a server answered, and what it counted: drafts, and accepted tokens by position."""

    answers: list[list[int]]
    drafts: int
    accepted: list[int]


def ask(url: str, prompt: Sequence[int], new: int, name: str) -> list[int]:
    body = {"model": name, "prompt": list(prompt), "max_tokens": new, "temperature": 0, "return_token_ids": True}
    call = Call(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _OPENER.open(call, timeout=600) as reply:
        return list(json.load(reply)["choices"][0]["token_ids"])


def counters(url: str) -> tuple[int, list[int]]:
    """Drafts so far, and accepted tokens by position."""
    with _OPENER.open(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    counts = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*?position=\"(\d+)\".*?\} (\S+)", text, re.M
    )
    by_position = {int(position): int(float(count)) for position, count in counts}
    drafts = re.search(r"^vllm:spec_decode_num_drafts_total\{.*?\} (\S+)", text, re.M)
    return int(float(drafts[1])) if drafts else 0, [by_position[i] for i in sorted(by_position)]


def made(target: str) -> Path:
    """A pair of such a target and an INT8 copy of it that drafts; KV in floats, so that vLLM runs it on any CPU."""
    overrides = [
        f"name=smollm2-135m-{target}-target",
        f"description=SmolLM2-135M-Instruct ({target}); a copy of it in INT8 drafts.",
        f"target.quantization={{scheme: {TARGETS[target]}}}",
        "draft.quantization={scheme: W8A8}",
    ]
    recipe = Recipe.read(RECIPE, tuple(overrides))
    out = WORK / f"{target}-{digest(recipe.as_dict())}"
    if not (out / "pair").exists():
        progress = Progress()
        originals = load_originals(recipe, progress)
        halves = quantize_halves(recipe, originals, out / "work", progress)
        package(*halves, recipe, out)
        shutil.rmtree(out / "work")
        progress.close()
    return out / "pair"


def served(args: argparse.Namespace, requests: Sequence[TokenizedPrompt], *, draft: bool) -> Served:
    """Kept, or asked now."""
    job = serving(args.pair, draft=draft, more=SMALL)
    halves = half_digests(read_manifest(args.pair))
    settings = [vllm.version(args.python), halves, job.arguments, [request.tokens for request in requests], args.new]

    def ask_all() -> dict[str, Any]:
        name = job.arguments[job.arguments.index("--served-model-name") + 1]
        with vllm.server(args.python, job.model, (*NEUTRAL, *job.arguments), "127.0.0.1", args.port, 900):
            url = f"http://127.0.0.1:{args.port}"
            answers = [ask(url, request.tokens, args.new, name) for request in requests]
            return asdict(Served(answers, *counters(url)))

    answered = Kept(WORK).keep if args.again else Kept(WORK).entry
    return Served(**answered("served", settings, lambda _: ask_all()).value)


def ours(pair: LoadedPair, request: TokenizedPrompt, new: int, k: int) -> Generation:
    sampling, eos_ids = Sampling(), pair.model.arch.eos_ids
    drafter = pair.drafter if k else None
    return generate(pair.target, drafter, Fixed(k), request.tokens, new, sampling, eos_ids, torch.Generator())


def parting(request: TokenizedPrompt, some: Sequence[int], other: Sequence[int]) -> tuple[int, Parting | None]:
    """How many tokens two answers share, and where they part; None if one is the other, or its beginning."""
    together = enumerate(zip(some, other, strict=False))
    shared = next((i for i, (a, b) in together if a != b), min(len(some), len(other)))
    if shared == min(len(some), len(other)):
        return shared, None
    return shared, Parting([*request.tokens, *some[:shared]], some[shared], other[shared])


def compared(
    pair: LoadedPair, requests: Sequence[TokenizedPrompt], answers: Mapping[str, Sequence[list[int]]]
) -> Iterator[Row]:
    """Answers of each engine beside those of the next: up to where they are equal, and what is known of that place."""
    rows: list[tuple[Row, Parting | None]] = []
    for (one, some), (other, others) in pairwise(answers.items()):
        for request, a, b in zip(requests, some, others, strict=True):
            shared, at = parting(request, a, b)
            row = {"compared": f"{one} and {other}", "category": request.category, "tokens": len(a)}
            rows.append((row | {"equal_until": shared}, at))
    judged = iter(judge(pair, [at for _, at in rows if at is not None]))
    for row, at in rows:
        yield row if at is None else row | next(judged)


def int8_products(python: Path, pair: Path) -> Row:
    """The error of vLLM's INT8 matmul with the target's layers on this CPU."""
    script = Path(__file__).with_name("int8.py")
    command = [python, script, pair / "target"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    error: Row = json.loads(done.stdout.splitlines()[-1])
    return {"compared": INT8} | error


def acceptance(name: str, drafts: int, accepted: Sequence[int]) -> Row:
    """By position of the steps that reached it, and in all, with 95 % intervals."""
    reached = [drafts, *accepted[:-1]]
    positions = [round(a / n, 4) if n else None for a, n in zip(accepted, reached, strict=True)]
    tested, total = sum(reached), sum(accepted)
    low, high = wilson_interval(total, tested)
    alpha = {"alpha": round(total / tested, 4), "ci": [round(low, 4), round(high, 4)], "n": tested}
    return (
        {"engine": name, "drafts": drafts, "tokens_per_step": round(1 + total / drafts, 4)}
        | alpha
        | {"by_position": positions}
    )


def counted(generations: Sequence[Generation], k: int) -> tuple[int, list[int]]:
    """Of the steps that had room for all K drafts: how many, and accepted tokens by position."""
    steps = [step for generation in generations for step in generation.steps if step.nodes == k]
    return len(steps), [sum(step.accepted > i for step in steps) for i in range(k)]


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    pair = open_pair(args.pair)
    spec = BenchmarkSpec(per_category=args.per_category)
    requests, _ = load_requests(spec, pair.model.tokenizer, 1000 - args.new)
    requests = requests[: args.prompts]
    k = pair.recipe.speculation.draft_length.k
    k = min(k, pair.recipe.draft.longest or k)  # vLLM asks a head for no more than it drafts
    its_plain, its = (served(args, requests, draft=draft) for draft in (False, True))
    plain = [ours(pair, request, args.new, 0).tokens for request in requests]
    mine = [ours(pair, request, args.new, k) for request in requests]
    answers = {"qspec": plain, "vLLM": its_plain.answers, "vLLM with its draft": its.answers}
    yield from compared(pair, requests, answers)
    if rounds_inputs(pair):
        yield int8_products(args.python, args.pair)
    yield acceptance("qspec", *counted(mine, k))
    yield acceptance("vLLM", its.drafts, its.accepted)


def others(pair: str) -> list[Row]:
    """Rows that the baseline holds of other pairs."""
    kept = json.loads(BASELINE.read_bytes())["rows"] if BASELINE.exists() else []
    return [row for row in kept if row["pair"] != pair]


def overflow(rows: Sequence[Row]) -> float:
    """Error of vLLM's INT8 products; 0 where they are exact, or not used."""
    error = max((r["error"] for r in rows if r.get("compared") == INT8), default=0.0)
    return error if error > EXACT else 0.0


def verdict(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be. Where vLLM's INT8 products overflow, its texts are held to its own alone."""
    wrong = [
        f"{r['compared']}: {r['category']} parts at token {r['equal_until']} by {r['gap']}"
        for r in rows
        if r.get("near_tie") is False and not (overflow(rows) and r["compared"] == "qspec and vLLM")
    ]
    (_, a), (_, b) = [(row["engine"], row["ci"]) for row in rows if "engine" in row]
    if a[1] < b[0] or b[1] < a[0]:
        wrong.append(f"acceptance differs: {a} and {b}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--target", choices=TARGETS, default="int8", help="of a small pair that is made for this")
    which.add_argument("--pair", type=Path, help="one that exists, in place of that")
    parser.add_argument("--python", type=Path, default=python_of("vllm"), help="of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--again", action="store_true", help="ask vLLM anew")
    args = parser.parse_args()
    args.pair = args.pair or made(args.target)
    os.environ |= ENVIRONMENT
    version = vllm.version(args.python)
    name = read_manifest(args.pair).name
    rows = [{"pair": name} | row for row in rows_of(args)]
    write_baseline(BASELINE, environment() | {"vllm": version}, [*others(name), *rows])
    print(*map(json.dumps, rows), sep="\n")
    if error := overflow(rows):
        print(f"vLLM's INT8 products are {error:.1%} off on this CPU: its texts are compared with its own alone")
    wrong = verdict(rows)
    print(*wrong or ["as it should be"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
