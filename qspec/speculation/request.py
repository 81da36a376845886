"""One request on its way: what it has committed, and the parts of a step. `engine` and `batch` put them together.

After every step the target's cache holds the committed tokens except the newest, which the next pass feeds in front
of its drafts.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
import math
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from qspec.errors import IntegrityError, RecipeError
from qspec.nn.lm import LM, TappedLM, TreeLM
from qspec.numerics.speculation.trees import Parents, children, depths, under_root
from qspec.numerics.speculation.verify import verify_best, verify_sampling, verify_tree_best, verify_tree_sampling
from qspec.speculation.types import (
    NOTHING,
    Ask,
    BatchDrafter,
    Drafter,
    DraftLength,
    Follower,
    Generation,
    Proposal,
    Randomness,
    Repeatable,
    Sampling,
    StepRecord,
    Stop,
    Verdict,
    draw_uniforms,
)


@dataclass(frozen=True)
class GenerationRequest:
    """One request of a batch, before its start; fields as in `engine.generate`. No two share a drafter or a policy."""

    tokens: list[int]
    max_new_tokens: int
    generator: Randomness
    drafter: Drafter | None = None
    policy: DraftLength | None = None
    domain: str = ""


@dataclass
class Request:
    """A request on its way. `context`: prompt and committed tokens, at most `end` of them."""

    target: LM
    drafter: Drafter | None
    policy: DraftLength
    prompt: list[int]
    end: int
    sampling: Sampling
    eos_ids: Collection[int]
    generator: Randomness
    steps: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = list(self.prompt)
        self._start = self._first = self._newest = perf_counter()

    def prefill(self, domain: str = "") -> list[int]:
        """Begin: feed the prompt into an empty cache and commit the first token."""
        most = min(self.end, self.target.max_length + 1)
        self.policy.reset(domain, len(self.prompt), most - len(self.prompt))
        if self.drafter is not None:
            self.drafter.reset()
        if isinstance(self.target, TappedLM):
            self.target.tap(())  # an earlier request's drafter may have read it
        if isinstance(self.drafter, Follower):
            self.drafter.follow(self.target)
        self.target.truncate(0)
        logits_1V = self.target.forward(torch.tensor(self.context), last=1)
        if not math.isfinite(float(logits_1V.max())):
            rule = "are not finite: its numbers leave float32, or were no numbers to begin with"
            raise IntegrityError("the target's logits", rule, "use an intact copy of the model, or quantize it again")
        self.context.append(self.verify(NOTHING, logits_1V).next_token)
        self._first = self._newest = perf_counter()
        return self.context[-1:]

    def ask(self) -> tuple[Drafter, Ask] | None:
        """The drafter of the coming step and its ask; None: nothing is drafted."""
        k = min(self.policy.next(), self.end - len(self.context) - 1, self._room)
        if self.drafter is None or k < 1:
            return None
        return self.drafter, Ask(self.context, k, self.sampling, self.generator, self.policy.judge())

    def fitted(self, proposal: Proposal, k: int) -> Proposal:
        """A proposal cut to depth `k`, and to as many nodes as there is room for."""
        assert _depth(proposal) <= k, "a drafter proposed more than it was asked for"
        return proposal if proposal.is_chain else _first_nodes(proposal, self._room)

    @property
    def _room(self) -> int:
        return self.target.max_length - self.target.length - 1

    def rows(self, proposal: Proposal) -> tuple[Tensor, Parents | None]:
        """Rows that the target reads: the newest token, and drafts behind it; parents if they are a tree."""
        tokens_K1 = torch.tensor([self.context[-1], *proposal.tokens_K.tolist()])
        return tokens_K1, None if proposal.is_chain else under_root(proposal.parents)

    def verify(self, proposal: Proposal, logits_K1V: Tensor) -> Verdict:
        """The verdict, from logits behind the newest token and behind every draft."""
        if self.sampling.greedy:
            return self.verify_best(proposal, logits_K1V.argmax(-1))
        probs_K1V = self.sampling.probs(logits_K1V)
        if isinstance(self.generator, Repeatable):
            ahead = (0, *(depth + 1 for depth in depths(proposal.parents)))
            positions, size = [len(self.context) + depth for depth in ahead], probs_K1V.shape[-1]
            return self.verify_best(proposal, self.generator.choose(probs_K1V, positions, size, slice(size)))
        uniforms_K1 = draw_uniforms(len(logits_K1V), self.generator).to(logits_K1V.device)
        return _verdict(proposal, *_sampled(proposal, probs_K1V, uniforms_K1))

    def verify_best(self, proposal: Proposal, best_K1: Tensor) -> Verdict:
        """`verify` for rows of which a single token each may be accepted: under greedy decoding, the arg-max."""
        tokens_K = proposal.tokens_K.to(best_K1.device)
        if not proposal.is_chain:
            return _verdict(proposal, *verify_tree_best(tokens_K, proposal.parents, best_K1))
        accepted, token = verify_best(tokens_K, best_K1)
        return _verdict(proposal, list(range(accepted)), token)

    def commit(self, proposal: Proposal, verdict: Verdict) -> tuple[int, list[int]]:
        """Keep accepted tokens up to a stop token, roll the rest back; returns how many drafts count, and the committed
        tokens.
        """
        draft, path = proposal.tokens_K.tolist(), verdict.accepted
        tokens = self._until_eos([*(draft[node] for node in path), verdict.next_token])
        if proposal.is_chain:
            self.target.truncate(self.target.length - len(draft) - 1 + len(tokens))
        else:
            tree_lm(self.target).keep([0, *(node + 1 for node in path)][: len(tokens)])
        self.context += tokens
        if len(tokens) <= len(path):
            return len(tokens) - 1, tokens
        return len(path) if verdict.kind == "bonus" else _depth(proposal), tokens

    def book(self, drafted: int, accepted: int, proposal: Proposal, t_verify: float, t_other: float) -> None:
        nodes = len(proposal.tokens_K)
        source = proposal.source if nodes else ""
        record = StepRecord(drafted, accepted, proposal.seconds, t_verify, t_other, nodes, source)
        self.steps.append(record)
        self._newest = perf_counter()

    def stopped(self) -> Stop | None:
        if self.context[-1] in self.eos_ids:
            return "eos"
        if len(self.context) >= self.end:
            return "length"
        return "context" if self.target.length >= self.target.max_length else None

    def result(self) -> Generation:
        tokens, stopped = self.context[len(self.prompt) :], self.stopped()
        assert stopped is not None, "a request that goes on has no result"
        return Generation(tokens, self.steps, self._first - self._start, self._newest - self._first, stopped)

    def _until_eos(self, tokens: list[int]) -> list[int]:
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
        return tokens[:stop]


def drafts(requests: Sequence[Request]) -> list[Proposal]:
    """Proposals of all requests, each cut so that it may be accepted whole and its rows fit into the target's cache."""
    asks = {i: ask for i, request in enumerate(requests) if (ask := request.ask()) is not None}
    proposals = dict(zip(asks, propose_together(list(asks.values())), strict=True))
    return [r.fitted(proposals[i], asks[i][1].k) if i in proposals else NOTHING for i, r in enumerate(requests)]


