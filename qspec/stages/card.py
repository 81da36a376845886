"""The card of a published pair: a header that the Hub reads, and what a person has to know before using it."""

import re
from typing import Any

from qspec.bridges.hub import card_header
from qspec.schema.manifest import Half, Manifest
from qspec.schema.results import Results

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DATASETS = {"mmlu_pro": ("TIGER-Lab/MMLU-Pro", "MMLU-Pro"), "gsm8k": ("openai/gsm8k", "GSM8K")}


def card(
    manifest: Manifest, results: Results | None, report: str, address: str, license: str | None, override: str | None
) -> str:
    """Markdown. report: of the pair, in Markdown; override: why it is published although something speaks against it.

    license: an identifier of the Hub's; None leaves it out, which the card then says.
    """
    header = card_header(
        manifest.name,
        None if results is None else _score(results),
        base_model=_base_models(manifest) or None,
        base_model_relation="quantized" if _base_models(manifest) else None,
        license=license,
        library_name="qspec",
        pipeline_tag="text-generation",
        tags=_tags(manifest),
    )
    warning = f"> **Published although a gate failed:** {override}\n\n" if override else ""
    parts = [
        f"{header}\n# {manifest.name}\n\n{warning}{_introduction(manifest)}",
        f"## Use\n\n{_use(manifest, address)}",
        f"## What is inside\n\n{_halves(manifest)}",
        _served(manifest),
        _report(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _base_models(manifest: Manifest) -> list[str]:
    """Sources that the Hub knows, once each; a file or a package is none."""
    named = [half.source.get("model", "") for half in (manifest.target, manifest.draft)]
    return list(dict.fromkeys(name for name in named if _HUB_ID.fullmatch(name)))


def _tags(manifest: Manifest) -> list[str]:
    schemes = {s.lower() for half in (manifest.target, manifest.draft) for s in half.schemes if s != "none"}
    return ["qspec", "speculative-decoding", "quantized", "compressed-tensors", *sorted(schemes)]


def _score(results: Results) -> dict[str, Any] | None:
    """The quantized target's first task result."""
    for task in results.accuracy.tasks:
        dataset = _DATASETS.get(task.task, (task.task, task.task))
        return {
            "dataset_type": dataset[0],
            "dataset_name": dataset[1],
            "metric_type": "exact_match",
            "metric_name": f"{task.quantized.metric}, {task.quantized.n} questions",
            "metric_value": round(task.quantized.value, 4),
        }
    return None


def _introduction(manifest: Manifest) -> str:
    target, draft = manifest.target, manifest.draft
    drafts = f"a draft ({_schemes(draft)})" if draft.folder else f"drafts by {draft.kind} lookup"
    where = manifest.validity
    return (
        f"A speculative pair: {target.source.get('model', 'a model')} quantized ({_schemes(target)}), with {drafts}. "
        f"Made by qspec for device `{where.device}`, contexts up to {where.max_length:,} tokens. Drafting changes the "
        f"speed, not the law that tokens follow."
    )


def _schemes(half: Half) -> str:
    named = [f"{n} layers {scheme}" for scheme, n in half.schemes.items() if scheme != "none"]
    return ", ".join(named) or "not quantized"


def _use(manifest: Manifest, address: str) -> str:
    lines = [
        f"qspec pull {address} pair",
        "qspec check pair",
        'qspec generate pair "Why is the sky blue?"',
        "qspec serve pair --engine qspec",
    ]
    command = manifest.speculation.get("vllm_command")
    if manifest.exportable and command:
        lines.append(str(command))
    return "```bash\n" + "\n".join(lines) + "\n```" + (f"\n\nvLLM: {manifest.reason}" if manifest.reason else "")


def _halves(manifest: Manifest) -> str:
    rows = ["| part | source | revision | formats | MB |", "|---|---|---|---|---|"]
    for name, half in (("target", manifest.target), ("draft", manifest.draft)):
        size = sum(entry.bytes for entry in manifest.files if half.folder and entry.path.startswith(f"{half.folder}/"))
        source, revision = half.source.get("model", half.kind), half.source.get("revision", "")
        rows.append(f"| {name} | {source} | {revision} | {_schemes(half)} | {size / 1e6:,.1f} |")
    return "\n".join(rows)


def _served(manifest: Manifest) -> str:
    if not manifest.served_by:
        return ""
    rows = ["| runtime | part | served | how, or why not |", "|---|---|---|---|"]
    rows += [f"| {s.runtime} | {s.part} | {'yes' if s.served else 'no'} | {s.detail} |" for s in manifest.served_by]
    return "## Who serves it\n\n" + "\n".join(rows)


def _report(report: str) -> str:
    """The report with its headings one level lower, so that the card keeps one title."""
    lowered = re.sub(r"^(#+ )", r"#\1", report.strip(), flags=re.MULTILINE)
    return lowered or "Nothing was measured."
