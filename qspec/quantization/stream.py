"""Quantize a model piece by piece: memory holds one piece and the hidden states, and a killed run goes on.

Each piece is calibrated, transformed, quantized, refined and kept before the next one is read. Hidden states run twice:
as the float model computes them, for ranges; and through the quantized predecessors, for error feedback.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from qspec.bridges import compressed
from qspec.bridges.tensors import read_tensors, write_index
from qspec.plan import LayerScheme, QuantPlan
from qspec.progress import Progress
from qspec.quantization import choose, gptq as sequential, smooth as transform
from qspec.quantization.calibrate import calibrate_piece
from qspec.quantization.pieces import CPU, Store, at_work, embedded, piece_plan, pieces, placed
from qspec.quantization.rtn import quantize, require_finite, unseen_experts, unseen_notes
from qspec.records import EMBEDDING, LayerStats, LoadedModel, QuantizedModel
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec
from qspec.schemes.build import needs_statistics

FLOAT, QUANTIZED = "float", "quantized"


@dataclass(frozen=True)
class Job:
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
            "qspec": metadata.version("qspec"),
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
    job: Job,
    rows: Callable[[], Sequence[list[int]]],
    store: Store,
    progress: Progress,
) -> QuantizedModel:
    """`model` under the job's plan, written to `store` piece by piece and read back from there as it is needed.

    rows: token ids of the calibration texts, asked for only if something calibrates. A store that holds finished pieces
    is continued.
    """
    schemes, model = job.plan.resolve(model.arch.linears()), placed(model, job.device)
    with at_work(job.device):
        states = _start(model, job, schemes, rows, store)
    todo = list(pieces(model))[len(store.records) :]
    for piece in progress.track(todo, "quantize", len(todo), "layers"):
        with at_work(job.device):
            whole = replace(piece, tensors=dict(piece.tensors))  # read, and rotated, once
            for name, tensor in whole.tensors.items():
                require_finite(name, tensor)
            done = _quantize(whole, job, piece_plan(schemes, job.plan, piece), states)
            stored = dict(compressed.stored_tensors(done.model, job.dtype))
        store.keep(stored, done.record, done.states)
        states = done.states
    return _assemble(model, job, schemes, len(states.get(FLOAT, ())) or len(states.get(QUANTIZED, ())), store)


def _start(
    model: LoadedModel,
    job: Job,
    schemes: Mapping[str, LayerScheme | None],
    rows: Callable[[], Sequence[list[int]]],
    store: Store,
) -> Mapping[str, list[Tensor]]:
    """Hidden states before the first piece that is not done: of each kind that is needed."""
    needed = set(needs_statistics(schemes, job.plan, job.spec))
    if not needed:
        return {}
    kinds = [FLOAT] * bool(needed - {"gptq"}) + [QUANTIZED] * ("gptq" in needed)
    texts = rows()
    if "gptq" in needed:
        sequential.require_judge(texts)
    if store.records:
        return {kind: store.states(kind, len(texts)) for kind in kinds}
    table = {EMBEDDING: model.tensors[EMBEDDING]}  # read once
    require_finite(EMBEDDING, table[EMBEDDING])
    first = embedded(replace(model, tensors=table), texts)
    return dict.fromkeys(kinds, first)


def _quantize(piece: LoadedModel, job: Job, plan: QuantPlan, states: Mapping[str, list[Tensor]]) -> _Done:
    after: dict[str, list[Tensor]] = {}
    stats: LayerStats | None = None
    if FLOAT in states:
        stats, after[FLOAT] = calibrate_piece(piece, states[FLOAT])
    piece, stats, rewrites = transform.transform(piece, stats, job.spec, job.fusion, plan)
    decisions = [] if stats is None else choose.decide(piece, stats, plan, job.spec)
    plan = choose.decided(plan, piece.arch, decisions)
    quantized = quantize(piece, stats, plan, job.fusion.share_scales)
    choices: list[sequential.Choice] = []
    if QUANTIZED in states:
        quantized, choices, after[QUANTIZED] = sequential.refine(piece, quantized, states[QUANTIZED])
    record = {
        "notes": list(quantized.notes),
        "unseen_experts": unseen_experts(piece.arch, quantized.linears, stats),
        "rewrites": asdict(rewrites),
        "decisions": [decision.record() for decision in decisions],
        "choices": [asdict(choice) for choice in choices],
    }
    return _Done(quantized, record, after)


def _assemble(
    model: LoadedModel, job: Job, schemes: Mapping[str, LayerScheme | None], texts: int, store: Store
) -> QuantizedModel:
    """The folder of pieces as a checkpoint, which is then read like any other."""
    rewrites = [transform.Rewrites(**record["rewrites"]) for record in store.records]
    notes = transform.notes(rewrites, job.spec, job.fusion)
    decisions = [choose.Decision.read(record) for piece in store.records for record in piece["decisions"]]
    notes += choose.choice_notes(decisions, job.spec)
    notes += [note for record in store.records for note in record["notes"]]
    unseen = {layer: count for record in store.records for layer, count in record["unseen_experts"].items()}
    notes += unseen_notes(model.arch, unseen)
    choices = [sequential.Choice(**choice) for record in store.records for choice in record["choices"]]
    if choices:
        notes += sequential.notes(choices, texts)
    plan = choose.compact(choose.decided(job.plan, model.arch, decisions), model.arch) if decisions else job.plan
    whole = QuantizedModel(
        model.arch, {}, {}, plan, model.config, model.tokenizer, model.source, notes=(*job.notes, *notes)
    )
    write_index(store.folder, {name: file.name for file in store.tensor_files() for name in read_tensors(file)})
    compressed.write_metadata(whole, store.folder, job.dtype)
    return replace(compressed.read(store.folder), source=model.source, files=model.files)
