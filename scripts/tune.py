"""Search the pairs of a recipe, run the best ones and each technique alone in turns, and keep what came out.

The joint search on SmolLM2-135M, beside each technique alone in its default settings: predicted and measured tokens per
second of every confirmed combination. Pieces and answers are kept in runs/bench_tune, and not measured again; what came
out goes to eval/baselines/tune.json.   --recipe FILE   another job    --threads N
  --again   delete all kept seconds first, so that predictions and runs are of one sitting; quantized models, harm and
            acceptance stay. One that is killed goes on without it.
"""

import argparse
import json
from pathlib import Path
import shutil
import warnings

import torch

from qspec.planning.tune_space import PLAIN
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.report.render import html as report_html
from qspec.schema.recipe import Recipe
from qspec.tune.halves import ORIGINAL
from qspec.tune.page import SearchResult, as_data, document
from qspec.tune.search import SECONDS, Study

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-135m-tune-cpu.yaml"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="measure all seconds anew, and keep the rest")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    study = Study(Recipe.read(options.recipe), WORK, Progress())
    if options.again:
        shutil.rmtree(WORK / SECONDS, ignore_errors=True)
    answer, lowered = study.search()
    confirmed, speeds = study.confirm(answer, lowered, ALONE)
    outcome = SearchResult(answer, confirmed, study.space.pruned, tuple(lowered))
    harm = {p.target: p.kl for p in answer.every} | {ORIGINAL: 0.0}
    alone = [
        {"name": name, "measured_tok_s": speeds[name][0], "measured_ci": speeds[name][1], "kl": harm[target]}
        for name, (target, _) in ALONE.items()
    ]
    kept = as_data(outcome) | {
        "single_techniques": alone,
        "environment": environment() | {"engine": study.halves.engine},
    }
    atomic_write(BASELINE, json.dumps(kept, indent=1) + "\n")
    atomic_write(WORK / "tune.html", report_html.render(document(outcome, study.recipe.name)))
    print(outcome.why)
    for name, (speed, _) in ({c.prediction.name: (c.speed, c.ci) for c in confirmed} | speeds).items():
        print(f"{speed:8.2f} tokens/s measured  {name}")


if __name__ == "__main__":
    main()
