"""The speculative loop: draft, verify all drafts in one target pass, commit what stands, roll the rest back.

After every step the target's cache holds the committed tokens except the newest, which the next pass feeds in front
of its drafts. A step costs one target pass over K + 1 rows and reads one result on the host.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.lm import LM
from qspec.numerics.verify import verify_greedy, verify_sampling
from qspec.spec.draft_length import Heuristic
from qspec.spec.types import (
    Drafter,
    DraftLength,
    Generation,
    Proposal,
    Sampling,
    StepRecord,
    Stop,
    Verdict,
    draw_uniforms,
)

NOTHING = Proposal(torch.empty(0, dtype=torch.long), None)


@torch.no_grad()
def generate(
    target: LM,
    drafter: Drafter | None,
    policy: DraftLength | None,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    eos_ids: Collection[int],
    generator: torch.Generator,
    on_tokens: Callable[[list[int]], None] | None = None,
    domain: str = "",
) -> Generation:
    """Continue `prompt` with exactly the law of `target`; the drafter changes the speed only.

    drafter: None decodes plainly. policy: None is the heuristic from 5. generator: source of all randomness, unused if
    greedy. on_tokens: called with the tokens of each step as they are committed. domain: the request's kind, for
    policies that remember kinds.
    Times are wall-clock: on an asynchronous device a part is charged where the host waits for it.
    Raises `RecipeError` for a prompt that is empty or longer than the target's cache.
    """
    _check_prompt(prompt, target.max_length)
    if max_new_tokens < 1:
        return Generation([])
    policy = policy or Heuristic()
    policy.reset(domain)
    if drafter is not None:
        drafter.reset()
    emit = on_tokens or (lambda _: None)
    start = perf_counter()
    run = _Run(target, sampling, eos_ids, generator, list(prompt), len(prompt) + max_new_tokens)
    emit(run.prefill())
    first = perf_counter()
    steps: list[StepRecord] = []
    while (stopped := run.stopped()) is None:
        begin = perf_counter()
        proposal = run.draft(drafter, min(policy.next(), run.room()), policy)
        drafted, tokens, t_verify = run.step(proposal)
        policy.update(drafted, len(tokens) - 1, proposal.seconds, t_verify)
        emit(tokens)
        t_other = perf_counter() - begin - proposal.seconds - t_verify
        steps.append(StepRecord(drafted, len(tokens) - 1, proposal.seconds, t_verify, t_other))
    return Generation(run.context[len(prompt) :], steps, first - start, perf_counter() - first, stopped)


@dataclass
class _Run:
    """State of one request; `context` is prompt and committed tokens, `end` its greatest length."""

    target: LM
    sampling: Sampling
    eos_ids: Collection[int]
    generator: torch.Generator
    context: list[int]
    end: int

    def prefill(self) -> list[int]:
        """Feed the prompt into an empty cache and commit the first token."""
        self.target.truncate(0)
        logits_1V = self.target.forward(torch.tensor(self.context), last=1)
        return self._commit([self._verify(NOTHING, logits_1V).next_token])

    def draft(self, drafter: Drafter | None, k: int, policy: DraftLength) -> Proposal:
        if drafter is None or k < 1:
            return NOTHING
        proposal = drafter.propose(self.context, k, self.sampling, self.generator, policy.judge())
        assert len(proposal.tokens_K) <= k, "a drafter proposed more than it was asked for"
        return proposal

    def step(self, proposal: Proposal) -> tuple[int, list[int], float]:
        """Verify a proposal: counted draft tokens, committed tokens, seconds of verification."""
        draft, length = proposal.tokens_K.tolist(), self.target.length
        begin = perf_counter()
        verdict = self._verify(proposal, self.target.forward(torch.tensor([self.context[-1], *draft])))
        t_verify = perf_counter() - begin
        tokens = self._until_eos([*draft[: len(verdict.accepted)], verdict.next_token])
        self.target.truncate(length + len(tokens))
        cut = len(tokens) <= len(verdict.accepted)
        return (len(tokens) - 1 if cut else len(draft)), self._commit(tokens), t_verify

    def room(self) -> int:
        """Draft tokens that may all stand without passing the end, and whose rows fit into the cache."""
        return min(self.end - len(self.context), self.target.max_length - self.target.length) - 1

    def stopped(self) -> Stop | None:
        if self.context[-1] in self.eos_ids:
            return "eos"
        if len(self.context) >= self.end:
            return "length"
        return "context" if self.target.length >= self.target.max_length else None

    def _verify(self, proposal: Proposal, logits_K1V: Tensor) -> Verdict:
        tokens_K = proposal.tokens_K.to(logits_K1V.device)
        if self.sampling.greedy:
            accepted, token = verify_greedy(tokens_K, logits_K1V)
        else:
            p_K1V = self.sampling.law(logits_K1V)
            q_KV = None if proposal.probs_KV is None else proposal.probs_KV.to(p_K1V.device)
            uniforms_K1 = draw_uniforms(len(p_K1V), self.generator).to(p_K1V.device)
            accepted, token = verify_sampling(tokens_K, q_KV, p_K1V, uniforms_K1)
        return Verdict(tuple(range(accepted)), token, "bonus" if accepted == len(tokens_K) else "recovered")

    def _until_eos(self, tokens: list[int]) -> list[int]:
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
        return tokens[:stop]

    def _commit(self, tokens: list[int]) -> list[int]:
        self.context += tokens
        return tokens


def _check_prompt(prompt: list[int], max_length: int) -> None:
    if not prompt:
        raise RecipeError("empty prompt", "generation continues at least one token", "begin with the BOS token")
    if len(prompt) > max_length:
        rule = f"the target's cache holds {max_length}"
        raise RecipeError(f"prompt of {len(prompt)} tokens", rule, "shorten it or raise speculation.max_length")
