"""One number of head rows for both halves: families pad the same vocabulary to different sizes."""

from collections.abc import Collection, Iterable
from dataclasses import replace
import math

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.errors import PairError, RecipeError
from qspec.numerics.quantization.blocks import PerBlock
from qspec.plan import LayerScheme
from qspec.records import ArchMap, LoadedModel, QuantizedModel, Tokenizer

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


def check_tokenizers(target: Tokenizer, draft: Tokenizer) -> None:
    """Every token has one id in both; raises `PairError` naming the first that does not. Costs no model."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours == theirs:
        return
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (min(ids[token] for ids in (ours, theirs) if token in ids), token),
    )
    first = differing[0]
    raise PairError(
        f"{len(differing)} tokens, first {first!r}",
        f"id {ours.get(first)} in the target and {theirs.get(first)} in the draft, but both must share one tokenizer",
        "use a draft of the same model family, or draft kind: ngram",
    )


def differing_parts(target: Tokenizer, draft: Tokenizer) -> list[str]:
    """Parts in which two tokenizers differ beside ids. The target's is used: the draft has learned from other text."""
    ours, theirs = target.parts(), draft.parts()
    names = ("merges", "added tokens", "special tokens", "splitting", "chat template")
    return [name for name in names if ours[name] != theirs[name]]


def check_heads(target: ArchMap, draft: ArchMap) -> None:
    """Both heads have the same rows, padding included; raises `PairError`."""
    if target.vocab_size != draft.vocab_size:
        raise PairError(
            f"draft vocabulary {draft.vocab_size}",
            f"the target's head has {target.vocab_size} rows, and runtimes need equal heads",
            "use a draft with the same padding, or draft kind: ngram",
        )


def real_vocab(tokenizer: Tokenizer) -> int:
    """Rows of the head that a token can use; the rest is padding."""
    return max(tokenizer.vocabulary().values()) + 1
