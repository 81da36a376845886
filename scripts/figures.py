"""Write the numbers of README.md and docs/ from the files of eval/baselines.

A block stands between `<!-- figures: NAME -->` and `<!-- end -->`; its text is what the function of that name makes of
a file. `tests/scripts/test_figures.py` holds every block to its file.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
from math import exp, inf, log, log10
from pathlib import Path
import re
from statistics import mean, median
from typing import Any

from scipy.stats import ttest_rel

from qspec.eval_files import eval_dir
from qspec.numerics.statistics.student import mean_interval
from qspec.provenance import atomic_write
from qspec.schema.results import Results
from scripts.measured import list_of_claims

Row = Mapping[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("cpu", "fidelity", "measured", "vllm")))
CORPORA = {"wikitext2": "WikiText-2", "code": "code", "pud_zh": "Chinese", "pud_ko": "Korean"}
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    """A file of eval/baselines."""
    return json.loads((eval_dir() / "baselines" / f"{name}.json").read_text("utf-8"))


def three(value: float) -> str:
    """Three digits, without the nought before the point: `.0131`, `1.25`, `119`."""
    digits = max(0, 2 - int(log10(abs(value)) // 1)) if value else 0
    return f"{value:.{digits}f}".removeprefix("0") or "0"


def ratio(value: float, ci: Sequence[float] | None) -> str:
    return f"{value:.2f}" if ci is None else f"{value:.2f} ({ci[0]:.2f} to {ci[1]:.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(environment: Mapping[str, str]) -> str:
    """Processor, instruction sets and threads, as every file tells them."""
    threads = environment.get("threads of each engine") or environment.get("torch threads") or environment["threads"]
    return f"{environment['cpu']} ({environment['instruction_sets']}), {threads} threads"


def demo() -> str:
    """The first recipe's own results."""
    results = Results.model_validate(read("smollm2-135m-int8-cpu"))
    assert results.accuracy.fidelity is not None
    assert results.speed is not None
    kl, speed = results.accuracy.fidelity.kl, results.speed
    assert kl.ci is not None
    rates = {arm.arm: f"{arm.decode_rate.median:.0f}" for arm in speed.arms}
    ratios = {(pair.arm, pair.baseline): pair.speedup for pair in speed.ratios}

    def times(arm: str, baseline: str) -> str:
        speedup = ratios[arm, baseline]
        shown = speedup.ci is not None and (speedup.ci[0] > 1 or speedup.ci[1] < 1)
        return f"{ratio(speedup.value, speedup.ci)}{'' if shown else ': no difference shown'}"

    equal = [f"{e.equal} of {e.n} ({e.arm})" for e in speed.equality]
    condition = speed.condition
    rows = [
        [
            "distance to the original",
            f"KL {three(kl.value)} nats/token ({three(kl.ci[0])} to {three(kl.ci[1])}), {kl.n} windows",
        ],
        ["decoding, tokens/s (median)", ", ".join(f"{arm} {rate}" for arm, rate in rates.items())],
        ["quantized over the original in float32", times("quantized", "original")],
        ["the pair over the original in float32", times("quantized + draft", "original")],
        ["the pair over its own target", times("quantized + draft", "quantized")],
        ["answers equal to plain ones, token for token", ", ".join(equal)],
    ]
    where = f"{machine(results.environment)}, torch {results.environment['torch']}"
    prompts = f"{condition['prompts']} prompts x {condition['repeats']}, {condition['max_new_tokens']} tokens each"
    return f"{where}; {prompts}; ratios of time per token, geometric mean over prompts (95 % interval).\n\n" + table(
        ["the first recipe", "measured"], rows
    )


ARMS = (
    ("W8A8", "best", "smoothquant+gptq"),
    ("FP8", "best", "rtn"),
    ("FP8", "best", "smoothquant+gptq"),
    ("FP8_DYNAMIC", "best", "rtn"),
    ("FP8_DYNAMIC", "best", "smoothquant+gptq"),
    ("W4A16 g64", "best", "awq"),
    ("KV FP8 tensor", "calibrated", "static scales"),
    ("KV FP8 head", "calibrated", "static scales"),
)
"""Format, qspec's arm, llm-compressor's: the same arms on all four corpora."""


