"""Measure activation and KV ranges: forward passes only, nothing is changed."""

from collections.abc import Iterable

import torch
from torch import Tensor

from qspec.errors import SourceError
from qspec.nn.decoder import Decoder
from qspec.records import ArchMap, LayerStats, LoadedModel

_SHARED_INPUT = {"q_proj": ("k_proj", "v_proj"), "gate_proj": ("up_proj",)}


def calibrate(
    model: LoadedModel, rows: Iterable[list[int]], keep_rows: int = 128, dtype: torch.dtype = torch.float32
) -> LayerStats:
    """Run `rows` of token ids through the float model and record what every linear layer and KV head saw.

    `keep_rows` input rows per layer are kept, evenly spaced over each text, for searches by output error. Raises
    `SourceError` for a model whose activations are not finite.
    """
    rows = list(rows)
    assert rows, "calibration needs at least one row"
    decoder = Decoder.from_float(model, dtype, max_length=max(map(len, rows)))
    recorder = _Recorder(per_text=-(-keep_rows // len(rows)))
    decoder.observer = recorder
    for row in rows:
        decoder.truncate(0)
        decoder.forward(torch.tensor(row), last=1)
    stats = recorder.stats(model.arch, sum(map(len, rows)))
    _require_finite(stats, str(model.source.get("model", "model")))
    return stats


def _require_finite(stats: LayerStats, model: str) -> None:
    for seen in (stats.amax_K, stats.k_amax_H, stats.v_amax_H):
        for layer, amax in seen.items():
            if not bool(torch.isfinite(amax).all()):
                rule = "computes NaN or infinity, from damaged weights or a damaged config.json"
                raise SourceError(f"{model}: {layer}", rule, "give an intact copy of the model")


class _Recorder:
    """Observer that keeps running maxima and a sample of input rows."""

    def __init__(self, per_text: int) -> None:
        self._per_text = per_text
        self._amax: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        over = (1, 2) if x.dim() == 3 else 0  # K/V [H, T, D] per head, inputs [T, K] per channel
        amax = x.float().abs().amax(over)
        self._amax[name] = torch.maximum(self._amax[name], amax) if name in self._amax else amax
        if x.dim() == 2:
            pick = torch.linspace(0, x.shape[0] - 1, min(self._per_text, x.shape[0])).long()
            self._rows.setdefault(name, []).append(x[pick].float())

    def stats(self, arch: ArchMap, tokens: int) -> LayerStats:
        kv = {
            kind: {
                f"model.layers.{i}.self_attn": self._amax[f"model.layers.{i}.self_attn.{kind}"]
                for i in range(arch.n_layers)
            }
            for kind in "kv"
        }
        inputs = {name: torch.cat(rows) for name, rows in self._rows.items()}
        owner = {name: name for name in inputs}
        for name in inputs:
            prefix, _, part = name.rpartition(".")
            owner.update({f"{prefix}.{twin}": name for twin in _SHARED_INPUT.get(part, ())})
        return LayerStats(
            amax_K={name: self._amax[source] for name, source in owner.items()},
            inputs_TK={name: inputs[source] for name, source in owner.items()},
            k_amax_H=kv["k"],
            v_amax_H=kv["v"],
            tokens=tokens,
        )
