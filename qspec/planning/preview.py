"""`qspec plan`: everything about a job that follows from the recipe and the shapes alone. No weights, no compute."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from qspec.numerics.quantization.blocks import granularity_name
from qspec.numerics.roofline import bytes_moved, pass_seconds, ridge_rows
from qspec.pair.exports import exports, transformers_snippet, vllm_command
from qspec.plan import KVPart, KVScheme, TensorScheme
from qspec.planning import tune_space
from qspec.planning.duration import basis
from qspec.planning.forecast import BASELINE, CONTEXT, gain
from qspec.planning.planned import PlannedHalf, PlannedPair, resolve
from qspec.planning.remarks import findings, time_findings
from qspec.quantization.units import candidate_schemes
from qspec.schema.quantization import QuantSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.build import scheme_label
from qspec.schemes.device_rules import raise_refused
from qspec.schemes.footprint import Footprint


def admit(recipe: Recipe) -> PlannedPair:
    """The resolved pair, if it can be made; raises all refusals as one error otherwise. Called before any compute."""
    pair = resolve(recipe)
    raise_refused(findings(pair))
    return pair


def preview(recipe: Recipe) -> dict[str, Any]:
    """All that `qspec plan` shows, as plain data."""
    pair = resolve(recipe)
    return {
        "name": recipe.name,
        "description": recipe.description,
        "device": {**pair.sheet.model_dump(), "compute_dtype": pair.dtype},
        "target": _half_view(pair.target),
        "draft": _draft_view(pair),
        "memory": _memory(pair),
        "speed": _speed(pair),
        "time": _time(pair),
        "exports": [served.model_dump() for served in exports(recipe, pair.sheet, pair.target.arch)],
        "commands": {
            "vllm": vllm_command(recipe, float32=pair.target.stored == torch.float32.itemsize),
            "transformers": transformers_snippet(recipe, pair.sheet.capability),
        },
        "findings": [asdict(finding) for finding in (*findings(pair), *time_findings(pair))],
        "tune": None if recipe.tune is None else tune_space.as_data(tune_space.space_of(recipe)),
        "recipe": pair.recipe.as_dict(),
    }


def _half_view(half: PlannedHalf) -> dict[str, Any]:
    return {
        "model": half.model,
        "model_type": half.arch.model_type,
        "decoder_layers": half.arch.n_layers,
        "parameters": half.bytes.parameters,
        "engine": half.spec.engine,
        "method": half.spec.method,
        "linears": [_group_view(half, label, group.layers) for label, group in half.bytes.groups.items()],
        "mixed": _mixed_view(half.spec),
        "kv": _kv_text(half.plan.kv),
        "calibrated_for": half.reasons,
    }


def _mixed_view(spec: QuantSpec) -> dict[str, Any] | None:
    """The problem that mixed precision will solve; None where the recipe names every layer's scheme."""
    if spec.mixed is None:
        return None
    return {**spec.mixed.model_dump(mode="json"), "labels": list(map(scheme_label, candidate_schemes(spec).values()))}


def _draft_view(pair: PlannedPair) -> dict[str, Any]:
    kind = {"kind": pair.recipe.draft.kind}
    if pair.draft is not None:
        return kind | _half_view(pair.draft)
    if pair.head is not None and (source := pair.recipe.draft.source) is not None:
        return kind | {"model": source.model, "parameters": pair.head.parameters}
    return kind


def _group_view(half: PlannedHalf, label: str, layers: tuple[str, ...]) -> dict[str, Any]:
    scheme = half.schemes[layers[0]]
    return {
        "layers": len(layers),
        "scheme": label,
        "bits": half.bytes.groups[label].bits,
        "weights": _tensor_text(scheme.weight) if scheme else None,
        "activations": _tensor_text(scheme.activation) if scheme and scheme.activation else None,
        "parts": dict(Counter(layer.rpartition(".")[2] for layer in layers)),
    }


def _tensor_text(scheme: TensorScheme) -> str:
    return f"{scheme.fmt.name} per {granularity_name(scheme.granularity)}{', at run time' if scheme.dynamic else ''}"