def fidelity() -> str:
    """qspec's arm beside llm-compressor's; bold: better, the difference paired by window excludes 0 (95 %, t test)."""
    rows = [row for row in read("fidelity")["rows"] if row["model"] == "smollm2" and "kl" in row]
    cells = {(row["scheme"], row["engine"], row["method"], row["corpus"]): row for row in rows}

    def cell(scheme: str, ours: str, theirs: str, corpus: str) -> str:
        a, b = cells[scheme, "qspec", ours, corpus], cells[scheme, "llmcompressor", theirs, corpus]
        values = [three(a["kl"]), three(b["kl"])]
        if ttest_rel(a["kl_windows"], b["kl_windows"]).pvalue < 0.05:
            better = int(b["kl"] < a["kl"])
            values[better] = f"**{values[better]}**"
        return " / ".join(values)

    lines = [[arm[0], arm[2], *(cell(*arm, corpus) for corpus in CORPORA)] for arm in ARMS]
    return table(["qspec / llm-compressor", "its method", *CORPORA.values()], lines)


SHOWN = {
    "qspec int4": "qspec W4A8 g32, INT8 head",
    "qspec int4, zero points": "qspec W4A8 g32 with zero points, INT8 head",
    "qspec int8, head too": "qspec W8A8, the head too",
    "qspec int8 g64": "qspec W8A8 g64, the head too",
    "qspec int8 g32": "qspec W8A8 g32, the head too",
    "qspec int8": "qspec W8A8, head in float",
    "qspec original": "qspec, original float32",
    "llama.cpp Q4_0": "llama.cpp Q4_0",
    "llama.cpp Q8_0": "llama.cpp Q8_0",
    "openvino int8": "OpenVINO GenAI INT8",
    "openvino int4": "OpenVINO GenAI INT4 g64",
    "ctranslate2 int8": "CTranslate2 INT8",
    "vllm bf16": "vLLM bf16",
    "vllm int8": "vLLM INT8",
    "transformers bf16": "transformers bf16",
}


GOALS = ("qspec int8 g64", "llama.cpp Q8_0"), ("qspec int4", "llama.cpp Q4_0")


def _paired(ours: Row, theirs: Row) -> str:
    """Tokens per second over another engine's, round by round: median and range."""
    if "tok_s_by_round" not in ours:
        return "not measured round by round"
    rounds = [ours["tok_s_by_round"][r] / rate for r, rate in theirs["tok_s_by_round"].items()]
    return f"{median(rounds):.2f} times ({min(rounds):.2f} to {max(rounds):.2f} by round)"


def engines() -> str:
    """CPU engines beside each other, fastest first, and the ratios that goals are set for."""
    data = read("cpu_engines")
    rows = [row for row in data["rows"] if row.get("speculation", "none") == "none"]
    speeds = {(row["engine"], row["shape"]): row for row in rows if "tok_s" in row}
    distances = {row["engine"]: row["kl"] for row in rows if row.get("corpus") == "wikitext2"}

    def cell(engine: str, shape: str) -> str:
        row = speeds.get((engine, shape))
        if row is None:
            return "–"
        low, high = row["spread"]["tok_s"]
        return f"{row['tok_s']:.0f} ({low:.0f} to {high:.0f})" if shape == "chat" else f"{row['tok_s']:.0f}"

    known = [engine for engine in SHOWN if (engine, "chat") in speeds]
    lines = [
        [
            SHOWN[engine],
            *(cell(engine, shape) for shape in ("chat", "batch", "prefill")),
            (three(distances[engine]) if distances[engine] > 1e-6 else "0") if engine in distances else "–",
        ]
        for engine in sorted(known, key=lambda engine: -speeds[engine, "chat"]["tok_s"])
    ]
    rounds = speeds[known[0], "chat"]["repeats"]
    facts = data["environment"]
    memory = f"memory read {facts['memory read']}"
    where = f"{machine(facts)} each, {memory}; medians of {rounds} rounds in turns (range), {facts['started'][:10]}."
    head = ["SmolLM2-135M, tokens/s", "128 new, batch 1", "batch 8", "prompt of 512", "KL, WikiText-2"]
    sentences = [f"{SHOWN[a]} over {SHOWN[b]}: {_paired(speeds[a, 'chat'], speeds[b, 'chat'])}." for a, b in GOALS]
    return f"{where}\n\n{table(head, lines)}\n\n{' '.join(filter(None, sentences))}"


def instruction_sets() -> str:
    """The C++ core under every instruction set of one CPU, in turns."""
    data = read("instruction_sets")
    cells = {(row["scheme"], row["isa"], row["task"]): row for row in data["rows"]}
    tasks = dict.fromkeys(row["task"] for row in data["rows"])
    lines = []
    for scheme, isa in dict.fromkeys((row["scheme"], row["isa"]) for row in data["rows"]):
        rows = [cells[scheme, isa, task] for task in tasks]
        shown = [f"{row['tok_s']:.0f} ({row['spread'][0]:.0f} to {row['spread'][1]:.0f})" for row in rows]
        lines.append([scheme, isa, *shown])
    rounds, memory = data["rows"][0]["rounds"], data["environment"]["memory read"]
    where = (
        f"{machine(data['environment'])}, memory read {memory}; tokens/s, medians of {rounds} rounds in turns (range)."
    )
    return f"{where}\n\n" + table(["weights", "instructions", *tasks], lines)


