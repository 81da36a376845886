"""The speculative loop: draft, verify all drafts in one target pass, commit the accepted ones, roll the rest back.

A step costs one target pass over K + 1 rows, K drafts in a chain or a tree; of a chain it reads one result on the host.
`batch` does the same for several requests. Requests that `device` takes, here and there, run on a GPU without the host.
"""

from collections.abc import Callable, Collection
from time import perf_counter

import torch

from qspec.nn.lm import LM, GreedyLM, torch_beside
from qspec.speculation.device import on_device
from qspec.speculation.length.policies import Heuristic
from qspec.speculation.request import GenerationRequest, Request, check_prompt, drafts, tree_lm
from qspec.speculation.types import Drafter, DraftLength, Generation, Proposal, Randomness, Sampling, Verdict


@torch.no_grad()
def generate(
    target: LM,
    drafter: Drafter | None,
    policy: DraftLength | None,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    eos_ids: Collection[int],
    generator: Randomness,
    on_tokens: Callable[[list[int]], None] | None = None,
    domain: str = "",
) -> Generation:
    """Continue `prompt` with exactly the distribution of `target`; the drafter changes the speed only.

    drafter: None decodes plainly. policy: None is the heuristic from 5. generator: source of all randomness, unused if
    greedy. on_tokens: called with the tokens of each step as they are committed. domain: the request's kind, for
    policies that remember kinds.
    Times are wall-clock: on an asynchronous device a part is charged where the host waits for it.
    Raises `RecipeError` for a prompt that is empty or longer than the target's cache, and for trees of drafts that the
    target cannot read.
    """
    check_prompt(prompt, target.max_length, target.vocab_size)
    if max_new_tokens < 1:
        return Generation([])
    emit = on_tokens or (lambda _: None)
    whole = GenerationRequest(prompt, max_new_tokens, generator, drafter, policy, domain)
    generations = on_device(target, [whole], sampling, eos_ids, on_tokens=lambda _, tokens: emit(tokens), fork=False)
    if generations is not None:
        return generations[0]
    policy = policy or Heuristic()
    request = Request(target, drafter, policy, prompt, len(prompt) + max_new_tokens, sampling, eos_ids, generator)
    likeliest = target if sampling.greedy and isinstance(target, GreedyLM) else None
    with torch_beside(target):
        emit(request.prefill(domain))
        while request.stopped() is None:
            _step(request, likeliest, emit)
    return request.result()


def _step(request: Request, likeliest: GreedyLM | None, emit: Callable[[list[int]], None]) -> None:
    begin = perf_counter()
    (proposal,) = drafts([request])
    fed = perf_counter()
    verdict = _verify(request, proposal, likeliest)
    t_verify = perf_counter() - fed
    drafted, tokens = request.commit(proposal, verdict)
    request.policy.update(drafted, len(tokens) - 1, proposal.seconds, t_verify)
    emit(tokens)
    t_other = perf_counter() - begin - proposal.seconds - t_verify
    request.book(drafted, len(tokens) - 1, proposal, t_verify, t_other)


def _verify(request: Request, proposal: Proposal, likeliest: GreedyLM | None) -> Verdict:
    tokens_T, parents_T = request.rows(proposal)
    if likeliest is not None and parents_T is None:
        return request.verify_best(proposal, likeliest.greedy(tokens_T))
    if likeliest is not None:
        return request.verify_best(proposal, likeliest.greedy_many([likeliest], [tokens_T], [parents_T])[0])
    if parents_T is not None:
        return request.verify(proposal, tree_lm(request.target).forward_tree(tokens_T, parents_T))
    return request.verify(proposal, request.target.forward(tokens_T))
