"""Train a head on the quantized target and on the original, all else equal, and judge both by what either writes.

Should a head learn from the quantized target or from the original? Both are trained, on equally many states, and
judged on Spec-Bench's prompts by what either target answers, temperatures 0 and 1; the shipped head beside them. An
hour of one core; resumes. Rows go to eval/baselines/speculator_targets.json.
  --steps N   --answers N   --per-category N   --tokens N
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
import warnings

import torch

from qspec.bridges import compressed
from qspec.measure.bench import load_requests
from qspec.nn.engines import open_decoder
from qspec.nn.mlp_speculator import MLPSpeculator
from qspec.numerics.speculation.speculator import expected_tokens
from qspec.numerics.statistics.student import mean_interval
from qspec.pair.head import head_folder, open_head
from qspec.pipeline import train_draft
from qspec.progress import Progress
from qspec.provenance import environment
from qspec.records import QuantizedModel
from qspec.schema.drafts import MlpDraft
from qspec.schema.recipe import BenchmarkSpec, Recipe
from qspec.schema.training import TrainingData
from qspec.train.data import Rollout, answer
from qspec.train.head import HeadLearner, lay_out
from scripts.common import write_baseline
from scripts.drafts.speculator import CATEGORIES

BASELINE = Path("eval/baselines/speculator_targets.json")
RECIPE = Path("recipes/smollm2-135m-mlp-cpu.yaml")
WORK = Path("runs/bench_head_targets")
TARGETS = {"quantized": (), "original": ("target.quantization={scheme: none}",)}
"""What each target's recipe changes."""
BATCH = 256
Row = dict[str, Any]


def read_recipe(options: argparse.Namespace, changes: tuple[str, ...]) -> Recipe:
    """The shipped head's training with a budget in steps, so that both learn from equally many states."""
    training = {
        "minutes": "null",
        "positions": options.steps * BATCH,
        "batch": BATCH,
        "evaluate_every": 100,
        "data.answers": options.answers,
    }
    return Recipe.read(RECIPE, (*(f"draft.training.{name}={value}" for name, value in training.items()), *changes))


def answers(target: QuantizedModel, greedy: bool, options: argparse.Namespace) -> list[Rollout]:
    """What a target answers to Spec-Bench's prompts, the same ones for all."""
    spec = BenchmarkSpec(per_category=options.per_category, categories=CATEGORIES, max_new_tokens=options.tokens)
    requests = load_requests(spec, target.tokenizer, 1024 - options.tokens)[0]
    lm = open_decoder(target, max_length=1024)
    training = TrainingData(answer_tokens=options.tokens, greedy=float(greedy))
    return list(
        answer(lm, [r.tokens for r in requests], training, target.arch.eos_ids, torch.Generator().manual_seed(0))
    )


def acceptance(head: MLPSpeculator, rollouts: list[Rollout], greedy: bool) -> list[list[float]]:
    """Of each answer: what share of each head's drafts would stand, had all before them stood."""
    shape, learner = head.shape, HeadLearner(head)
    long_enough = [one for one in rollouts if len(one.tokens_T) > shape.n_predict + 1]
    judged = [learner.judge(lay_out([one], shape.n_predict, head.ids_D, shape.vocab_size)) for one in long_enough]
    return [one.greedy if greedy else one.sampled for one in judged]


def rows_of(by_head: Mapping[str, list[list[float]]]) -> Iterator[Row]:
    """Of one target and temperature, by what heads were trained on: means over answers, then the paired difference."""
    steps = {name: [expected_tokens(rates) for rates in rates_by_answer] for name, rates_by_answer in by_head.items()}
    for name, rates_by_answer in by_head.items():
        rates = [sum(head) / len(head) for head in zip(*rates_by_answer, strict=True)]
        yield {"trained_on": name, "per_head": [round(rate, 4) for rate in rates]} | spread(steps[name])
    quantized, original = (steps[name] for name in TARGETS)
    differences = [a - b for a, b in zip(quantized, original, strict=True)]
    yield {"trained_on": "quantized - original"} | spread(differences)


def spread(values: list[float]) -> Row:
    ends = mean_interval(values) or ()
    mean = sum(values) / len(values)
    return {"tokens_per_step": round(mean, 4), "ci": [round(end, 4) for end in ends], "n": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=384, help="that each head learns from")
    parser.add_argument("--per-category", type=int, default=4, help="prompts that both are judged on")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer that they are judged on")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    progress, folders, targets = Progress(), dict[str, Path](), dict[str, QuantizedModel]()
    for name, changes in TARGETS.items():
        recipe = read_recipe(options, changes)
        folders[name] = train_draft(recipe, WORK / name, progress)
        targets[name] = compressed.read(next((WORK / name).glob("target-*")))
    assert isinstance(recipe.draft, MlpDraft)
    folders["quantized, as shipped"] = head_folder(recipe.draft.source)
    rows = list[Row]()
    for target, model in targets.items():
        heads = {name: open_head(folder, model) for name, folder in folders.items()}
        for greedy in (True, False):
            judged = answers(model, greedy, options)
            by_head = {name: acceptance(head, judged, greedy) for name, head in heads.items()}
            rows += [{"target": target, "temperature": float(not greedy)} | row for row in rows_of(by_head)]
    progress.close()
    settings = {name: str(value) for name, value in vars(options).items()}
    write_baseline(BASELINE, environment() | settings | {"states a step": str(BATCH)}, rows)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