DRAFTS = {
    "ngram": "n-grams",
    "suffix": "suffixes",
    "mlp": "head",
    "mlp + suffix": "head behind suffixes",
    "eagle3": "EAGLE-3 head",
    "eagle3 + suffix": "EAGLE-3 head behind suffixes",
    "self w4": "itself in W4A16",
    "self w4 + suffix": "itself in W4A16, behind suffixes",
}


def _spec_rows(model: str) -> list[Row]:
    return [row for row in read("spec_bench")["rows"] if row["model"] == model]


def drafts() -> str:
    """Speedup over plain decoding on all 480 prompts of Spec-Bench, by category."""
    by_draft = {(row["drafter"], row["category"]): row for row in _spec_rows("smollm2-int8, all prompts")}
    lines = []
    for category in dict.fromkeys(category for _, category in by_draft):
        one, both = by_draft["suffix", category], by_draft["mlp + suffix", category]
        lines.append(
            [
                category.replace("_", " "),
                str(one["n"]),
                ratio(one["speedup"], one["speedup_ci"]),
                three(one["tokens_per_step"]),
                ratio(both["speedup"], both["speedup_ci"]),
                three(both["tokens_per_step"]),
                three(both["predicted"]),
            ]
        )
    head = ["", "n", "suffixes", "tokens/step", "head behind suffixes", "tokens/step", "predicted"]
    return f"{machine(read('spec_bench')['environment'])}.\n\n{table(head, lines)}"


def policies() -> str:
    """Every draft under a fixed length of four and under `optimal`."""
    return _by_policy(_spec_rows("smollm2-int8"), "fixed 4")


def eagle3() -> str:
    """An EAGLE-3 head beside lookups and the MLP head, under a fixed length of three and under `optimal`."""
    return _by_policy(read("eagle3")["rows"], "fixed 3")


def _by_policy(all_rows: Sequence[Row], fixed: str) -> str:
    by_policy = {(row["drafter"], row["policy"]): row for row in all_rows if row["category"] == "all"}
    lines = []
    for drafter in dict.fromkeys(drafter for drafter, _ in by_policy):
        name, rows = DRAFTS[drafter], [by_policy[drafter, policy] for policy in (fixed, "optimal")]
        lines.append(
            [
                name,
                *(
                    text
                    for row in rows
                    for text in (
                        three(row["tokens_per_step"]),
                        ratio(row["speedup"], row["speedup_ci"]),
                        three(row["predicted"]),
                    )
                ),
            ]
        )
    head = ["draft", "tokens/step", fixed, "predicted", "tokens/step", "`optimal`", "predicted"]
    return f"n = {next(iter(by_policy.values()))['n']} prompts.\n\n{table(head, lines)}"


def groups() -> str:
    """The first recipe's target: INT8 in groups of 64, with its head."""
    rows = [row for row in _spec_rows("smollm2-int8, groups and head") if row["category"] == "all"]
    lines = [
        [
            DRAFTS[row["drafter"]],
            str(row["n"]),
            ratio(row["speedup"], row["speedup_ci"]),
            three(row["tokens_per_step"]),
            three(row["predicted"]),
        ]
        for row in rows
    ]
    return table(["draft", "n", "speedup", "tokens/step", "predicted"], lines)


def draft_length() -> str:
    """The draft-length policy in every replayed setting, and what each of its constants is worth."""
    rows = [row for row in read("draft_length")["rows"] if row["category"] == "all"]
    present = {row["setting"]: [ratio(row["speedup"], row["ci"])] for row in rows if row["policy"] == "as it is"}
    for row in rows:
        if row["policy"] == "beside":
            present[row["setting"]].append(ratio(row["ratio"], row["ratio_ci"]))
    by_constant: dict[str, list[Row]] = {}
    for row in rows:
        if row["policy"] not in ("as it is", "beside"):
            by_constant.setdefault(row["policy"].split()[0], []).append(row)

    def worst(rows: Sequence[Row]) -> str:
        row = min(rows, key=lambda row: row["ratio"])
        return f"{ratio(row['ratio'], row['ratio_ci'])}, {row['setting']}"

    lines = []
    for name, changed in by_constant.items():
        scaled = [row for row in changed if " x " in row["policy"]]
        lines.append([f"`{name}`", worst(scaled), worst([row for row in changed if row not in scaled])])
    head = ["constant", "halved or doubled: least ratio", "without effect: least ratio"]
    settings = table(["setting", "speedup", "the earlier policy"], [[name, *cells] for name, cells in present.items()])
    return f"n = {rows[0]['n']} prompts.\n\n{settings}\n\n{table(head, lines)}"


