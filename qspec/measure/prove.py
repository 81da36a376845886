"""Evidence that drafts do not change the distribution of a pair's tokens: sampled text against the target's own.

Text is sampled with drafts; the target then reads it once more, plainly, so that the distribution of every token is
known. Two counts are compared with what those distributions say: tokens that the draft favours, where a draft was
judged, and tokens of the likelier half of their distribution, everywhere. An engine that accepts too many drafts, or
draws a wrong token behind a rejection, moves the first; a wrong context, temperature or filter the second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qspec.measure.arm import Arm, TokenizedPrompt
from qspec.nn.lm import LM
from qspec.numerics.speculation.trees import children
from qspec.numerics.statistics.fidelity import detectable_shift, excess_p
from qspec.progress import Progress
from qspec.schema.results import Marginals
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Drafter, Follower, Generation, More, Proposal, Randomness, Sampling

POSITIONS, DRAFTED, TEXTS = 48, 480, 24
"""Tokens of a text; texts are sampled until so many tokens were drafted, at most so many texts."""


LENGTH = 4
"""Drafts of a step in every other text; the others draft by the arm's own policy."""


CERTAIN = 0.001
"""p-value below which the distribution is said to be another one: a sound pair is accused once in a thousand times."""


SHIFT = 0.1
"""Total variation that has to be detectable (in 4 of 5 cases) for tokens to be said to follow their distribution."""


@dataclass
class Witness:
    """A drafter that keeps what it proposed, by the length of the context that each proposal continues."""

    drafter: Drafter
    proposals: dict[int, Proposal] = field(default_factory=dict)

    def propose(
        self, context: list[int], k: int, sampling: Sampling, generator: Randomness, more: More | None = None
    ) -> Proposal:
        self.proposals[len(context)] = self.drafter.propose(context, k, sampling, generator, more)
        return self.proposals[len(context)]

    def reset(self) -> None:
        self.drafter.reset()

    def follow(self, target: LM) -> None:
        if isinstance(self.drafter, Follower):
            self.drafter.follow(target)


@dataclass
class SetHits:
    """Whether each token fell into its set, and the chance of that."""

    inside: list[bool] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def add(self, p_V: Tensor, members_V: Tensor, token: int) -> None:
        self.inside.append(bool(members_V[token]))
        self.chances.append(min(1.0, max(0.0, float(p_V[members_V].sum()))))

    @property
    def p_value(self) -> float:
        return excess_p(self.inside, self.chances)


@torch.no_grad()
def marginals(arm: Arm, requests: Sequence[TokenizedPrompt], seed: int, progress: Progress) -> Marginals:
    """Sample text at temperature 1 with the arm's drafter, behind the shortest prompts first, and judge its tokens.

    Each prompt is read once for its text: the plain reading goes on from there.
    """
    assert arm.drafter is not None, "a plain arm has no drafts to judge"
    shortest = sorted(requests, key=lambda request: len(request.tokens))
    favoured, likely, sampling, used = SetHits(), SetHits(), Sampling(temperature=1.0), 0
    for used in progress.track(range(1, TEXTS + 1), "prove", TEXTS, "text"):
        prompt, witness = shortest[(used - 1) % len(shortest)].tokens, Witness(arm.drafter)
        policy, generator = Fixed(LENGTH) if used % 2 else arm.policy, torch.Generator().manual_seed(seed + used)
        text = generate(arm.target, witness, policy, prompt, POSITIONS, sampling, (), generator, domain="proof")
        arm.target.truncate(len(prompt) - 1)
        read_T = torch.tensor([prompt[-1], *text.tokens[:-1]])
        p_TV = sampling.probs(arm.target.forward(read_T, last=len(text.tokens)).cpu().double())
        for p_V, token in zip(p_TV, text.tokens, strict=True):
            likely.add(p_V, _likelier_half(p_V), token)
        for at, favours_V in _favoured(len(prompt), text, witness, p_TV):
            favoured.add(p_TV[at], favours_V, text.tokens[at])
        if len(favoured.inside) >= DRAFTED:
            break
    p_value = min(1.0, 2 * min(favoured.p_value, likely.p_value))
    return Marginals(
        prompts=min(used, len(shortest)),
        samples=used,
        positions=POSITIONS,
        temperature=sampling.temperature,
        p_value=p_value,
        drafted=len(favoured.inside),
        detectable=detectable_shift(favoured.chances, CERTAIN / 2),
    )


def _likelier_half(p_V: Tensor) -> Tensor:
    """The fewest likeliest tokens that hold half of a distribution, bool `[V]`."""
    values_V, ids_V = p_V.sort(descending=True, stable=True)
    return torch.zeros(len(p_V), dtype=torch.bool).scatter_(0, ids_V, values_V.cumsum(0) - values_V < 0.5)


def _favoured(prompt: int, text: Generation, witness: Witness, p_TV: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Places in a text where a draft was judged, and the tokens that it favoured there, bool `[V]`.

    Those are certain drafts, or the tokens that the draft's distribution holds likelier than the target's. Both are
    fixed by what stands before, and never by the token that was drawn.
    """
    start = 1  # the first token comes from the prompt's pass
    for step in text.steps:
        proposal = witness.proposals.get(prompt + start)
        tokens = text.tokens[start : start + step.accepted + 1]
        node = -1
        for at, token in enumerate(tokens, start):
            siblings = [] if proposal is None else children(proposal.parents)[node + 1]
            if proposal is None or not siblings:
                break
            drafts = proposal.tokens_K[siblings].tolist()
            if proposal.probs_KV is None:
                favours_V = torch.zeros(p_TV.shape[1], dtype=torch.bool)
                favours_V[drafts] = True
            else:
                favours_V = proposal.probs_KV[siblings[0]].cpu().double() > p_TV[at]
            yield at, favours_V
            node = next((child for child, draft in zip(siblings, drafts, strict=True) if draft == token), -1)
            if node < 0:
                break
        start += len(tokens)
