"""Next-token distributions: from logits and sampling settings to probabilities, and from uniform numbers to tokens.

Shape letters: T positions, K draws, V vocabulary. Settings apply in the common order: temperature, top-k, top-p.
"""

import hashlib

import torch
from torch import Tensor


def target_probs(logits_TV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Distribution of the next token, `[T, V]` in the logits' dtype; temperature 0 is one-hot at the first arg-max.

    `top_k` 0 and `top_p` 1 keep everything. `top_p` keeps the fewest most likely tokens whose mass reaches it.
    """
    if temperature == 0.0:
        best_T1 = logits_TV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_TV).scatter_(-1, best_T1, 1.0)
    # Largest logit 0 first: tiny temperatures then give -inf, never inf - inf, and one that rounds to 0 never 0 / 0.
    divisor = max(temperature, torch.finfo(logits_TV.dtype).tiny)
    scaled_TV = (logits_TV - logits_TV.amax(-1, keepdim=True)) / divisor
    if 0 < top_k < logits_TV.shape[-1]:
        scaled_TV = _keep_top_k(scaled_TV, top_k)
    probs_TV = scaled_TV.softmax(-1)
    return _keep_top_p(probs_TV, top_p) if top_p < 1.0 else probs_TV


def fits_float32(value: float) -> bool:
    """Whether a number is 0, or among the normal numbers of float32: none that becomes 0 or infinity there."""
    limits = torch.finfo(torch.float32)
    return value == 0 or limits.tiny <= abs(value) <= limits.max


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids by inverse CDF, one for every uniform number in [0, 1): `[V]` gives a scalar, `[K, V]` gives `[K]`.

    `probs` need not sum to one. The CDF is float64, so that tails of large vocabularies keep their mass, and a token
    of probability 0 is never drawn.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    mass = uniforms.to(cdf).unsqueeze(-1) * cdf[..., -1:]
    return torch.searchsorted(cdf, mass, right=True).squeeze(-1)


def race(probs_TV: Tensor, arrivals_TV: Tensor) -> Tensor:
    """Token ids `[T]`: the first to arrive where token v takes `arrivals[v] / probs[v]`; it is v with `probs[v]`.

    arrivals: numbers of `exponentials`, above 0. Two distributions that race by the same numbers choose the same token
    with probability (1 - d) / (1 + d) or more, d being their total variation. `probs` need not sum to one. Source:
    arXiv 2408.07978, section 3.
    """
    return (probs_TV / arrivals_TV).argmax(-1)


def exponentials(seed: int, position: int, size: int) -> Tensor:
    """Float64 numbers `[size]` above 0, exponential with mean 1, which the arguments alone determine."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    uniforms = torch.rand(size, dtype=torch.float64, generator=generator)
    return uniforms.neg_().log1p_().neg_().clamp_(min=torch.finfo(torch.float64).tiny)


def _keep_top_k(logits_TV: Tensor, k: int) -> Tensor:
    values_Tk, ids_Tk = logits_TV.topk(k, dim=-1)
    return torch.full_like(logits_TV, -torch.inf).scatter_(-1, ids_Tk, values_Tk)


def _keep_top_p(probs_TV: Tensor, p: float) -> Tensor:
    sorted_TV, ids_TV = probs_TV.sort(stable=True, dim=-1, descending=True)
    mass_before_TV = sorted_TV.cumsum(-1) - sorted_TV
    sorted_TV[..., 1:].masked_fill_(mass_before_TV[..., 1:] >= p, 0.0)  # one stays, however small p is
    kept_TV = torch.zeros_like(probs_TV).scatter_(-1, ids_TV, sorted_TV)
    return kept_TV / kept_TV.sum(-1, keepdim=True)
