"""Which ids a draft model may say: frequent ones, so that its head has fewer rows to read. Sampling stays exact.

What a draft never proposes has probability 0 in its law, and the target says it all the same. Source: FR-Spec, arXiv
2502.14856.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
import math

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.numerics.blocks import PerBlock
from qspec.plan import LayerScheme
from qspec.records import QuantizedModel


def frequent(rows: Iterable[list[int]], size: int, vocab: int, always: Collection[int]) -> Tensor:
    """The `size` ids that token rows hold most often, `always` among them, rising `[D]`; the lowest of equals.

    Merges are numbered as they were learned, so that low ids are the frequent ones where the text is too short to tell.
    """
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    counts_V = torch.bincount(tokens, minlength=vocab).double()
    counts_V[list(always)] = math.inf
    return counts_V.sort(descending=True, stable=True).indices[:size].sort().values


def limited(model: QuantizedModel, size: int, rows: Iterable[list[int]]) -> QuantizedModel:
    """A draft whose head is run for the `size` most frequent ids of `rows`, and for those that end an answer."""
    vocab = model.arch.vocab_size
    note = f"It drafts {size:,} of {vocab:,} ids, those that the calibration text holds most often."
    ids_D = frequent(rows, size, vocab, model.arch.eos_ids)
    return replace(model, head_ids=ids_D, notes=(*model.notes, note))


def require_limit(size: int, vocab: int, head: LayerScheme | None) -> None:
    """Raise `RecipeError` for a draft vocabulary that leaves nothing out, or whose rows share scales with others."""
    if size >= vocab:
        raise RecipeError(f"draft.draft_vocab {size}", f"the target has {vocab:,} ids", "give fewer, or omit it")
    if head is not None and isinstance(head.weight.granularity, PerBlock):
        rule = "lm_head has scales of tiles of rows, which cannot be taken apart"
        raise RecipeError(f"draft.draft_vocab {size}", rule, "give lm_head another scheme by a rule")
