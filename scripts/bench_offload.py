"""Measure plain and speculative decoding of a pair whose target is streamed from disk, prompt by prompt in turn."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import json
import mmap
import os
from pathlib import Path
from statistics import median, quantiles
import time
from typing import Any
import warnings

from bench_cli import write_baseline
import torch

from qspec.errors import RecipeError
from qspec.nn.offload import OffloadedDecoder
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.schema.recipe import BenchmarkSpec
from qspec.spec.draft_length import Fixed
from qspec.spec.drafters.ngram import NgramDrafter
from qspec.spec.engine import generate
from qspec.spec.types import Drafter, Generation, Sampling
from qspec.stages.bench import load_requests
from qspec.stages.open_pair import LoadedPair, open_pair

BASELINE = Path("eval/baselines/offload.json")
PAIR = Path("runs/smollm2-135m-int8-cpu/pair")
CHUNK = 16 << 20


@dataclass(frozen=True)
class Arm:
    """A target and how it decodes."""

    pair: LoadedPair
    drafter: Drafter | None = None
    k: int = 0

    def run(self, prompt: list[int], tokens: int) -> Generation:
        return generate(
            self.pair.target,
            self.drafter,
            Fixed(self.k) if self.drafter else None,
            prompt,
            tokens,
            Sampling(),
            (),  # as many tokens from every arm
            torch.Generator().manual_seed(0),
        )


def disk_bytes_per_second(path: Path) -> float:
    """A file read once from beginning to end, past the system's file cache."""
    buffer, file = mmap.mmap(-1, CHUNK), os.open(path, os.O_RDONLY | os.O_DIRECT)
    begin, at = time.perf_counter(), 0
    while count := os.preadv(file, [buffer], at):
        at += count
    os.close(file)
    return at / (time.perf_counter() - begin)


def arms_of(folder: Path, limit: str | None) -> dict[str, Arm]:
    """Resident and streamed, plain and with drafts of two lengths; drafts are in memory."""
    resident = open_pair(folder, kernels="torch")
    streamed = open_pair(folder, memory_limit=limit or least(folder), direct_io=True)
    arms = {"resident plain": Arm(resident), "offload plain": Arm(streamed)}
    for k in (4, 8):
        arms[f"offload ngram {k}"] = Arm(streamed, NgramDrafter(), k)
        if streamed.draft_model is not None:
            arms[f"offload draft {k}"] = Arm(streamed, streamed.drafter, k)
    return arms


def least(folder: Path) -> str:
    """The lowest limit that a target runs under, as its refusal says."""
    try:
        open_pair(folder, memory_limit=1)
    except RecipeError as refused:
        return refused.fix.split("at least ")[1].split(",")[0]
    raise AssertionError("no model fits in a byte")


def rows_of(arms: Mapping[str, Arm], runs: Mapping[str, list[Generation]]) -> Iterator[dict[str, Any]]:
    """Medians over prompts; speedup against the same target's plain arm, prompt by prompt."""
    for name, arm in arms.items():
        plain = runs[f"{name.split()[0]} plain"]
        own = runs[name]
        seconds = [run.seconds / (len(run.tokens) - 1) for run in own]
        ratios = [other.seconds / run.seconds for other, run in zip(plain, own, strict=True)]
        steps = [step for run in own for step in run.steps]
        offloaded = arm.pair.target if isinstance(arm.pair.target, OffloadedDecoder) else None
        yield {
            "arm": name,
            "n": len(own),
            "ms_per_token": round(1e3 * median(seconds), 2),
            "ms_per_token_spread": [round(1e3 * x, 2) for x in spread(seconds)],
            "tokens_per_step": round(sum(len(run.tokens) - 1 for run in own) / max(len(steps), 1), 3),
            "verify_ms": round(1e3 * median(step.t_verify for step in steps), 2),
            "draft_ms": round(1e3 * median(step.t_draft for step in steps), 2),
            "speedup": round(median(ratios), 3),
            "speedup_spread": [round(x, 3) for x in spread(ratios)],
            "equal": sum(a.tokens == b.tokens for a, b in zip(plain, own, strict=True)),
            "mb_per_pass": round(offloaded.residency.read / 1e6, 1) if offloaded else 0,
            "layers_in_memory": len(offloaded.residency.resident) if offloaded else arm.pair.model.arch.n_layers,
        }


def spread(values: list[float]) -> list[float]:
    """Quartiles; the value itself where there is one."""
    return [quantiles(values)[0], quantiles(values)[2]] if len(values) > 1 else values * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", nargs="?", type=Path, default=PAIR)
    parser.add_argument("--limit")
    for name, value in (("--prompts", 6), ("--tokens", 48), ("--threads", torch.get_num_threads())):
        parser.add_argument(name, type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    arms = arms_of(options.pair, options.limit)
    weights = max((options.pair / "target").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    pair = arms["resident plain"].pair
    spec = BenchmarkSpec(per_category=-(-options.prompts // 6))
    requests = load_requests(spec, pair.model.tokenizer, 512)[0][: options.prompts]
    runs: dict[str, list[Generation]] = {name: [] for name in arms}
    disk = [disk_bytes_per_second(weights)]
    for request in Progress().track(requests, "prompts", len(requests)):
        for name, arm in arms.items():
            runs[name].append(arm.run(request.tokens, options.tokens))
        disk.append(disk_bytes_per_second(weights))
    read = [f"{rate / 1e6:.0f}" for rate in (median(disk), min(disk), max(disk))]
    facts = {
        "torch threads": str(options.threads),
        "disk, direct reads": f"{read[0]} MB/s, {read[1]} to {read[2]}, n {len(disk)}",
    }
    rows = list(rows_of(arms, runs))
    write_baseline(BASELINE, environment() | facts, rows)
    print(*(json.dumps(row) for row in rows), *facts.items(), sep="\n")


if __name__ == "__main__":
    main()
