"""Quantize a model piece by piece: memory holds one piece and the hidden states, and a killed run goes on.

Each piece is calibrated, transformed, quantized, refined and kept before the next one is read. Hidden states run twice:
as the float model computes them, for ranges; and through the quantized predecessors, for error feedback.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.tensors import read_tensors, write_index, write_tensors
from qspec.kept import Entry, Kept
from qspec.plan import LayerScheme, QuantPlan
from qspec.progress import Progress
from qspec.provenance import staged_dir
from qspec.quantization import gptq as sequential, smooth as transform
from qspec.quantization.calibrate import calibrate_piece
from qspec.quantization.pieces import CPU, at_work, embedded, piece_plan, pieces, placed
from qspec.quantization.rtn import quantize, require_finite, unseen_experts, unseen_notes
from qspec.records import EMBEDDING, LayerStats, LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec
from qspec.schemes.build import needs_statistics

FLOAT, QUANTIZED = "float", "quantized"
_TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class StreamJob:
    """How every piece is treated, and where (`pieces.placed`).

    dtype: of what is not quantized, as stored; notes: on what was done before.
    """

    spec: QuantSpec
    fusion: FusionSpec
    plan: QuantPlan
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    device: torch.device = CPU

    def key(self, model: LoadedModel, calibration: CalibrationSpec, seed: int) -> dict[str, Any]:
        """All that the bytes of a quantized piece depend on."""
        return {
            "source": dict(model.source),
            "spec": self.spec.model_dump(mode="json"),
            "fusion": self.fusion.model_dump(mode="json"),
            "plan": repr(self.plan),
            "dtype": str(self.dtype),
            "layers": model.arch.layers,
            "calibration": calibration.model_dump(mode="json"),
            "seed": seed,
            "device": self.device.type,
        }


@dataclass(frozen=True)
class _Done:
    """A finished piece, what to remember of it, and the hidden states after it."""

    model: QuantizedModel
    record: Mapping[str, Any]
    states: Mapping[str, list[Tensor]]


def stream(
    model: LoadedModel,
    job: StreamJob,
    rows: Callable[[], Sequence[list[int]]],
    key: Mapping[str, Any],
    work: Path,
    progress: Progress,
) -> QuantizedModel:
    """`model` under the job's plan, kept in `work` piece by piece and read back from there as it is needed.

    rows: token ids of the calibration texts, asked for only if something calibrates. key: `StreamJob.key`; pieces that
    were finished under it are not done again.
    """
    kept, schemes, model = Kept(work), job.plan.resolve(model.arch.linears()), placed(model, job.device)
    done = list(_finished(kept, key))
    with at_work(job.device):
        states, begun = _start(model, job, schemes, rows, kept.find("states", key), len(done))
    done = done[:begun]
    todo = list(pieces(model))[begun:]
    for piece in progress.track(todo, "quantize", len(todo), "layers"):
        with at_work(job.device):
            whole = replace(piece, tensors=dict(piece.tensors))  # read, and rotated, once
            for name, tensor in whole.tensors.items():
                require_finite(name, tensor)
            made = _quantize(whole, job, piece_plan(schemes, job.plan, piece), states)
            stored = dict(compressed.stored_tensors(made.model, job.dtype))
        done.append(kept.keep(f"{len(done):05d}", key, partial(_write_piece, stored, made.record)))
        states = made.states
        if states:
            kept.keep("states", key, partial(_write_states, states, len(done)))
    return _assemble(model, job, schemes, len(next(iter(states.values()), ())), done, work / "whole")


def _finished(kept: Kept, key: Mapping[str, Any]) -> Iterator[Entry]:
    """The pieces that are whole, up to the first that is not."""
    for number in count():
        if (piece := kept.find(f"{number:05d}", key)) is None:
            return
        yield piece


def _write_piece(tensors: Mapping[str, Tensor], record: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    write_tensors(folder / _TENSORS, tensors)
    return record


def _write_states(states: Mapping[str, Sequence[Tensor]], behind: int, folder: Path) -> int:
    """Hidden states behind so many pieces, in the place of earlier ones."""
    flat = {f"{kind}.{row}": x_TK for kind, rows in states.items() for row, x_TK in enumerate(rows)}
    write_tensors(folder / _TENSORS, flat)
    return behind


def _start(
    model: LoadedModel,
    job: StreamJob,
    schemes: Mapping[str, LayerScheme | None],
    rows: Callable[[], Sequence[list[int]]],
    states: Entry | None,
    finished: int,
) -> tuple[Mapping[str, list[Tensor]], int]:
    """Hidden states of each kind that is needed before the first piece that is to be done, and its number."""
    needed = set(needs_statistics(schemes, job.plan, job.spec))
    if not needed:
        return {}, finished
    kinds = [FLOAT] * bool(needed - {"gptq"}) + [QUANTIZED] * ("gptq" in needed)
    texts = rows()
    if "gptq" in needed:
        sequential.require_judge(texts)
    if states is not None and states.value <= finished:
        stored = read_tensors(states.folder / _TENSORS)
        read = {kind: [stored[f"{kind}.{row}"].clone() for row in range(len(texts))] for kind in kinds}
        return read, states.value
    table = {EMBEDDING: model.tensors[EMBEDDING]}  # read once
    require_finite(EMBEDDING, table[EMBEDDING])
    return dict.fromkeys(kinds, embedded(replace(model, tensors=table), texts)), 0


def _quantize(piece: LoadedModel, job: StreamJob, plan: QuantPlan, states: Mapping[str, list[Tensor]]) -> _Done:
    after: dict[str, list[Tensor]] = {}
    stats: LayerStats | None = None
    if FLOAT in states:
        stats, after[FLOAT] = calibrate_piece(piece, states[FLOAT])
    piece, stats, rewrites = transform.transform(piece, stats, job.spec, job.fusion, plan)
    quantized = quantize(piece, stats, plan, job.fusion.share_scales)
    choices: list[sequential.Choice] = []
    if QUANTIZED in states:
        quantized, choices, after[QUANTIZED] = sequential.refine(piece, quantized, states[QUANTIZED])
    record = {
        "notes": list(quantized.notes),
        "unseen_experts": unseen_experts(piece.arch, quantized.linears, stats),
        "rewrites": asdict(rewrites),
        "choices": [asdict(choice) for choice in choices],
    }
    return _Done(quantized, record, after)


def _assemble(
    model: LoadedModel,
    job: StreamJob,
    schemes: Mapping[str, LayerScheme | None],
    texts: int,
    done: Sequence[Entry],
    out: Path,
) -> QuantizedModel:
    """The pieces as the checkpoint `out`, of links to their files, which is then read like any other."""
    records = [piece.value for piece in done]
    rewrites = [transform.Rewrites(**record["rewrites"]) for record in records]
    notes = transform.notes(rewrites, job.spec, job.fusion)
    notes += [note for record in records for note in record["notes"]]
    unseen = {layer: count for record in records for layer, count in record["unseen_experts"].items()}
    notes += unseen_notes(model.arch, unseen)
    choices = [sequential.Choice(**choice) for record in records for choice in record["choices"]]
    if choices:
        notes += sequential.notes(choices, texts)
    whole = QuantizedModel(
        model.arch, {}, {}, job.plan, model.config, model.tokenizer, model.source, notes=(*job.notes, *notes)
    )
    with staged_dir(out) as part:
        where: dict[str, str] = {}
        for number, piece in enumerate(done):
            shard = part / f"{number:05d}.safetensors"
            shard.symlink_to((piece.folder / _TENSORS).resolve())
            where |= dict.fromkeys(read_tensors(shard), shard.name)
        write_index(part, where)
        compressed.write_metadata(whole, part, job.dtype)
    return replace(compressed.read(out), source=model.source, files=model.files)