def check_prompt(prompt: list[int], max_length: int, vocab_size: int) -> None:
    """Refuse what cannot be continued: `RecipeError`."""
    if beyond := [token for token in prompt if not 0 <= token < vocab_size]:
        raise RecipeError(
            f"token {str(beyond[0])[:20]}", f"the model knows {vocab_size}, from 0 on", "send ids of its tokenizer"
        )
    if not prompt:
        raise RecipeError("empty prompt", "generation continues at least one token", "begin with the BOS token")
    if len(prompt) > max_length:
        rule = f"the target's cache holds {max_length}"
        raise RecipeError(f"prompt of {len(prompt)} tokens", rule, "shorten it or raise speculation.max_length")


def tree_lm(lm: LM) -> TreeLM:
    """The same model, if it reads trees; else `RecipeError`."""
    if isinstance(lm, TreeLM):
        return lm
    rule = f"{type(lm).__name__} reads one continuation at a time"
    raise RecipeError("a tree of drafts", rule, "draft chains for it")


def _verdict(proposal: Proposal, path: list[int], token: int) -> Verdict:
    last = path[-1] if path else -1
    return Verdict(tuple(path), token, "recovered" if children(proposal.parents)[last + 1] else "bonus")


def _sampled(proposal: Proposal, p_K1V: Tensor, uniforms_K1: Tensor) -> tuple[list[int], int]:
    tokens_K = proposal.tokens_K.to(p_K1V.device)
    q_KV = None if proposal.probs_KV is None else proposal.probs_KV.to(p_K1V.device)
    if not proposal.is_chain:
        return verify_tree_sampling(tokens_K, proposal.parents, q_KV, p_K1V, uniforms_K1)
    accepted, token = verify_sampling(tokens_K, q_KV, p_K1V, uniforms_K1)
    return list(range(accepted)), token


def _depth(proposal: Proposal) -> int:
    return max(depths(proposal.parents), default=-1) + 1


def _first_nodes(proposal: Proposal, count: int) -> Proposal:
    """A proposal of the first `count` nodes: cut by number, not by what was drawn, so the distribution stays."""
    q_KV, parents_K = proposal.probs_KV, proposal.parents[:count]
    return replace(
        proposal,
        tokens_K=proposal.tokens_K[:count],
        probs_KV=None if q_KV is None else q_KV[:count],
        parents_K=parents_K,
    )


def propose_together(asks: Sequence[tuple[Drafter, Ask]]) -> list[Proposal]:
    """The proposal of each drafter for its ask, as the drafter would make it alone."""
    groups: dict[Hashable, list[int]] = {}
    for i, (drafter, _) in enumerate(asks):
        key = (type(drafter), drafter.group()) if isinstance(drafter, BatchDrafter) else i
        groups.setdefault(key, []).append(i)
    proposals: dict[int, Proposal] = {}
    for members in groups.values():
        proposals |= zip(members, _of_group([asks[i] for i in members]), strict=True)
    return [proposals[i] for i in range(len(asks))]


def _of_group(asks: Sequence[tuple[Drafter, Ask]]) -> list[Proposal]:
    first, ask = asks[0]
    if not isinstance(first, BatchDrafter):
        return [first.propose(*ask)]
    drafters = cast("list[BatchDrafter]", [drafter for drafter, _ in asks])
    return first.propose_many(drafters, [ask for _, ask in asks])
