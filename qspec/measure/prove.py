"""Evidence that drafts do not change what a pair writes.

Seeded text has to be the same with and without drafts, as greedy text has: token for token, up to near ties. Other
sampled text can only be held against a distribution: it is sampled with drafts; the target then reads it once more,
plainly, so that the distribution of every token is known. Two counts are compared with what those distributions say:
tokens that the draft favours, where a draft was judged, and tokens of the likelier half of their distribution,
everywhere. An engine that accepts too many drafts, or draws a wrong token behind a rejection, moves the first; a wrong
context, temperature or filter the second.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qspec.measure.arm import Arm, TokenizedPrompt
from qspec.nn.lm import LM
from qspec.numerics.speculation.probs import exponentials
from qspec.numerics.speculation.trees import children
from qspec.numerics.statistics.fidelity import detectable_shift, excess_p
from qspec.progress import Progress
from qspec.schema.results import Equality, Marginals, Mismatch
from qspec.speculation.engine import generate
from qspec.speculation.length.policies import Fixed
from qspec.speculation.types import Drafter, Follower, Generation, More, Proposal, Randomness, Repeatable, Sampling

POSITIONS, DRAFTED, TEXTS = 48, 480, 24
"""Tokens of a text; texts are sampled until so many tokens were drafted, at most so many texts."""


SEEDED = 8
"""Seeded texts, each sampled with drafts and without."""


NEAR_TIE = 0.02
"""Gap to the best logit, in standard deviations of the logits, that rounding explains (bfloat16: 2^-8 per product)."""


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


def seeded(arm: Arm, plain: str, name: str, requests: Sequence[TokenizedPrompt], seed: int) -> Equality:
    """Sample texts of fixed seeds at temperature 1 with the drafter of the arm `name`, and as the arm `plain` does.

    A difference is a near tie where the race between both tokens (`numerics.speculation.probs.race`) was one.
    """
    shortest = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
    sampling, mismatches = Sampling(temperature=1.0), list[Mismatch]()
    for used in range(SEEDED):
        index, number = shortest[used % len(shortest)], seed + used
        request, policy = requests[index], Fixed(LENGTH) if used % 2 else arm.policy
        wanted = request.tokens, POSITIONS, sampling, (), Repeatable(number)
        expected = generate(arm.target, None, None, *wanted).tokens
        drafted = generate(arm.target, arm.drafter, policy, *wanted).tokens
        if drafted != expected:
            mismatches.append(parting(arm.target, request, index, expected, drafted, _race_score(number)))
    return Equality(arm=name, baseline=plain, n=SEEDED, equal=SEEDED - len(mismatches), mismatches=tuple(mismatches))


def _race_score(seed: int) -> Callable[[Tensor, int], Tensor]:
    """Logits plus what the numbers of a seed add to them at a position: the token of the largest sum wins the race."""
    return lambda logits_V, position: logits_V - exponentials(seed, position, len(logits_V)).log()


@torch.no_grad()
def parting(
    target: LM,
    request: TokenizedPrompt,
    index: int,
    plain: list[int],
    drafted: list[int],
    score: Callable[[Tensor, int], Tensor] = lambda logits_V, position: logits_V,
) -> Mismatch:
    """Where two different texts part, judged by the target's own logits there.

    score: what the chosen token is the largest of, from float64 logits `[V]` and the token's position in the sequence.
    """
    together = zip(plain, drafted, strict=False)
    shorter = min(len(plain), len(drafted))
    position = next((i for i, (a, b) in enumerate(together) if a != b), shorter)
    margin, near_tie = float("inf"), False
    if position < shorter:
        target.truncate(0)
        read = [*request.tokens, *plain[:position]]
        logits_V = target.forward(torch.tensor(read), last=1)[0].cpu().double()
        scores_V = score(logits_V, len(read))
        margin = float(scores_V.max() - scores_V[[plain[position], drafted[position]]].min())
        near_tie = margin <= NEAR_TIE * float(logits_V.std())
    return Mismatch(prompt=index, category=request.category, position=position, margin=margin, near_tie=near_tie)


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
