"""Evidence that drafts leave the law of a pair's tokens as it is: sampled texts with drafts and without, compared."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from qspec.measure.arm import Arm, Request
from qspec.numerics.statistics.two_sample import homogeneity_p
from qspec.progress import Progress
from qspec.schema.results import Marginals
from qspec.speculation.engine import generate
from qspec.speculation.types import Sampling

PROMPTS, SAMPLES, POSITIONS = 3, 20, 5


CERTAIN = 0.001
"""p-value below which the laws are said to differ: a sound pair is accused once in a thousand times."""


@torch.no_grad()
def marginals(
    plain: Arm, drafted: Arm, requests: Sequence[Request], eos_ids: Collection[int], seed: int, progress: Progress
) -> Marginals:
    """Sample the first tokens behind a few prompts at temperature 1, `SAMPLES` times each in both arms, and compare."""
    chosen = sorted(requests, key=lambda request: len(request.tokens))[:PROMPTS]  # short ones are read fastest
    jobs = [(i, arm, n) for i in range(len(chosen)) for n in range(SAMPLES) for arm in (0, 1)]
    texts: dict[tuple[int, int], list[list[int]]] = {}
    for i, which, n in progress.track(jobs, "prove", len(jobs), "text"):
        arm = (plain, drafted)[which]
        generator = torch.Generator().manual_seed(seed + (2 * n + which) * len(chosen) + i)
        law = Sampling(temperature=1.0)
        told = generate(
            arm.target, arm.drafter, arm.policy, chosen[i].tokens, POSITIONS, law, eos_ids, generator, domain="proof"
        )
        texts.setdefault((i, which), []).append(told.tokens)
    both = [(_rows(texts[i, 0]), _rows(texts[i, 1])) for i in range(len(chosen))]
    p = homogeneity_p(both, seed=seed)
    return Marginals(prompts=len(chosen), samples=SAMPLES, positions=POSITIONS, temperature=1.0, p_value=p)


def _rows(texts: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([[*text, *[-1] * (POSITIONS - len(text))] for text in texts])
