"""Fidelity of quantized models on equal terms: the same windows of text for each, differences paired by window.

W windows, T tokens of one, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
import math
from statistics import mean

import torch
from torch import Tensor

from qspec.nn.lm import LM
from qspec.numerics.quantization.clipping import ABSMAX
from qspec.numerics.statistics.fidelity import kl_divergence, nll, top1_agreement
from qspec.numerics.statistics.paired import shown_sign
from qspec.numerics.statistics.student import mean_interval
from qspec.plan import KVScheme, LayerScheme, QuantPlan
from qspec.records import ArchMap

METRICS = ("kl", "top1", "nll")
Windows = dict[str, list[float]]
"""Means over the tokens of every window, by metric."""


def reference(lm: LM, window: Sequence[int]) -> Tensor:
    """Logits `[T - 1, V]` that predict the window's tokens, the largest of each moved to 0, in float16.

    KL does not see a shift; at 0 float16 is finest, so what is stored is near-exact where probability is.
    """
    logits_TV = _predictions(lm, window)
    return (logits_TV - logits_TV.amax(-1, keepdim=True)).half()


def measure(lm: LM, windows: Sequence[Sequence[int]], references: Iterable[Tensor]) -> Windows:
    """KL from the reference (nats), top-1 agreement with it, and own negative log-likelihood of every window."""
    means: Windows = {metric: [] for metric in METRICS}
    for window, p_TV in zip(windows, references, strict=True):
        q_TV = _predictions(lm, window)
        p_TV, targets_T = p_TV.float(), torch.tensor(window[1:])
        of_tokens = (kl_divergence(p_TV, q_TV), top1_agreement(p_TV, q_TV), nll(q_TV, targets_T))
        for metric, values_T in zip(METRICS, of_tokens, strict=True):
            means[metric].append(float(values_T.double().mean()))
    return means


def _predictions(lm: LM, window: Sequence[int]) -> Tensor:
    lm.truncate(0)
    return lm.forward(torch.tensor(window[:-1])).cpu()


def summary(means: Windows) -> dict[str, float | list[float]]:
    """Means over windows with their intervals; perplexity is `exp` of the mean negative log-likelihood."""
    kl, top1, loss = (means[metric] for metric in METRICS)
    return {
        "kl": mean(kl),
        "ci": list(_interval(kl, 0.0)),
        "top1": mean(top1),
        "top1_ci": list(_interval(top1, 0.0, 1.0)),
        "ppl": math.exp(mean(loss)),
        "ppl_ci": [math.exp(bound) for bound in _interval(loss, 0.0)],
        "n": len(kl),
    }


def _interval(values: Sequence[float], low: float, high: float = math.inf) -> tuple[float, float]:
    """Student's t over windows, which are few; a single one knows no more than its limits."""
    return mean_interval(values, low=low, high=high) or (low, high)


@dataclass(frozen=True)
class Difference:
    """KL of the second arm minus the first on the same windows, nats; `sign` is 0 where the interval holds 0."""

    mean: float
    ci: tuple[float, float]
    sign: int


def difference(a: Windows, b: Windows) -> Difference:
    """How much more KL `b` has than `a`, paired by window."""
    by_window = torch.tensor(b["kl"], dtype=torch.float64) - torch.tensor(a["kl"], dtype=torch.float64)
    ci = mean_interval(by_window.tolist()) or (-math.inf, math.inf)
    return Difference(float(by_window.mean()), ci, shown_sign(ci, None))


def best(arms: Mapping[str, Windows]) -> str | None:
    """The arm of least mean KL, the first of equals; None without arms."""
    return min(arms, key=lambda arm: sum(arms[arm]["kl"]), default=None)


def verdict(ours: Mapping[str, Windows], peers: Mapping[str, Windows]) -> str:
    """One line: the best of ours, the best peer, the paired difference and whether it is shown.

    Every other window chooses the best of each side, the others judge them: on the windows that chose them both sides
    would flatter themselves, the one with more arms the more. KL is that of all windows.
    """
    sides = {"qspec": ours, "llmcompressor": peers}
    chosen = {side: best({arm: _part(windows, 0) for arm, windows in arms.items()}) for side, arms in sides.items()}
    named = " | ".join(_arm(side, chosen[side], arms) for side, arms in sides.items())
    mine, theirs = chosen.values()
    if mine is None or theirs is None:
        return f"{named} | no contest"
    gained = difference(_part(ours[mine], 1), _part(peers[theirs], 1))
    outcome = {1: "qspec wins", -1: "llmcompressor wins", 0: "no difference detected"}[gained.sign]
    gap = f"{gained.mean:+.5f} [{gained.ci[0]:+.5f}, {gained.ci[1]:+.5f}]"
    return f"{named} | {gap} | {outcome}"


def _part(windows: Windows, first: int) -> Windows:
    """Every other window from the first or the second on; all of a single one."""
    return {metric: values[first::2] if len(values) > 1 else values for metric, values in windows.items()}


def _arm(engine: str, name: str | None, arms: Mapping[str, Windows]) -> str:
    if name is None:
        return f"{engine}: none"
    values, (lo, hi) = arms[name]["kl"], _interval(arms[name]["kl"], 0.0)
    return f"{engine} {name} {mean(values):.5f} [{lo:.5f}, {hi:.5f}]"


def exported_format(plan: QuantPlan, arch: ArchMap) -> tuple[dict[str, LayerScheme | None], KVScheme | None]:
    """What two checkpoints must share to be compared: schemes by layer and KV format, without how ranges were found."""
    schemes = {layer: scheme and _without_clip(scheme) for layer, scheme in plan.resolve(arch.linears()).items()}
    kv = plan.kv and replace(plan.kv, scales="calibrated")
    return schemes, kv


def _without_clip(scheme: LayerScheme) -> LayerScheme:
    return replace(scheme, weight=replace(scheme.weight, clip=ABSMAX))
