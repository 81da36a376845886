"""Do a target and a draft belong together? From configurations and tokenizers alone, before anything is quantized."""

from pathlib import Path

from qspec.bridges.hub import fetch_tokenizer
from qspec.pair.check import read_manifest
from qspec.planning.forecast import gain
from qspec.planning.planned import PlannedPair, resolve
from qspec.planning.remarks import draft_findings, remarks, speed_findings, tokenizer_findings
from qspec.schema.problems import validate
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import PlanFinding


def compatibility(target: str, draft: str, device: str = "cpu") -> list[PlanFinding]:
    """Findings on the two as a pair: refusals of `run`, costs in acceptance or speed, notes.

    target, draft: as a recipe names models. Raises `SourceError` for one that cannot be read.
    """
    full = {"scheme": "none"}
    fields = {"name": "check", "device": device, "target": {"model": target, "quantization": full}}
    fields["draft"] = {"kind": "model", "model": draft, "quantization": full}
    recipe = validate(Recipe, fields, "check")
    pair = resolve(recipe)
    assert pair.draft is not None
    for header in pair.headers.values():
        if header.path is None:
            fetch_tokenizer(header.spec.model, header.spec.revision)
    findings = [*tokenizer_findings(pair), *draft_findings(pair, pair.draft)]
    return [*findings, *speed_findings(pair), _prediction(pair)]


def on_device(pair: Path, device: str) -> list[PlanFinding]:
    """Findings on an existing pair for a device: refusals and memory, from the pair's shapes and schemes."""
    manifest = read_manifest(pair)
    fields = manifest.recipe | {"device": device}
    for half, folder in (("target", manifest.target.folder), ("draft", manifest.draft.folder)):
        if folder is not None and "model" in fields[half]:
            fields = fields | {half: fields[half] | {"model": str(pair / folder), "revision": None}}
    planned = resolve(validate(Recipe, fields, "check"), made=True)
    limit, length = planned.limit, planned.max_length
    room = [] if limit is None else [_room(planned, planned.capacity(length) or 0, length)]
    return [*remarks(planned), *room]


def _room(planned: PlannedPair, sequences: int, length: int) -> PlanFinding:
    weights, kv = planned.weights_and_kv
    value = f"{weights / 1e9:.2f} GB of weights, both halves, and {kv / 1e6:.3f} MB of KV per token"
    rule = f"leave room for {sequences:,} sequences of {length:,} tokens on {planned.sheet.name}"
    return PlanFinding("note", value, rule, "the server's own buffers and graphs come on top")


def _prediction(pair: PlannedPair) -> PlanFinding:
    """The speedups that the size ratio allows, unquantized."""
    best = [gain(pair.duo, *pair.gammas, alpha) for alpha in pair.duo.prior.alphas]
    speedups = ", ".join(f"{g.best_speedup:.2f}x at {g.alpha:g} (draft {g.best_gamma})" for g in best)
    c = pair.duo.cost_ratio()
    rule = f"predict {speedups} by assumed acceptance, on {pair.sheet.name}, neither of them quantized"
    return PlanFinding("note", f"c = {c:.3f}, {1 / c:.1f} times less to read", rule, "measure it: qspec run")
