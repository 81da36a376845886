"""Do a target and a draft belong together? From configurations and tokenizers alone, before anything is quantized."""

from collections.abc import Iterator
from pathlib import Path

from qspec.errors import PairError
from qspec.models.load import resolve_config, resolve_tokenizer
from qspec.models.vocab import check_tokenizers, differing_parts
from qspec.pair.check import read_manifest
from qspec.planning.forecast import gain
from qspec.planning.planned import PlannedPair, resolve
from qspec.planning.remarks import draft_findings, remarks, speed_findings
from qspec.records import Tokenizer
from qspec.schema.problems import validate
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import Recipe
from qspec.schemes.device_rules import Finding


def compatibility(target: str, draft: str, device: str = "cpu") -> list[Finding]:
    """What `run` would refuse of the two as a pair, what costs acceptance or speed, and what is worth knowing.

    target, draft: as a recipe names models. Raises `SourceError` for one that cannot be read.
    """
    full = {"scheme": "none"}
    fields = {"name": "check", "device": device, "target": {"model": target, "quantization": full}}
    fields["draft"] = {"kind": "model", "model": draft, "quantization": full}
    recipe = validate(Recipe, fields, "check")
    pair = resolve(recipe)
    assert pair.draft is not None
    specs = [ModelSpec(model=name) for name in (target, draft)]
    ours, theirs = (resolve_tokenizer(spec) for spec in specs)
    found = [*_tokenizer_findings(ours, theirs), *draft_findings(pair, pair.draft)]
    types = [str(resolve_config(spec).get("dtype") or "") for spec in specs]
    if types[0] != types[1] and all(types):
        rule = "are stored in different types; each half keeps its own where it is not quantized"
        found.append(Finding("note", f"{types[0]} and {types[1]}", rule, "set dtype in the recipe for one of both"))
    return [*found, *speed_findings(pair), _prediction(pair)]


def on_device(pair: Path, device: str) -> list[Finding]:
    """What a device would refuse of a pair that exists, and its memory, from the shapes and schemes that it has."""
    manifest = read_manifest(pair)
    fields = manifest.recipe | {"device": device}
    for half, folder in (("target", manifest.target.folder), ("draft", manifest.draft.folder)):
        if folder is not None and "model" in fields[half]:
            fields = fields | {half: fields[half] | {"model": str(pair / folder), "revision": None}}
    planned = resolve(validate(Recipe, fields, "check"), made=True)
    limit, length = planned.limit, planned.max_length
    room = [] if limit is None else [_room(planned, planned.capacity(length) or 0, length)]
    return [*remarks(planned), *room]


def _room(planned: PlannedPair, sequences: int, length: int) -> Finding:
    weights, kv = planned.weights_and_kv
    value = f"{weights / 1e9:.2f} GB of weights, both halves, and {kv / 1e6:.3f} MB of KV per token"
    rule = f"leave room for {sequences:,} sequences of {length:,} tokens on {planned.sheet.name}"
    return Finding("note", value, rule, "the server's own buffers and graphs come on top")


def _tokenizer_findings(ours: Tokenizer, theirs: Tokenizer) -> Iterator[Finding]:
    """Ids decide whether they are a pair; whatever else differs costs acceptance, since the target's is used."""
    try:
        check_tokenizers(ours, theirs)
    except PairError as error:
        yield Finding("refused", error.value, error.rule, error.fix)
    for name in differing_parts(ours, theirs):
        if name != "chat template":
            rule = "differ: the draft reads text that is split in other ways than what it has learned from"
            yield Finding("warning", f"{name} of the tokenizers", rule, "expect fewer accepted tokens; measure them")
    templates = ours.parts()["chat template"], theirs.parts()["chat template"]
    if bool(templates[0]) != bool(templates[1]):
        which = "target" if templates[0] else "draft"
        rule = f"only the {which} has one: a base and an instruct model agree on fewer tokens"
        yield Finding("warning", "chat template", rule, "use two base or two instruct models")
    elif templates[0] != templates[1]:
        rule = "differs; requests are written by the target's"
        yield Finding("warning", "chat template", rule, "use a draft that was tuned on the same one")


def _prediction(pair: PlannedPair) -> Finding:
    """What the size ratio allows, unquantized."""
    best = [gain(pair.duo, *pair.gammas, alpha) for alpha in pair.duo.prior.alphas]
    told = ", ".join(f"{g.best_speedup:.2f}x at {g.alpha:g} (draft {g.best_gamma})" for g in best)
    c = pair.duo.cost_ratio()
    rule = f"predict {told} by assumed acceptance, on {pair.sheet.name}, neither of them quantized"
    return Finding("note", f"c = {c:.3f}, {1 / c:.1f} times less to read", rule, "measure it: qspec run")
