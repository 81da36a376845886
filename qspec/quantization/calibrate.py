"""Measure activation and KV ranges: forward passes only, nothing is changed."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from qspec.errors import SourceError
from qspec.nn.eager.decoder import Decoder
from qspec.progress import Progress
from qspec.quantization.pieces import embedded, longest, pieces
from qspec.records import ArchMap, LayerStats, LoadedModel

KEEP_ROWS = 128
"""Input rows per layer that are kept."""

_SHARED_INPUT = {"q_proj": ("k_proj", "v_proj"), "gate_proj": ("up_proj",)}


def calibrate(model: LoadedModel, rows: Sequence[list[int]], progress: Progress | None = None) -> LayerStats:
    """Run `rows` of token ids through the float model and record what every linear layer and KV head saw.

    One piece of the model is in memory at a time, and the hidden states of all rows. `KEEP_ROWS` input rows per layer
    are kept, evenly spaced over each text, for searches by output error. Raises `SourceError` for a model whose
    activations are not finite.
    """
    states, seen = embedded(model, rows), list[LayerStats]()
    count = model.arch.n_layers + 1
    for piece in (progress or Progress(quiet=True)).track(pieces(model), "calibrate", count, "layers"):
        stats, states = calibrate_piece(piece, states)
        seen.append(stats)
    return joined(seen)


def random_rows(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` rows of `length` token ids drawn evenly from the vocabulary: other scripts, rare tokens.

    Text in one language leaves directions of the inputs nearly empty that another language fills. SmolLM2-135M, W8A8
    with smoothing and feedback, English calibration, KL in nats/token: Chinese .092 without, .038 with 8 rows beside 32
    of text and `sequential.DAMPING`; WikiText-2 .011 and .013.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(vocab, (count, length), generator=generator, device="cpu").tolist()
    return rows


def calibrate_piece(piece: LoadedModel, states: Sequence[Tensor]) -> tuple[LayerStats, list[Tensor]]:
    """Statistics of one piece over hidden states `[T, hidden]` per row, and the hidden states behind it."""
    assert states, "calibration needs at least one row"
    decoder = Decoder.from_float(piece, max_length=longest(states))
    recorder = decoder.observer = Recorder(per_text=-(-KEEP_ROWS // len(states)))
    after = advanced(decoder, states)
    stats = recorder.stats(piece.arch, sum(x_TK.shape[0] for x_TK in states))
    _require_finite(stats, str(piece.source.get("model", "model")))
    return stats, after


def advanced(decoder: Decoder, states: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states after the layers of a piece, each row by itself; its head reads them too, if it has one.

    They stay in the host's memory: a device holds those of one row.
    """
    after = []
    for x_TK in states:
        decoder.truncate(0)
        y_TK = decoder.run_layers(x_TK.to(decoder.device))
        if decoder.arch.has_head:
            decoder.run_head(y_TK, last=1)
        after.append(y_TK.cpu())
    return after


def joined(parts: Sequence[LayerStats]) -> LayerStats:
    """Statistics of a whole model from those of its pieces."""
    return LayerStats(
        **{
            field: {name: value for part in parts for name, value in getattr(part, field).items()}
            for field in (field.name for field in fields(LayerStats))
            if field != "tokens"
        },
        tokens=parts[0].tokens,
    )


def _require_finite(stats: LayerStats, model: str) -> None:
    for seen in (stats.amax_K, stats.k_amax_H, stats.v_amax_H):
        for layer, amax in seen.items():
            if not bool(torch.isfinite(amax).all()):
                rule = "computes NaN or infinity, from damaged weights or a damaged config.json"
                raise SourceError(f"{model}: {layer}", rule, "give an intact copy of the model")


class Recorder:
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
            kind: {f"{layer}.self_attn": self._amax[f"{layer}.self_attn.{kind}"] for layer in arch.layers}
            for kind in "qkv"
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
            q_amax_H=kv["q"],
        )
