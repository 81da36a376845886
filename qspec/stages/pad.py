"""One number of head rows for both halves: families pad the same vocabulary to different sizes."""

from dataclasses import replace

import torch.nn.functional as F

from qspec.records import LoadedModel

_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def match_rows(draft: LoadedModel, rows: int) -> LoadedModel:
    """The draft with `rows` rows in embedding and head: rows of zeros added behind, or padding cut off.

    For halves whose tokenizers are equal, so that all rows concerned are padding; runtimes want equal heads.
    What such a row predicts (0, where every token may be below) is never drafted: see `ModelDrafter`.
    """
    missing = rows - draft.arch.vocab_size
    if missing == 0:
        return draft
    tensors = {name: draft.tensors[name] for name in draft.tensors}
    tensors |= {name: F.pad(tensors[name], (0, 0, 0, missing)) for name in _TABLES if name in tensors}
    config = dict(draft.config) | {"vocab_size": rows}
    return replace(draft, arch=replace(draft.arch, vocab_size=rows), tensors=tensors, config=config)