def _kv_text(kv: KVScheme | None) -> str:
    if kv is None:
        return "not quantized"
    key, value = (_kv_part_text(part, kv.scales) for part in kv.parts)
    if kv.granularities:
        key = value = f"{kv.fmt.name}, a scale per layer, head, or token and head, by measured KL"
    more = {
        f"newest {kv.residual} tokens in float": kv.residual,
        f"queries rounded, a scale per {'layer' if kv.query == 'tensor' else 'head'}": kv.query,
        "layers of large measured error in float": kv.skip_layers == "auto",
        f"layers {', '.join(map(str, kv.skip_layers))} in float": kv.skip_layers and kv.skip_layers != "auto",
    }
    text = key if key == value else f"keys {key}; values {value}"
    return "; ".join([text, *(text_of for text_of, wanted in more.items() if wanted)])


def _kv_part_text(part: KVPart, scales: str) -> str:
    name = part.fmt.name + (f" with {part.outliers:g}% outliers" if part.outliers else "")
    if part.granularity == "token_head":
        return f"{name}, a scale per token and head, at run time"
    if part.granularity == "channel":
        return f"{name}, a scale per channel and {part.group} tokens, at run time"
    measured, cast = "measured on calibration text", "1.0 (cast)"
    origin = {"calibrated": measured, "cast": cast, "auto": f"{measured} or {cast} by measured KL"}[scales]
    return f"{name}, a scale per {'layer' if part.granularity == 'tensor' else 'head'}, {origin}"


def _memory(pair: PlannedPair) -> dict[str, Any]:
    halves = {"target": pair.target.bytes, "draft": pair.drafting}
    views = {name: _bytes_view(half, pair.max_length) for name, half in halves.items() if half is not None}
    total = sum(view["weights"] + view["kv_at_max_length"] for view in views.values())
    return {
        **views,
        "max_length": pair.max_length,
        "total": total,
        "limit": pair.limit,
        "unquantized_target": pair.target.plain.resident,
        "sequences_at_max_length": pair.capacity(pair.max_length),
        "run_peak": pair.run_need.held,
    }


def _bytes_view(half: Footprint, max_length: int) -> dict[str, Any]:
    return {
        "linears": {label: group.bytes for label, group in half.groups.items()},
        "embeddings": half.embedding_bytes,
        "norms_and_biases": half.other_bytes,
        "weights": half.resident,
        "read_per_step": half.cost.weight_bytes,
        "kv_per_token": half.kv_bytes_per_token,
        "kv_at_max_length": half.kv_bytes_per_token * max_length,
    }


def _speed(pair: PlannedPair) -> dict[str, Any]:
    duo = pair.duo
    at = duo.target_rates
    return {
        "basis": _speed_basis(pair),
        "cost_ratio_c": duo.cost_ratio(),
        "prior": asdict(duo.prior),
        "quantization_alone": _quantization_gain(pair),
        "speculation": [asdict(gain(duo, *pair.gammas, alpha)) for alpha in duo.prior.alphas],
        "target_step_ms": at and 1e3 * pass_seconds(duo.target, at, 1, CONTEXT, 1),
        "largest_batch": duo.max_batch,
        "free_rows": at and int(ridge_rows(duo.target, at)),
        "prompt_floor_s": pair.prompt_floor,
    }


def _speed_basis(pair: PlannedPair) -> str:
    if pair.duo.target_rates is None:
        return f"c is a ratio of bytes read per step, verified rows cost as in {BASELINE}; `run` measures both"
    return f"floors from bytes and operations on the data sheet, context {CONTEXT}, no launch overhead: an upper bound"


def _quantization_gain(pair: PlannedPair) -> float:
    """Plain decoding at batch 1: time of the original target over that of the quantized one, from bytes."""
    before, after = (bytes_moved(half.cost, 1, CONTEXT) for half in (pair.target.plain, pair.target.bytes))
    return before / after


def _time(pair: PlannedPair) -> dict[str, Any]:
    stages = pair.steps()
    return {
        "basis": basis(pair.recipe),
        "stages": [asdict(step) for step in stages],
        "minutes": sum(step.seconds for step in stages) / 60,
    }
