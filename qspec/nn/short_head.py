"""A head that is run for a part of the vocabulary: rows of what a draft never says need not be read.

D ids that are kept, V vocabulary, T rows of a pass.
"""

from collections import ChainMap
from dataclasses import replace
import math
from typing import Any

import torch
from torch import Tensor

from qspec.nn.linear import picked_rows
from qspec.records import EMBEDDING, HEAD, QLinear, QuantizedModel


def short_headed(model: QuantizedModel) -> QuantizedModel:
    """The model with the rows of its head that `head_ids` names, and a head of its own where it was the embedding."""
    ids_D, linears, tensors = model.head_ids, dict[str, QLinear](), dict[str, Tensor]()
    if ids_D is None:
        return model
    if "lm_head" in model.linears:
        linears["lm_head"] = picked_rows(model.linears["lm_head"], ids_D)
    else:
        tensors[HEAD] = model.tensors[EMBEDDING if model.arch.tied else HEAD][ids_D]
    if "lm_head.bias" in model.tensors:
        tensors["lm_head.bias"] = model.tensors["lm_head.bias"][ids_D]
    over: Any = ChainMap  # its types refuse read-only mappings; nothing is looked up before it is asked for
    arch = replace(model.arch, tied=False)
    return replace(model, arch=arch, tensors=over(tensors, model.tensors), linears=over(linears, model.linears))


def widened(logits_TD: Tensor, ids_D: Tensor | None, vocab: int) -> Tensor:
    """Logits `[T, V]`, minus infinity for ids that are not kept: every law has probability 0 there. None: all are."""
    if ids_D is None:
        return logits_TD
    return torch.full((len(logits_TD), vocab), -math.inf).index_copy_(1, ids_D, logits_TD)
