"""The text of `qspec plan`, from the data of `preview`."""

from collections.abc import Iterator, Mapping
from typing import Any

from qspec.memory import tightest
from qspec.readable import duration, size

View = Mapping[str, Any]
NAMED = 3
"""Names of what is pruned for one reason; the rest are counted."""


def render(view: View) -> str:
    """Lines for a terminal, 100 columns or so; every assumption is named where its number stands."""
    parts = (_head, _halves, _memory, _speed, _search, _time, _exports, _findings)
    sections = (part(view) for part in parts)
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(view: View) -> Iterator[str]:
    device = view["device"]
    yield f"{view['name']}  {view['description']}".rstrip()
    yield f"device  {device['title']}, compute dtype {device['compute_dtype']}"


def _halves(view: View) -> Iterator[str]:
    yield from _half("target", view["target"])
    yield from _half("draft", view["draft"])


def _half(name: str, half: View) -> Iterator[str]:
    if "model" not in half:
        yield f"{name:<7} {half['kind']}: no weights"
        return
    kind = f"{half['kind']}: " if "kind" in half else ""
    layers = f", {half['decoder_layers']} decoder layers" if "decoder_layers" in half else ""
    yield f"{name:<7} {kind}{half['model']} ({half['parameters'] / 1e6:,.1f} M parameters{layers})"
    for group in half.get("linears", ()):
        plural = "layer  " if group["layers"] == 1 else "layers "
        yield f"  {group['layers']:>4} {plural} {group['scheme']:<12} {_formats(group)}"
    if half.get("mixed") is not None:
        yield f"  mixed precision: solved at run time {_mixed(half['mixed'])}; the split above is one of that size"
    if "kv" in half:
        yield f"  KV cache     {half['kv']}"
        why = ", ".join(half["calibrated_for"]) or "nothing: rounding needs no text"
        yield f"  calibration  {why} ({half['engine']}, {half['method']})"


def _mixed(mixed: View) -> str:
    budget = f"{mixed['bits']:g} bits" if mixed["bits"] is not None else f"{mixed['megabytes']:g} MB"
    return f"for {budget} among {', '.join(mixed['labels'])}, by metric {mixed['metric']}"


def _formats(group: View) -> str:
    if group["weights"] is None:
        return "kept: " + ", ".join(group["parts"])
    activations = group["activations"] or "not quantized"
    only = "" if len(group["parts"]) >= 7 else f"; {', '.join(group['parts'])}"
    return f"weights {group['weights']} ({group['bits']:.2f} bits); activations {activations}{only}"


def _memory(view: View) -> Iterator[str]:
    memory = view["memory"]
    halves = [name for name in ("target", "draft") if name in memory]
    yield f"{'memory as served':<20}" + "".join(f"{name:>14}" for name in halves)
    labels = list(dict.fromkeys(label for name in halves for label in memory[name]["linears"]))
    for label in labels:
        row = [memory[name]["linears"].get(label) for name in halves]
        yield _row(f"linear, {'kept' if label == 'none' else label}", row)
    length = f"{memory['max_length']:,}"
    for label, key in (
        ("embeddings", "embeddings"),
        ("norms, biases", "norms_and_biases"),
        ("all weights", "weights"),
        ("read per step", "read_per_step"),
        ("KV per token", "kv_per_token"),
        (f"KV of {length}", "kv_at_max_length"),
    ):
        yield _row(label, [memory[name][key] for name in halves])
    limit = f", limit {size(memory['limit'])}" if memory["limit"] is not None else ""
    yield f"  together {size(memory['total'])} (one sequence of {length} tokens){limit}"
    if memory["sequences_at_max_length"] is not None:
        yield f"  sequences of {length} tokens that fit: {memory['sequences_at_max_length']}"
    yield f"  the original target alone: {size(memory['unquantized_target'])}"
    here = f"; {limit}" if (limit := tightest()) else ""
    yield f"  the run itself holds at least {size(memory['run_peak'])}: the original beside both results{here}"


def _row(label: str, values: list[int | None]) -> str:
    return f"  {label:<22}" + "".join(f"{'-' if v is None else size(v):>10}    " for v in values).rstrip()


def _speed(view: View) -> Iterator[str]:
    speed = view["speed"]
    prior = speed["prior"]
    yield "predicted speed, batch 1 (assumed, not measured here)"
    yield f"  drafts: {prior['source']}"
    yield f"  basis: {speed['basis']}"
    yield f"  quantization alone: {speed['quantization_alone']:.2f}x the original"
    yield f"  a draft step costs c = {speed['cost_ratio_c']:.3f} of a target step"
    if speed["target_step_ms"] is not None:
        rows = f"{speed['free_rows']} rows per pass are free" if speed["free_rows"] > 1 else "no second row is free"
        yield f"  target step at least {speed['target_step_ms']:.2f} ms; {rows}"
    share = f" in {prior['share']:.0%} of the steps" if prior["share"] < 1 else ""
    for gain in speed["speculation"]:
        yield (
            f"  alpha {gain['alpha']} assumed{share}: {gain['tokens_per_step']:.2f} tokens per step, "
            f"{gain['speedup']:.2f}x at k = {gain['gamma']}; {_best(gain)}; {_batch(gain, speed)}"
        )


def _best(gain: View) -> str:
    if gain["best_gamma"] == 0:
        return "best is not to draft"
    return f"best {gain['best_speedup']:.2f}x at k = {gain['best_gamma']}"


def _batch(gain: View, speed: View) -> str:
    if speed["target_step_ms"] is None:
        return "batch limit unknown until measured"
    batch = gain["stops_paying_at_batch"]
    if batch:
        return f"stops paying at batch {batch}"
    largest = f"{speed['largest_batch']} sequences, the most that fit"
    return f"pays up to {largest}" if gain["best_gamma"] else f"pays at {largest}"


def _search(view: View) -> Iterator[str]:
    space = view["tune"]
    if space is None:
        return
    yield f"search of qspec tune: {space['combinations']:,} combinations, of which {space['confirmed']} are run"
    for dimension, count in space["dimensions"].items():
        yield f"  {dimension:<18}{count:>4}"
    yield f"  {'targets that stay':<18}{len(space['targets']):>4}  {', '.join(space['targets'])}"
    yield f"  {'drafts that stay':<18}{len(space['drafts']):>4}  {', '.join(space['drafts'])}"
    yield f"  {'pruned':<18}{len(space['pruned']):>4}"
    reasons: dict[str, list[str]] = {}
    for name, reason in space["pruned"]:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"    {', '.join(names[:NAMED])}{more}: {reason}"


def _time(view: View) -> Iterator[str]:
    time = view["time"]
    yield f"time of the run: about {duration(time['minutes'] * 60)} ({time['basis']})"
    for step in time["stages"]:
        yield f"  {step['stage']:<12} {duration(step['seconds']):>8}  {step['work']}"


def _exports(view: View) -> Iterator[str]:
    yield "what serves it"
    for served in view["exports"]:
        yield f"  {served['runtime']:<13}{served['part']:<7} {'yes' if served['served'] else 'no '}  {served['detail']}"
    unseen = "" if view["device"]["capability"] is None else ", not yet run on a GPU"
    yield f"  {'qspec':<13}{'all':<7} yes  its own server{unseen}: qspec serve pair --engine qspec"
    yield f"  $ {view['commands']['vllm']}"


def _findings(view: View) -> Iterator[str]:
    for finding in view["findings"]:
        yield f"{finding['level']}: {finding['value']}: {finding['rule']}; {finding['fix']}"
