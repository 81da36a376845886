"""Drafts that stand with a chosen chance and cost nothing: the ceiling of speculation, with no draft trained.

They are made from the target's own answer, so they say nothing about any draft that could be had. For speed alone.
"""

from collections.abc import Sequence

import torch

from qspec.speculation.types import More, Proposal, Randomness, Sampling


class SyntheticDrafter:
    """Continues a known greedy answer; every token is right with chance `alpha`, one after the other."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], alpha: float, vocab_size: int) -> None:
        self._prompt, self._answer, self.alpha, self._vocab = len(prompt), list(answer), alpha, vocab_size

    def propose(
        self,
        context: list[int],
        k: int,
        sampling: Sampling,
        generator: Randomness,
        more: More | None = None,
    ) -> Proposal:
        assert isinstance(generator, torch.Generator), "chances are drawn, and draws depend on those before"
        at = len(context) - self._prompt
        right_K = torch.tensor(self._answer[at : at + k], dtype=torch.long)
        wrong_K = torch.rand(len(right_K), generator=generator) >= self.alpha
        return Proposal((right_K + wrong_K) % self._vocab, None)

    def reset(self) -> None:
        """Nothing is remembered."""
