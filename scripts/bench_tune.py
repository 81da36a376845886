"""Search the pairs of a recipe, run the best ones and each technique alone in turns, and keep what came out."""

import argparse
import json
from pathlib import Path
import warnings

import torch

from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.schema.recipe import Recipe
from qspec.stages.tune_predict import Prediction
from qspec.stages.tune_space import PLAIN
from qspec.tune_pair import ORIGINAL, Study, speed_of

WORK = Path("runs/bench_tune")
BASELINE = Path("eval/baselines/tune.json")
ALONE = {
    "original": (ORIGINAL, PLAIN),
    "quantization alone (W8A8)": ("W8A8/float", PLAIN),
    "speculation alone (prompt lookup)": (ORIGINAL, "ngram"),
    "speculation alone (self, W4A16)": (ORIGINAL, "self W4A16, head float, kv float"),
    "both, default settings (W8A8 + self, W4A16)": ("W8A8/float", "self W4A16, head float, kv float"),
}
"""Target and draft of each technique; draft lengths are the recipe's own policy."""


def choice(p: Prediction) -> dict[str, object]:
    target, kv = p.target.split("/")
    return {"name": p.name, "target": target, "kv": kv, "draft": p.draft, "gamma": p.gamma}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-135m-tune-cpu.yaml"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    study = Study(Recipe.read(options.recipe), WORK, Progress())
    answer = study.answer(study.model())
    finalists = study.finalists(answer)
    arms = {p.name: study.arm(p.target, p.draft, p.gamma) for p in finalists}
    arms |= {name: study.arm(*of, 0) for name, of in ALONE.items()}
    speeds = {name: speed_of(runs) for name, runs in study.confirm(arms).items()}
    harm = {p.target: p.kl for p in answer.every} | {ORIGINAL: 0.0}
    confirmed = [
        {
            "choice": choice(p),
            "predicted_tok_s": round(1 / p.seconds, 3),
            "predicted_ci": [round(1 / end, 3) for end in reversed(p.ci)],
            "measured_tok_s": round(speeds[p.name], 3),
            "kl": round(p.kl, 6),
        }
        for p in finalists
    ]
    best = max((p for p in finalists if p.kl <= (study.recipe.budget.max_kl or 1e9)), key=lambda p: speeds[p.name])
    found = {
        "environment": environment() | {"engine": study.engine},
        "chosen": choice(best) | {"tok_s": round(speeds[best.name], 3), "kl": round(best.kl, 6)},
        "chosen_by_prediction": choice(answer.chosen) | {"why": answer.why},
        "single_techniques": [
            {"name": name, "tok_s": round(speeds[name], 3), "kl": round(harm[target], 6)}
            for name, (target, _) in ALONE.items()
        ],
        "confirmed": confirmed,
        "front": [choice(p) | {"predicted_tok_s": round(1 / p.seconds, 3), "kl": round(p.kl, 6)} for p in answer.front],
        "schedule": answer.schedule,
        "combinations": len(answer.every),
        "pruned": [list(entry) for entry in study.space.pruned],
    }
    atomic_write(BASELINE, json.dumps(found, indent=1) + "\n")
    print(answer.why)
    for name, speed in speeds.items():
        print(f"{speed:8.2f} tokens/s measured  {name}")


if __name__ == "__main__":
    main()
