"""Serve a pair by vLLM with the arguments that qspec emits; compare its greedy answers and acceptance with qspec's."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
import re
import sys
from typing import Any
from urllib.request import ProxyHandler, Request as Call, build_opener

from bench_cli import write_baseline
from build_peers import python_of
import torch

from qspec.bridges import vllm
from qspec.numerics.fidelity import wilson_interval
from qspec.provenance import environment
from qspec.schema.recipe import BenchmarkSpec
from qspec.spec.draft_length import Fixed
from qspec.spec.engine import generate
from qspec.spec.types import Generation, Sampling
from qspec.stages.bench import load_requests
from qspec.stages.bench_arm import Request
from qspec.stages.check import read_manifest
from qspec.stages.open_pair import LoadedPair, open_pair
from qspec.stages.serve import serving

PAIR = Path("runs/smollm2-135m-self-cpu/pair")
BASELINE = Path("eval/baselines/vllm_cpu.json")
OWN = "vLLM, plain and speculative"
SPACINGS = 2
"""Of bfloat16 at the best logit: the gap between two tokens that vLLM's rounding may close."""
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
    asked = {"model": name, "prompt": list(prompt), "max_tokens": new, "temperature": 0, "return_token_ids": True}
    call = Call(f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with _OPENER.open(call, timeout=600) as reply:
        return list(json.load(reply)["choices"][0]["token_ids"])


def counters(url: str) -> tuple[int, list[int]]:
    """Drafts so far, and accepted tokens by position."""
    with _OPENER.open(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    found = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*?position=\"(\d+)\".*?\} (\S+)", text, re.M
    )
    by_position = {int(position): int(float(count)) for position, count in found}
    drafts = re.search(r"^vllm:spec_decode_num_drafts_total\{.*?\} (\S+)", text, re.M)
    return int(float(drafts[1])) if drafts else 0, [by_position[i] for i in sorted(by_position)]


def served(pair: Path, python: Path, requests: Sequence[Request], new: int, port: int, *, draft: bool) -> Served:
    job = serving(pair, draft=draft, more=SMALL)
    name = job.arguments[job.arguments.index("--served-model-name") + 1]
    with vllm.server(python, job.model, job.arguments, "127.0.0.1", port, 900):
        url = f"http://127.0.0.1:{port}"
        answers = [ask(url, request.tokens, new, name) for request in requests]
        return Served(answers, *counters(url))


def ours(pair: LoadedPair, request: Request, new: int, k: int) -> Generation:
    law, eos_ids = Sampling(), pair.model.arch.eos_ids
    drafter = pair.drafter if k else None
    return generate(pair.target, drafter, Fixed(k), request.tokens, new, law, eos_ids, torch.Generator())


def compare(pair: LoadedPair, request: Request, mine: Sequence[int], its: Sequence[int]) -> Row:
    """Where two answers part, and whether both tokens are equally good there as far as bfloat16 can tell."""
    together = zip(mine, its, strict=False)
    position = next((i for i, (a, b) in enumerate(together) if a != b), min(len(mine), len(its)))
    row = {"category": request.category, "tokens": len(mine), "equal_until": position, "gap": None, "near_tie": None}
    if position < min(len(mine), len(its)):
        pair.target.truncate(0)
        logits_V = pair.target.forward(torch.tensor([*request.tokens, *mine[:position]]), last=1)[0]
        best = float(logits_V.max())
        gap = best - float(logits_V[its[position]])
        spacing = 2.0 ** (math.floor(math.log2(abs(best))) - 7)
        row |= {"gap": round(gap, 4), "near_tie": gap <= SPACINGS * spacing}
    return row


def acceptance(name: str, drafts: int, accepted: Sequence[int]) -> Row:
    """By position of the steps that reached it, and in all, with 95 % intervals."""
    reached = [drafts, *accepted[:-1]]
    positions = [round(a / n, 4) if n else None for a, n in zip(accepted, reached, strict=True)]
    tested, stood = sum(reached), sum(accepted)
    low, high = wilson_interval(stood, tested)
    alpha = {"alpha": round(stood / tested, 4), "ci": [round(low, 4), round(high, 4)], "n": tested}
    return (
        {"engine": name, "drafts": drafts, "tokens_per_step": round(1 + stood / drafts, 4)}
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
    if pair.head is not None:  # vLLM asks a head for no more than it drafts
        k = min(k, pair.head.shape.n_predict)
    its_plain = served(args.pair, args.python, requests, args.new, args.port, draft=False)
    its = served(args.pair, args.python, requests, args.new, args.port, draft=True)
    plain = [ours(pair, request, args.new, 0) for request in requests]
    mine = [ours(pair, request, args.new, k) for request in requests]
    answers = [generation.tokens for generation in plain]
    for name, some, other in (
        ("qspec and vLLM, plain", answers, its_plain.answers),
        (OWN, its_plain.answers, its.answers),
    ):
        for request, a, b in zip(requests, some, other, strict=True):
            yield {"compared": name} | compare(pair, request, a, b)
    yield acceptance("qspec", *counted(mine, k))
    yield acceptance("vLLM", its.drafts, its.accepted)


def others(pair: str) -> list[Row]:
    """Rows that the baseline holds of other pairs."""
    kept = json.loads(BASELINE.read_bytes())["rows"] if BASELINE.exists() else []
    return [row for row in kept if row["pair"] != pair]


def verdict(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be.

    That answers of qspec and vLLM part is not: plain W8A8 magnifies last bits, so that engines whose float sums differ
    choose other tokens early (transformers in float32 from the same files too).
    """
    wrong = [
        f"{r['compared']}: {r['category']} parts at token {r['equal_until']} by {r['gap']}"
        for r in rows
        if r.get("compared") == OWN and r["near_tie"] is False
    ]
    (_, a), (_, b) = [(row["engine"], row["ci"]) for row in rows if "engine" in row]
    if a[1] < b[0] or b[1] < a[0]:
        wrong.append(f"acceptance differs: {a} and {b}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=PAIR)
    parser.add_argument("--python", type=Path, default=python_of("vllm"), help="of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--port", type=int, default=8231)
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    found = vllm.version(args.python)
    name = read_manifest(args.pair).name
    rows = [{"pair": name} | row for row in rows_of(args)]
    write_baseline(BASELINE, environment() | {"vllm": found}, [*others(name), *rows])
    print(*map(json.dumps, rows), sep="\n")
    wrong = verdict(rows)
    print(*wrong or ["as it should be"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