PAIRS = {
    "smollm2-135m-float-target": "float, an INT8 copy drafts",
    "smollm2-135m-int8-target": "INT8, an INT8 copy drafts",
    "smollm2-135m-int8-cpu": "INT8 with smoothing, the MLP head drafts",
}


def in_vllm() -> str:
    """Where vLLM's plain answers part from qspec's, and the share of tested draft tokens that each accepts."""
    rows = read("vllm_cpu")["rows"]
    parting, accepted = [], []
    for pair, shown in PAIRS.items():
        of_pair = [row for row in rows if row["pair"] == pair]
        for row in (row for row in of_pair if row.get("compared") == "qspec and vLLM"):
            cells = ["equal", "", "", "", ""]
            if "gap" in row:
                numbers = [three(row[name]) for name in ("gap", "rounding", "moved")]
                cells = [str(row["equal_until"]), *numbers, f"{row['changed_own']} of {row['draws']}"]
            verdict = {True: "near tie", False: "overflow", None: ""}[row.get("near_tie")]
            parting.append([shown, row["category"], *cells, verdict])
        alphas = {row["engine"]: ratio(row["alpha"], row["ci"]) for row in of_pair if "engine" in row}
        speculative = [row for row in of_pair if row.get("compared") == "vLLM and vLLM with its draft"]
        equal = sum(row["equal_until"] == row["tokens"] for row in speculative)
        accepted.append([shown, *alphas.values(), f"{equal} of {len(speculative)}"])
    head = ["target and draft", "prompt", "parts at", "gap", "rounding", "moved", "qspec chose otherwise", ""]
    columns = ["target and draft", "accepted, qspec", "accepted, vLLM", "vLLM's answers equal with drafts and without"]
    return f"{table(head, parting)}\n\n{table(columns, accepted)}"


def temperature() -> str:
    """Acceptance by temperature, of the head and of prompt lookup."""
    by_arm = {
        (row["arm"], row["temperature"]): row
        for row in read("temperature")["speed"]["acceptance"]
        if row["category"] == "all"
    }
    lines = []
    for degree in sorted({degree for _, degree in by_arm}):
        cells = []
        for arm in ("quantized + draft", "quantized + prompt lookup"):
            row = by_arm[arm, degree]
            cells += [
                ratio(row["alpha"]["value"], row["alpha"]["ci"]),
                ratio(row["tokens_per_step"], row["tokens_per_step_ci"]),
            ]
        lines.append([f"{degree:g}", *cells])
    return table(["temperature", "head: α", "tokens/step", "prompt lookup: α", "tokens/step"], lines)


def ablation() -> str:
    """Each treatment of outliers alone and together, KL with its 95 % interval."""
    rows = {(row["scheme"], row["method"], row["corpus"]): row for row in read("ablation")["rows"] if "kl" in row}
    arms = dict.fromkeys((scheme, method) for scheme, method, _ in rows)

    def cell(scheme: str, method: str, corpus: str) -> str:
        row = rows[scheme, method, corpus]
        return f"{three(row['kl'])} ({three(row['ci'][0])} to {three(row['ci'][1])})"

    lines = [
        [scheme, method, *(cell(scheme, method, corpus) for corpus in ("wikitext2", "pud_zh"))]
        for scheme, method in arms
    ]
    return table(["format", "treatment", "WikiText-2", "Chinese"], lines)


def kv() -> str:
    """INT4 keys and values: KL, and what each addition makes of it, as a ratio paired by window."""
    rows = {row["scheme"]: row for row in read("kv")["rows"] if row["scheme"] and "kl" in row}
    lines = []
    for name, row in rows.items():
        plain, cell = rows[name.partition(",")[0]], ""
        if plain is not row:
            logs = [log(a / b) for a, b in zip(row["kl_windows"], plain["kl_windows"], strict=True)]
            low, high = mean_interval(logs) or (-inf, inf)
            cell = ratio(exp(mean(logs)), (exp(low), exp(high)))
        lines.append([name, f"{three(row['kl'])} ({three(row['ci'][0])} to {three(row['ci'][1])})", cell])
    return table(["keys and values in INT4", "KL, nats/token", "times that of plain codes"], lines)


BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        demo,
        fidelity,
        engines,
        instruction_sets,
        drafts,
        policies,
        groups,
        eagle3,
        draft_length,
        temperature,
        in_vllm,
        ablation,
        kv,
        list_of_claims,
    )
}


def filled(text: str) -> str:
    """A page with every block made anew."""
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]]() + match[4], text)


def main() -> None:
    for page in (ROOT / name for name in PAGES):
        text = page.read_text("utf-8")
        if (new := filled(text)) != text:
            atomic_write(page, new)
            print(f"{page.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
