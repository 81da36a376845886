"""Measure what a speculator head brings on Spec-Bench's prompts beside lookups, prompt by prompt in turn.

A pair with a speculator head on Spec-Bench's prompts, beside drafts without weights: tokens per step, acceptance,
seconds of drafting.
  PAIR            folder of a pair; default runs/smollm2-135m-mlp-cpu/pair (`qspec run recipes/smollm2-135m-mlp-
      cpu.yaml` makes it)
  --draft NAME=FOLDER  instead: a draft model of `qspec train-draft` (repeatable); its rows come beside those that
      are there
  --per-category N   prompts of each category     --tokens N     --temperatures 0 1     --threads N
The rows go to eval/baselines/speculator.json.
"""

import argparse
from collections.abc import Iterator, Mapping
import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
import warnings

import torch

from qspec.bridges.heads.speculator import read_config
from qspec.measure.arm import Run, TokenizedPrompt, steps_of
from qspec.measure.bench import load_requests
from qspec.measure.stats import acceptance
from qspec.models.vocab import real_vocab
from qspec.nn.engines import engine_name, open_decoder
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.pair.open import LoadedPair, open_pair
from qspec.pipeline import quantize_checkpoint
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.schema.quantization import ModelSpec, QuantSpec
from qspec.schema.recipe import BenchmarkSpec
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.speculation.drafters.model import ModelDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from qspec.speculation.drafters.suffix import SuffixDrafter
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Drafter, Sampling
from qspec.train.loop import CURVE
from qspec.train.model import FACTS
from scripts.common import write_baseline

BASELINE = Path("eval/baselines/speculator.json")
PAIR = Path("runs/smollm2-135m-mlp-cpu/pair")
CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "math_reasoning", "rag"),
)
CHAT = CATEGORIES[:8]
"""MT-bench's: what a chat asks."""
INT8: dict[str, Any] = {"scheme": "W8A8", "untie_head": True, "ignore": ()}
"""What draft models are rounded to."""


def drafters(pair: LoadedPair, head: MLPSpeculator) -> dict[str, Drafter]:
    """All that are compared; each drafts as many tokens as the head has stages."""
    eos_ids, tokens = pair.model.arch.eos_ids, real_vocab(pair.model.tokenizer)
    return {
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(across_requests=False),
        "mlp": MlpDrafter(head, eos_ids, tokens),
        "mlp, 5 paths": MlpDrafter(head, eos_ids, tokens, candidates=5),
    }


def models(pair: LoadedPair, folders: Mapping[str, Path]) -> dict[str, Drafter]:
    """Draft models of `qspec train-draft` by name, in INT8 as a pair would have them, heads included."""
    spec, eos_ids, tokens = QuantSpec(**INT8), pair.model.arch.eos_ids, real_vocab(pair.model.tokenizer)
    drafters: dict[str, Drafter] = {}
    with TemporaryDirectory() as work:
        for name, folder in folders.items():
            model = quantize_checkpoint(ModelSpec(model=str(folder), quantization=spec), Path(work) / name)
            lm = open_decoder(model, max_length=pair.target.max_length)
            drafters[name] = ModelDrafter(lm, pair.model.arch.vocab_size, eos_ids, tokens)
    return drafters


