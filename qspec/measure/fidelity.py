"""How close a quantized model's predictions are to the original's, on the same windows of held-out text."""

import math
from pathlib import Path

import torch
from torch import Tensor

from qspec.bridges.text import origin, windows
from qspec.nn.lm import LM
from qspec.numerics.statistics.fidelity import kl_divergence, nll, top1_agreement
from qspec.numerics.statistics.paired import detectable_ratio
from qspec.numerics.statistics.student import mean_interval
from qspec.progress import Progress
from qspec.records import Tokenizer
from qspec.schema.recipe import FidelitySpec
from qspec.schema.results import Fidelity, Measurement, Scalar, Window

CHUNK = 128
"""Positions whose logits are held at once: bounds memory over large vocabularies."""


def measure_fidelity(
    original: LM, quantized: LM, tokenizer: Tokenizer, spec: FidelitySpec, progress: Progress
) -> list[Fidelity]:
    """Perplexity of both arms, KL and top-1 agreement with intervals over windows: of `data`, then of each domain."""
    return [_of_text(name, original, quantized, tokenizer, spec, progress) for name in (spec.data, *spec.domains)]


def _of_text(
    data: str, original: LM, quantized: LM, tokenizer: Tokenizer, spec: FidelitySpec, progress: Progress
) -> Fidelity:
    length = min(spec.length, original.max_length, quantized.max_length)
    rows = windows(data, spec.windows, length, tokenizer)
    means_W4 = torch.stack([_window(original, quantized, row) for row in progress.track(rows, "fidelity", len(rows))])
    condition: dict[str, Scalar] = {
        "data": Path(data).name,
        "source": origin(data),
        "windows": len(rows),
        "window_tokens": length,
        "tokens": len(rows) * (length - 1),
    }
    return summary(means_W4, condition)


@torch.no_grad()
def _window(original: LM, quantized: LM, tokens: list[int]) -> Tensor:
    """Means over a window's predictions: nll of both arms, KL, agreement; float64 `[4]`."""
    for lm in (original, quantized):
        lm.truncate(0)
    parts: list[Tensor] = []
    for start in range(0, len(tokens) - 1, CHUNK):
        end = min(start + CHUNK, len(tokens) - 1)
        inputs_T, targets_T = torch.tensor(tokens[start:end]), torch.tensor(tokens[start + 1 : end + 1])
        p_TV, q_TV = original.forward(inputs_T).cpu(), quantized.forward(inputs_T).cpu()
        same_T = top1_agreement(p_TV, q_TV).double()
        parts.append(torch.stack([nll(p_TV, targets_T), nll(q_TV, targets_T), kl_divergence(p_TV, q_TV), same_T]))
    return torch.cat(parts, 1).mean(1)


def summary(means_W4: Tensor, condition: dict[str, Scalar]) -> Fidelity:
    """From means of windows (nll of both arms, KL, agreement) to measurements."""
    a_W, b_W, kl_W, same_W = means_W4.unbind(1)

    def mean(metric: str, unit: str, values_W: Tensor, low: float = -math.inf, high: float = math.inf) -> Measurement:
        ci, value = mean_interval(values_W.tolist(), low=low, high=high), float(values_W.mean())
        return Measurement(metric=metric, value=value, unit=unit, n=len(values_W), ci=ci, condition=condition)

    def exponential(metric: str, values_W: Tensor, ratio: bool = False) -> Measurement:
        estimate = mean(metric, "", values_W)
        ci = estimate.ci and (_exp(estimate.ci[0]), _exp(estimate.ci[1]))
        detectable = detectable_ratio(values_W.exp().tolist()) if ratio else None
        return estimate.model_copy(update={"value": _exp(estimate.value), "ci": ci, "detectable": detectable})

    return Fidelity(
        original_perplexity=exponential("perplexity, original", a_W),
        quantized_perplexity=exponential("perplexity, quantized", b_W),
        perplexity_ratio=exponential("perplexity, quantized / original", b_W - a_W, ratio=True),
        kl=mean("KL(original || quantized)", "nats/token", kl_W, low=0.0),
        top1_agreement=mean("top-1 agreement", "share of tokens", same_W, high=1.0),
        windows=tuple(Window(**dict(zip(Window.model_fields, row, strict=True))) for row in means_W4.tolist()),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
