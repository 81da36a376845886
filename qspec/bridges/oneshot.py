"""llm-compressor: GPTQ, SmoothQuant, AWQ and AutoRound, run on a saved copy of the model and read back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
import logging
from pathlib import Path
import shutil
from typing import Any
import warnings

import torch
from torch.utils.data import DataLoader

from qspec.bridges import compressed, quant_config
from qspec.bridges.layout import stored_schemes
from qspec.errors import RecipeError
from qspec.numerics.quantization.blocks import PerGroup
from qspec.plan import KVScheme, LayerScheme, QuantPlan
from qspec.records import ArchMap, LoadedModel, QLinear, QuantizedModel
from qspec.schema.quantization import QuantSpec

SMOOTHING_STRENGTH = 0.8
AUTOROUND_STEPS = 200

Resolved = Mapping[str, LayerScheme | None]


def quantize(
    model: LoadedModel, spec: QuantSpec, plan: QuantPlan, rows: list[list[int]], workdir: Path
) -> QuantizedModel:
    """Quantize with `spec.method` on calibration `rows` (token ids), one text at a time.

    `workdir` receives the float copy and llm-compressor's checkpoint; both are removed again. Raises `RecipeError`
    for what the library refuses only after it has loaded the model.
    """
    resolved = plan.resolve(model.arch.linears())
    refuse(model.arch, spec, plan, rows)
    source, result = workdir / "float", workdir / "quantized"
    try:
        compressed.write_float(replace(model, files={}), source, torch.float32)  # it refuses some sampling defaults
        _run(source, result, spec.method, _settings(stored_schemes(model.arch, resolved), plan), rows)
        read = compressed.read(result)
    finally:
        for folder in (source, result):
            shutil.rmtree(folder, ignore_errors=True)
    note = f"Quantized by llm-compressor, method {spec.method}, on {len(rows)} texts ({sum(map(len, rows))} tokens)."
    return replace(
        read,
        arch=model.arch,
        linears={layer: _as_planned(linear, resolved[layer]) for layer, linear in read.linears.items()},
        plan=plan,
        config=model.config,
        tokenizer=model.tokenizer,
        source=model.source,
        notes=(note,),
        files=model.files,
    )


def refuse(arch: ArchMap, spec: QuantSpec, plan: QuantPlan, rows: list[list[int]]) -> None:
    """Raise `RecipeError` for what llm-compressor cannot do; needs no weights and loads no library."""
    resolved = plan.resolve(arch.linears())
    schemes = {layer: scheme for layer, scheme in resolved.items() if scheme is not None}
    compressed.refuse_tied_head(arch, schemes)
    if arch.n_experts:
        raise RecipeError(
            f"engine llmcompressor with {arch.model_type}",
            "experts are quantized here only by qspec",
            "use engine: qspec",
        )
    if spec.method == "autoround" and "lm_head" in schemes:
        raise RecipeError("lm_head", "is outside the blocks that autoround tunes", "add lm_head to ignore")
    _refuse_kv(plan.kv)
    static = any(s.activation and not s.activation.dynamic for s in schemes.values())
    if not rows and (spec.method != "rtn" or static or quant_config.encode_kv(plan.kv)):
        raise RecipeError(f"method {spec.method}", "needs calibration data", "give calibration rows")
    for layer, scheme in schemes.items():
        _refuse_layer(layer, scheme, arch.linear_shape(layer)[1], spec.method)


def _refuse_kv(kv: KVScheme | None) -> None:
    """Stored scales are the library's to calibrate, in every layer; those made at run time are none of its business."""
    if kv is None or not (kv.stored or kv.query or kv.skip_layers):
        return
    if kv.stored and kv.scales != "calibrated":
        raise RecipeError(
            f"kv scales: {kv.scales}", "llm-compressor always calibrates", "use scales: calibrated, or engine: qspec"
        )
    if not kv.declared or kv.query or kv.skip_layers:
        raise RecipeError(
            "kv", "llm-compressor stores one FP8 E4M3 scheme for all keys and values", "use engine: qspec"
        )