def curve_rows(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Acceptance on held-out answers by training, of a draft that keeps its curve."""
    if not (folder / CURVE).exists():
        return
    batch = json.loads((folder / FACTS).read_text())["training"]["batch"]
    for entry in map(json.loads, (folder / CURVE).read_text().splitlines()):
        trained = {"states": batch * entry["step"], "minutes": round(entry["seconds"] / 60, 1)}
        for kind, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            held = {"category": "held-out answers, teacher-forced", "temperature": temperature}
            yield {"drafter": name, **held, "alpha": entry[kind][0], **trained}


def measured(
    pair: LoadedPair,
    arms: Mapping[str, Drafter],
    requests: list[TokenizedPrompt],
    tokens: int,
    temperature: float,
    progress: Progress,
) -> Iterator[Run]:
    """Answers of every prompt, the drafters in turn."""
    assert isinstance(pair.draft.head, MLPSpeculator)
    k = pair.draft.head.shape.n_predict
    for i, request in enumerate(requests):
        for name, drafter in arms.items():
            eos_ids, generator = pair.model.arch.eos_ids, torch.Generator().manual_seed(i)
            given = request.tokens, tokens, Sampling(temperature), eos_ids, generator
            yield Run(name, temperature, 0, i, generate(pair.target, drafter, Fixed(k), *given))
        progress.say(f"{i + 1} of {len(requests)} prompts")


def rows_of(runs: list[Run], requests: list[TokenizedPrompt]) -> Iterator[dict[str, Any]]:
    """By drafter: over all prompts, over those of a chat, then by category."""
    chat = [TokenizedPrompt("chat", request.tokens) if request.category in CHAT else request for request in requests]
    for name in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == name and steps_of([run])]
        grouped = [group for group in acceptance(name, own, chat, {}) if group.category == "chat"]
        for group in [*grouped, *acceptance(name, own, requests, {})]:
            kinds = {"all": CATEGORIES, "chat": CHAT}.get(group.category, (group.category,))
            mine = [run for run in own if requests[run.prompt].category in kinds]
            drafting = [step.t_draft for step in steps_of(mine) if step.drafted]
            yield {
                "drafter": name,
                "category": group.category,
                "temperature": group.temperature,
                "alpha": round(group.alpha.value, 4),
                "alpha_ci": [round(end, 4) for end in group.alpha.ci or ()],
                "tokens_per_step": round(group.tokens_per_step, 4),
                "ci": [round(end, 4) for end in group.tokens_per_step_ci or ()],
                "per_position": [round(rate, 4) for rate in group.per_position],
                "draft_ms": round(1000 * median(drafting), 3) if drafting else None,
                "verify_ms": round(1000 * median(step.t_verify for step in steps_of(mine)), 3),
                "n": group.prompts,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path, nargs="?", default=PAIR)
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    pair, progress = open_pair(options.pair), Progress()
    assert isinstance(pair.draft.head, MLPSpeculator), f"{options.pair} has no speculator head"
    spec = BenchmarkSpec(per_category=options.per_category, categories=CATEGORIES, max_new_tokens=options.tokens)
    requests = load_requests(spec, pair.model.tokenizer, 1024 - options.tokens)[0]
    facts = read_config(options.pair / "draft")["qspec"]
    folders = {name: Path(folder) for name, _, folder in (entry.partition("=") for entry in options.draft)}
    arms = models(pair, folders) if folders else drafters(pair, pair.draft.head)
    rows: list[dict[str, Any]] = []
    for name, folder in folders.items():
        rows += curve_rows(name, folder)
    for kind, rates in ({} if folders else facts["held_out"]).items():
        temperature = 0.0 if kind == "greedy" else 1.0
        held = {"category": "held-out answers, teacher-forced", "temperature": temperature}
        rows += [{"drafter": f"head {i + 1}", **held, "alpha": rate} for i, rate in enumerate(rates)]
    for temperature in options.temperatures:
        progress.stage(f"temperature {temperature:g}")
        rows += rows_of(list(measured(pair, arms, requests, options.tokens, temperature, progress)), requests)
    progress.close()
    run = {"engine": engine_name(pair.target), "torch threads": str(torch.get_num_threads())}
    run |= {"max_new_tokens": str(options.tokens), "drafted": str(pair.draft.head.shape.n_predict)}
    conditions = environment() | run
    if folders:  # beside what was measured before: acceptance does not depend on when it was, times do
        kept = json.loads(BASELINE.read_text())
        conditions, before = kept["environment"], [row for row in kept["rows"] if row["drafter"] not in arms]
        rows = [*before, *({key: row[key] for key in row if not key.endswith("_ms")} for row in rows)]
    write_baseline(BASELINE, conditions, rows)
    for row in rows:
        if row["category"] in ("all", "chat") and row["drafter"] in arms:
            print(row)


if __name__ == "__main__":
    main()
