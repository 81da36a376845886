"""Hold every measured claim to the code that it speaks of: its file, command, machine, date and commit.

Prints each file of eval/baselines with what has changed since in the code that decides its numbers, and ends with
status 1 if there is one: measure it again (the command stands in docs/measured.md), or take it out. A file that was
measured again in part, and had the same numbers, says in its `environment` since which commit it is `confirmed`.
docs/measured.md is the list; `scripts/study figures` writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
import json
from pathlib import Path
import subprocess
import sys
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ("qspec/native", "qspec/nn/cpp")
VLLM = ("qspec/bridges/vllm", "qspec/serving/vllm.py")
CODES = ("qspec/numerics/quantization", "qspec/quantization", "qspec/nn/eager")
DRAFTS = ("qspec/speculation", "qspec/numerics/speculation", *ENGINE)


@dataclass(frozen=True)
class Claim:
    """What a file of eval/baselines shows, the study that fills it, and the paths that decide its numbers."""

    shows: str
    study: str
    decided_by: tuple[str, ...]


CLAIMS = {
    "smollm2-135m-int8-cpu": Claim(
        "the first recipe: accuracy and speed of pair and target beside the original",
        "scripts/demo, results.json of its report",
        ("recipes/smollm2-135m-int8-cpu.yaml", *CODES, *DRAFTS, "qspec/measure"),
    ),
    "ablation": Claim("each treatment of outliers alone", "fidelity --matrix eval/matrices/ablation.yaml", CODES),
    "fidelity": Claim(
        "distance to the original beside llm-compressor", "fidelity", (*CODES, "qspec/bridges/oneshot.py")
    ),
    "kv": Claim("what each addition to an INT4 KV cache makes of it", "fidelity --matrix eval/matrices/kv.yaml", CODES),
    "proxies": Claim("which cheap measure orders schemes as lost answers do", "proxies", (*CODES, "qspec/measure")),
    "backends_cpu": Claim(
        "one task by qspec, transformers and vLLM, item by item", "backends", ("qspec/bridges/harness", "qspec/measure")
    ),
    "cpu_engines": Claim("CPU engines beside each other in turns", "engines", ENGINE),
    "instruction_sets": Claim("the C++ core under each instruction set of one CPU", "instruction_sets", ENGINE),
    "speed_cpu": Claim("latency by lengths and batch", "speed", DRAFTS),
    "speed_vllm_cpu": Claim(
        "vLLM under load",
        "speed --matrix eval/matrices/speed_vllm.yaml",
        ("qspec/bridges/vllm", "qspec/serving/vllm.py"),
    ),
    "spec_bench": Claim("what drafts gain on Spec-Bench, by kind, length and category", "policies", DRAFTS),
    "eagle3": Claim(
        "an EAGLE-3 head beside lookups and the MLP head",
        "policies --matrix eval/matrices/eagle3.yaml",
        (*DRAFTS, "qspec/nn/eagle3.py"),
    ),
    "draft_length": Claim("what each constant of `optimal` is worth", "draft_length", ("qspec/speculation/length",)),
    "temperature": Claim(
        "acceptance by temperature", "qspec run recipes/smollm2-135m-mlp-cpu.yaml, results.json", DRAFTS[:2]
    ),
    "speculator": Claim("the MLP heads beside lookups", "speculator", (*DRAFTS, "qspec/weights")),
    "speculator_targets": Claim(
        "heads trained on a float and on an INT8 target", "head_targets", ("qspec/train", "qspec/nn/mlp_speculator.py")
    ),
    "vllm_cpu": Claim(
        "pairs in vLLM: equal text, acceptance",
        "vllm",
        (*VLLM, "qspec/bridges/compressed.py"),
    ),
}
"""By the file's name. Studies run as `scripts/study NAME`."""


def code_state() -> dict[str, str]:
    """Date and commit of the code that runs, for the environment of a measurement; a + says that files had changed."""
    commit, date = _git("log", "-1", "--format=%h %cs").split()
    return {"date": date, "commit": commit + "+" * bool(_git("status", "--porcelain", "--untracked-files=no", "qspec"))}


def list_of_claims() -> str:
    """Every claim, its file, its command, and where and when it was measured."""
    lines = ["| measured | file | command | machine | date | commit |", "| --- " * 6 + "|"]
    for name, claim in CLAIMS.items():
        facts = _environment(name)
        command = claim.study if " " in claim.study.partition(" --")[0] else f"scripts/study {claim.study}"
        machine = f"{facts['cpu']} ({facts['instruction_sets'].split()[-1]}), {facts['cores']} cores"
        commit = facts["commit"] + (f", confirmed {facts['confirmed']}" if "confirmed" in facts else "")
        cells = claim.shows, f"[{name}](../eval/baselines/{name}.json)", f"`{command}`", machine, facts["date"], commit
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def changes(name: str) -> list[str]:
    """Commits behind a measurement that changed what decides it."""
    facts = _environment(name)
    since = facts.get("confirmed", facts["commit"]).rstrip("+")
    return _git("log", "--format=%h %s", f"{since}..HEAD", "--", *CLAIMS[name].decided_by).splitlines()


def _environment(name: str) -> Mapping[str, Any]:
    environment: Mapping[str, Any] = json.loads((ROOT / f"eval/baselines/{name}.json").read_bytes())["environment"]
    return environment


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    older = {name: commits for name in CLAIMS if (commits := changes(name))}
    for name in CLAIMS:
        print(f"{name}: {len(older.get(name, ()))} commits since" if name in older else f"{name}: as it was measured")
        print(*(f"    {line}" for line in older.get(name, ())), sep="\n", end="\n" if name in older else "")
    return bool(older)


if __name__ == "__main__":
    sys.exit(main())
