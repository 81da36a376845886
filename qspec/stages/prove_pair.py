"""Show anew that a pair's drafts leave its output as it is, with this machine's engine."""

from pathlib import Path

from qspec.errors import PairError
from qspec.progress import Progress
from qspec.schema.recipe import BenchmarkSpec
from qspec.stages.bench import bench
from qspec.stages.bench_arm import Arm
from qspec.stages.open_pair import open_pair
from qspec.stages.verdict import losslessness


def prove_pair(folder: Path) -> list[str]:
    """What was found, a sentence each. Raises `PairError` if drafts change the output."""
    pair = open_pair(folder)
    quick = BenchmarkSpec(prompts=pair.recipe.benchmark.prompts, max_new_tokens=48, repeats=1)
    recipe = pair.recipe.model_copy(update={"benchmark": quick})
    arms = {"pair, plain": Arm(pair.target), "pair": Arm(pair.target, pair.drafter, pair.policy)}
    tokenizer, eos_ids = pair.model.tokenizer, pair.model.arch.eos_ids
    speed = bench(arms, tokenizer, recipe, Progress(), eos_ids=eos_ids, prove="pair, plain")
    found = losslessness(speed)
    wrong = [finding.text for finding in found if finding.tone == "bad"]
    if wrong:
        raise PairError(str(folder), "; ".join(wrong), "report it with the pair; --no-draft serves it meanwhile")
    return [finding.text for finding in found]