def _refuse_layer(layer: str, scheme: LayerScheme, width: int, method: str) -> None:
    size = scheme.weight.granularity.size if isinstance(scheme.weight.granularity, PerGroup) else width
    if width % size:
        raise RecipeError(f"group_size {size}", f"does not divide the width {width} of {layer}", "use a divisor of it")
    if scheme.weight.clip.method == "percentile":
        raise RecipeError("clip: percentile", "llm-compressor has no such observer", "use mse, or engine: qspec")
    if method == "autoround" and scheme.weight.fmt.bits != 4:
        raise RecipeError(f"autoround with {scheme.name}", "is for 4-bit weights here", "use scheme: W4A16")


def _settings(stored: Resolved, plan: QuantPlan) -> dict[str, Any]:
    """Arguments of every quantizing modifier, by names on disk; dynamic KV scales are no business of the library."""
    config = quant_config.encode(stored, plan.kv, version="")
    if config is None:
        raise RecipeError("scheme none", "leaves nothing to quantize", "use engine: qspec, or another scheme")
    kv = config["kv_cache_scheme"]
    settings = {"config_groups": config["config_groups"], "ignore": config["ignore"]}
    return settings if kv is None else settings | {"kv_cache_scheme": kv | {"observer": "static_minmax"}}


def _modifiers(method: str, settings: dict[str, Any]) -> list[Any]:
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    match method:
        case "rtn":
            return [QuantizationModifier(**settings)]
        case "gptq":
            return [GPTQModifier(**settings)]
        case "smoothquant+gptq":
            return [SmoothQuantModifier(smoothing_strength=SMOOTHING_STRENGTH), GPTQModifier(**settings)]
        case "awq":
            return [AWQModifier(), QuantizationModifier(**settings)]
        case "autoround":
            return [AutoRoundModifier(iters=AUTOROUND_STEPS, enable_torch_compile=False, batch_size=1, **settings)]
    raise AssertionError(f"method {method}")


def _run(source: Path, result: Path, method: str, settings: dict[str, Any], rows: list[list[int]]) -> None:
    samples: Any = [_sample(row) for row in rows]
    with _quiet(), _no_pinning_without_accelerator():
        from llmcompressor.entrypoints.oneshot import oneshot

        oneshot(
            model=str(source),
            tokenizer=str(source),
            dataset=DataLoader(samples, batch_size=None) if rows else None,
            recipe=_modifiers(method, settings),
            output_dir=str(result),
            num_calibration_samples=len(rows),
            max_seq_length=max(map(len, rows), default=1),
            clear_sparse_session=True,
        )


def _sample(row: list[int]) -> dict[str, torch.Tensor]:
    """One text as a batch of one: nothing is padded or cut."""
    ids = torch.tensor([row])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _as_planned(linear: QLinear, scheme: LayerScheme | None) -> QLinear:
    """A layer that was read back, under the scheme it was made for (a checkpoint does not tell names and clips)."""
    assert scheme is not None
    compressed.lint_scale("weight_scale", linear.weight.scale)
    assert (linear.weight.fmt, linear.weight.granularity) == (scheme.weight.fmt, scheme.weight.granularity)
    return replace(linear, activation=scheme.activation)


@contextmanager
def _no_pinning_without_accelerator() -> Iterator[None]:
    """AWQ pins its cache for a copy to an accelerator, and fails where there is none: there it skips the pinning."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    cache: Any = IntermediatesCache
    original = cache.pin_memory
    if not torch.accelerator.is_available():
        cache.pin_memory = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        cache.pin_memory = original


@contextmanager
def _quiet() -> Iterator[None]:
    """Errors and progress only: the libraries print every layer and step, and warn about how they save."""
    from llmcompressor.logger import LoggerConfig, configure_logger

    configure_logger(LoggerConfig(console_log_level="ERROR"))
    autoround = logging.getLogger("autoround")
    level = autoround.level
    autoround.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        autoround.setLevel(level)
