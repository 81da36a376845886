"""Whether two engines that write different tokens found both equally good, as far as last bits let a model tell."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
import math
from typing import Any

import torch

from qspec.nn.engines import open_decoder
from qspec.nn.lm import LM
from qspec.pair.open import LoadedPair, engine_options
from qspec.records import EMBEDDING, HEAD, QuantizedModel

SPACINGS = 2
"""Of bfloat16 at the best logit: the gap between two tokens that vLLM's rounding of logits may close."""
STEP = torch.finfo(torch.bfloat16).eps / 2
"""The most that rounding to bfloat16, in which vLLM computes on a CPU, changes a number by, as a share of it."""
DRAWS = 16
"""Random changes that a choice is measured under."""


@dataclass(frozen=True)
class Parting:
    """The tokens that two answers share, prompt included, and the next one of each."""

    tokens: list[int]
    one: int
    other: int


@dataclass(frozen=True)
class Look:
    """What a model says there: by how much it prefers the first of both, its own choice, its best logit."""

    lead: float
    choice: int
    best: float


def look(lm: LM, parting: Parting) -> Look:
    lm.truncate(0)
    logits_V = lm.forward(torch.tensor(parting.tokens), last=1)[0]
    lead = logits_V[parting.one] - logits_V[parting.other]
    return Look(float(lead), int(logits_V.argmax()), float(logits_V.max()))


def nudged(model: QuantizedModel, seed: int) -> QuantizedModel:
    """The model with every number of its input embeddings up or down by `STEP`, at random; the head stays as it is."""
    embedding_VK = model.tensors[EMBEDDING]
    generator = torch.Generator().manual_seed(seed)
    signs_VK = torch.randint(2, embedding_VK.shape, generator=generator, dtype=torch.float32) * 2 - 1
    tensors = {HEAD: embedding_VK, **model.tensors, EMBEDDING: embedding_VK.float() * (1 + STEP * signs_VK)}
    return replace(model, arch=replace(model.arch, tied=False), tensors=tensors)


def judge(pair: LoadedPair, partings: Sequence[Parting]) -> list[dict[str, Any]]:
    """A row per parting: the gap between both tokens in qspec's logits, beside what may close it.

    rounding: `SPACINGS` of bfloat16. moved: the most that the gap changed by under `DRAWS` changes of the input
    embeddings, each as small as one rounding; changed_own: in how many of them qspec itself chose another token there.
    near_tie: the gap is within rounding or, where the target rounds inputs of its layers, which magnifies last bits,
    within what was measured.
    """
    own = [look(pair.target, parting) for parting in partings]
    draws: list[list[Look]] = []
    for seed in range(DRAWS if partings else 0):
        lm = open_decoder(nudged(pair.model, seed), max_length=pair.target.max_length, **engine_options(pair.recipe))
        draws.append([look(lm, parting) for parting in partings])
    magnifies = rounds_inputs(pair)
    return [row(at, [draw[i] for draw in draws], magnifies) for i, at in enumerate(own)]


def rounds_inputs(pair: LoadedPair) -> bool:
    """Whether layers of the target round their inputs, which magnifies last bits."""
    return any(linear.activation is not None for linear in pair.model.linears.values())


def row(own: Look, draws: Sequence[Look], magnifies: bool) -> dict[str, Any]:
    gap, rounding = abs(own.lead), SPACINGS * 2.0 ** (math.floor(math.log2(abs(own.best))) - 7)
    moved = max(abs(draw.lead - own.lead) for draw in draws)
    measured = {"gap": round(gap, 4), "rounding": rounding, "moved": round(moved, 4)}
    changed = {"changed_own": sum(draw.choice != own.choice for draw in draws), "draws": len(draws)}
    return measured | changed | {"near_tie": gap <= rounding or (magnifies and gap <= moved)}
