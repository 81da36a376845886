"""`qspec.json`, beside `config.json`: what a quantized model knows and compressed-tensors has no field for."""

from collections.abc import Mapping
from dataclasses import asdict, replace
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qspec.bridges.quant_config import decode_kv, encode_kv, groups
from qspec.bridges.tensors import rising_ids
from qspec.errors import IntegrityError, SourceError
from qspec.numerics.quantization.clipping import Clip
from qspec.numerics.quantization.formats import FORMATS
from qspec.plain_files import read_json
from qspec.plan import KVPart, KVScheme, LayerScheme, QuantPlan, Rule
from qspec.records import QuantizedModel
from qspec.schema.problems import validate
from qspec.schema.sidecar import NAME as NAME, VERSION, Sidecar


def encode(model: QuantizedModel) -> str:
    """JSON text. Schemes are references to the config groups; one that no layer uses is not kept."""
    by_name = groups(model.plan.resolve(model.arch.linears()))
    by_scheme = {scheme: name for name, (scheme, _) in by_name.items()}
    body = {
        "format_version": VERSION,
        "schemes": {name: _encode_scheme(scheme) for name, (scheme, _) in by_name.items()},
        "default": by_scheme.get(model.plan.default) if model.plan.default else None,
        "rules": [[r.match, by_scheme.get(r.scheme) if r.scheme else None] for r in model.plan.rules],
        "kv": _encode_kv(model.plan.kv),
        "source": dict(model.source),
        "notes": list(model.notes),
    }
    if model.arch.down_hadamard:
        body["down_hadamard"] = True
    if model.head_ids is not None:
        body["head_ids"] = model.head_ids.tolist()
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def read(folder: Path) -> dict[str, Any]:
    """The content of a folder's `qspec.json`; empty for a checkpoint that has none."""
    if not os.path.lexists(folder / NAME):
        return {}
    body = read_json(folder / NAME, IntegrityError, "write the pair again")
    if body.get("format_version") != VERSION:
        raise IntegrityError(NAME, f"is not of format_version {VERSION}", "write the pair again with this qspec")
    validate(Sidecar, body, NAME, SourceError)
    return body


def named(body: Mapping[str, Any], schemes: Mapping[str, LayerScheme]) -> dict[str, LayerScheme]:
    """`schemes` by config group with the names and clips that they were made with."""
    saved = body.get("schemes", {})
    return {group: _named(scheme, saved[group]) if group in saved else scheme for group, scheme in schemes.items()}


def plan(body: Mapping[str, Any], schemes: Mapping[str, LayerScheme], kv: KVScheme | None) -> QuantPlan:
    """The plan as it was; `schemes` by config group, `kv` as `config.json` tells it."""
    rules = tuple(Rule(match, schemes[group] if group else None) for match, group in body["rules"])
    default = schemes[body["default"]] if body["default"] else None
    return QuantPlan(default, rules, _decode_kv(body["kv"]) or kv)


def head_ids(body: Mapping[str, Any], vocab: int) -> Tensor | None:
    """Ids that the head is run for; None: all. Raises `SourceError` for one outside of the vocabulary."""
    ids = body.get("head_ids")
    return rising_ids(torch.tensor(ids), vocab, f"{NAME}: head_ids") if ids else None


def _named(scheme: LayerScheme, saved: Mapping[str, Any]) -> LayerScheme:
    clip = saved.get("weight_clip")
    weight = replace(scheme.weight, clip=Clip(**clip)) if clip else scheme.weight
    return LayerScheme(saved["name"], weight, scheme.activation, saved.get("outliers", 0.0))


def _encode_scheme(scheme: LayerScheme) -> dict[str, Any]:
    clip = {"weight_clip": asdict(scheme.weight.clip)} if scheme.weight.clip != Clip() else {}
    return {"name": scheme.name, **clip, **({"outliers": scheme.outliers} if scheme.outliers else {})}


def _encode_kv(kv: KVScheme | None) -> dict[str, Any] | None:
    """Only what `kv_cache_scheme` cannot say: dynamic scales, ones that were not calibrated, formats of qspec's own."""
    if kv is None or decode_kv(encode_kv(kv)) == kv:
        return None
    body = {"format": kv.fmt.name, "granularity": kv.granularity, "scales": kv.scales}
    parts = {kind: _encode_part(part) for kind, part in (("key", kv.key), ("value", kv.value)) if part is not None}
    plain = {"query": kv.query, "residual": kv.residual, "skip_layers": kv.skip_layers, "cast_layers": kv.cast_layers}
    return body | parts | {name: x for name, x in plain.items() if x}


def _decode_kv(kv: Mapping[str, Any] | None) -> KVScheme | None:
    if kv is None:
        return None
    more: dict[str, Any] = {kind: _decode_part(kv[kind]) for kind in ("key", "value") if kind in kv}
    more |= {name: kv[name] for name in ("query", "residual") if name in kv}
    more |= {name: tuple(kv[name]) for name in ("skip_layers", "cast_layers") if name in kv}
    return KVScheme(FORMATS[kv["format"]], kv["granularity"], kv["scales"], **more)


def _encode_part(part: KVPart) -> dict[str, Any]:
    return asdict(part) | {"fmt": part.fmt.name}


def _decode_part(part: Mapping[str, Any]) -> KVPart:
    return KVPart(**{**part, "fmt": FORMATS[part["fmt"]]})
