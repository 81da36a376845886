"""A draft model: a smaller `LM` that speaks the target's vocabulary."""

from collections.abc import Collection
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad

from qspec.nn.lm import LM
from qspec.numerics.probs import sample
from qspec.spec.types import NOTHING, More, Proposal, Sampling, draw_uniforms


class ModelDrafter:
    """Drafts a chain token by token from `lm`, under the same sampling settings as the target.

    vocab_size: the target's padded vocabulary (default: the draft's own); tokens: how many ids of it are no padding
    (default: all). Ids from there on are never drafted.
    eos_ids: drafting ends behind one of these, since nothing behind it can stand. This reads every token on the host
    as it is drawn; without them a proposal is read once.
    """

    def __init__(
        self, lm: LM, vocab_size: int | None = None, eos_ids: Collection[int] = (), tokens: int | None = None
    ) -> None:
        self._lm = lm
        self._vocab_size = lm.vocab_size if vocab_size is None else vocab_size
        self._tokens = self._vocab_size if tokens is None else min(tokens, self._vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._cached: list[int] = []

    @property
    def lm(self) -> LM:
        return self._lm

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: torch.Generator,
        more: More | None = None,
    ) -> Proposal:
        """At most `k` tokens, as many as the draft's cache has room for, and their laws (None if greedy).

        `more` is told the largest probability of each token's law, if greedy of the draft's own at temperature 1. This
        reads every token on the host.
        """
        start = perf_counter()
        k = min(k, self._lm.max_length - len(context) + 1)  # the last draft token is never fed
        if k < 1:
            return Proposal(torch.empty(0, dtype=torch.long), None, perf_counter() - start)
        tokens_K, probs_KV = self._chain(self._missing(context), k, sampling, generator, more)
        self._cached = (context + tokens_K.tolist())[: self._lm.length]
        return Proposal(tokens_K, probs_KV, perf_counter() - start)

    def reset(self) -> None:
        """Forget the sequence (a new request starts)."""
        self._lm.truncate(0)
        self._cached = []

    def _missing(self, context: list[int]) -> Tensor:
        """Roll the cache back to what it shares with `context`; the tokens behind that, at least the last."""
        limit = min(len(self._cached), len(context) - 1)
        common = next((i for i in range(limit) if self._cached[i] != context[i]), limit)
        self._lm.truncate(common)
        self._cached = context[:common]
        return torch.tensor(context[common:])

    def _chain(
        self, feed_T: Tensor, k: int, sampling: Sampling, generator: torch.Generator, more: More | None
    ) -> tuple[Tensor, Tensor | None]:
        uniforms_K = draw_uniforms(0 if sampling.greedy else k, generator)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for i in range(k):
            logits_1V = self._lm.forward(feed_T, last=1)[:, : self._tokens]
            law_1V = None if sampling.greedy else sampling.law(logits_1V)
            if more is not None and not more(float((logits_1V.softmax(-1) if law_1V is None else law_1V).max())):
                break
            if law_1V is None:
                feed_T = logits_1V.argmax(-1)
            else:
                laws.append(law_1V)
                feed_T = sample(law_1V, uniforms_K[i : i + 1])
            tokens.append(feed_T)
            if self._eos_ids and int(feed_T) in self._eos_ids:
                break
        return torch.cat(tokens) if tokens else NOTHING.tokens_K, self._widen(torch.cat(laws)) if laws else None

    def _widen(self, probs_KV: Tensor) -> Tensor:
        """Probability 0 for ids that are never drafted."""
        return pad(probs_KV, (0, self._vocab_size - probs_KV.shape[-1]))
