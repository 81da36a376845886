"""Which layers a smaller copy of a model keeps: one by one, that goes without which the law stays closest.

Measured, not ranked by how little a layer turns its input (ShortGPT, arXiv 2403.03853), and anew after each layer that
went, since neighbours that can stand in for each other cannot both go (SLEB, arXiv 2402.09025).
Letters: T tokens of a text, K hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.nn.eager.decoder import Decoder
from qspec.progress import Progress
from qspec.records import LoadedModel


@dataclass(frozen=True)
class Dropped:
    """A layer that went, and the KL divergence from the model's law without it and all before, nats per token."""

    layer: int
    kl: float


def choose_layers(
    model: LoadedModel, texts: Sequence[list[int]], count: int, progress: Progress
) -> tuple[tuple[int, ...], list[Dropped]]:
    """The `count` layers that stay, rising, and those that went, in that order. Holds the model in float32."""
    whole = Decoder.from_float(model, torch.float32, max(map(len, texts)))
    tokens = [torch.tensor(text) for text in texts]
    laws = [whole.with_layers(range(model.arch.n_layers)).forward(tokens_T).log_softmax(-1) for tokens_T in tokens]
    kept, dropped = list(range(model.arch.n_layers)), list[Dropped]()
    for _ in progress.track(range(len(kept) - count), "drop layers", unit="layer"):
        totals_N = torch.zeros(len(kept))
        for tokens_T, law_TV in zip(tokens, laws, strict=True):
            totals_N += _without_each(whole, kept, tokens_T, law_TV)
        kls = (totals_N / sum(map(len, tokens))).tolist()
        at, *others = sorted(range(len(kept)), key=kls.__getitem__)
        dropped.append(Dropped(kept[at], kls[at]))
        then = f"; next: layer {kept[others[0]]}, {kls[others[0]]:.4f}" if others else ""
        progress.say(f"layer {kept[at]} goes: KL {kls[at]:.4f} nats per token without it{then}")
        kept.pop(at)
    return tuple(kept), dropped


def _without_each(whole: Decoder, kept: Sequence[int], tokens_T: Tensor, law_TV: Tensor) -> Tensor:
    """Sum of the KL divergences of a text without each of the layers that are left `[layers]`."""
    x_TK, found = whole.embed(tokens_T), list[Tensor]()
    for i, layer in enumerate(kept):
        rest = whole.with_layers(kept[i + 1 :])
        short_TV = rest.run_head(rest.run_layers(x_TK)).log_softmax(-1)
        found.append(F.kl_div(short_TV, law_TV, reduction="sum", log_target=True))
        x_TK = whole.with_layers([layer]).run_layers(x_TK)
    return torch.stack(found)
