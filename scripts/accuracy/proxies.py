"""Measure proxies and tasks of several schemes of one model, and say how far the proxies order the schemes.

Do quick measures foretell task scores? KL, agreement, perplexity by text and hidden numbers beside MMLU-Pro and last
words, over the schemes of eval/matrices/proxies.yaml, and their rank correlation. Finished schemes are kept in
runs/bench_proxies; rows go to eval/baselines/proxies.json.
  --only PATTERN   schemes by name    --again   measure anew    --list   what is kept    --threads N
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
import json
from pathlib import Path
import re
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qspec.bridges.text import load_rows
from qspec.errors import SourceError
from qspec.measure.fidelity import measure_fidelity
from qspec.measure.needle import measure_needles
from qspec.models.load import load
from qspec.nn.engines import AnyDecoder, engine_name, open_decoder
from qspec.nn.lm import LM
from qspec.numerics.statistics.paired import rank_correlation, rank_interval
from qspec.progress import Progress
from qspec.provenance import atomic_write, environment
from qspec.quantization.job import Calibration, quantize_model
from qspec.records import LoadedModel, Tokenizer
from qspec.schema.quantization import ModelSpec
from qspec.schema.recipe import CalibrationSpec, FusionSpec
from scripts.accuracy.proxy_matrix import ProxyMatrix, read_proxy_matrix
from scripts.common import digest, read_options, write_baseline

WORK = Path("runs/bench_proxies")
CALIBRATION = CalibrationSpec(samples=8, length=256)
LETTERS = "ABCDEFGHIJ"
STORY = range(60, 200)
"""Tokens of a story up to its last words."""
PROXIES = ("kl", "top1_lost", "nll", "needle_nll")
TASKS = ("mmlu_pro", "last_word")
Row = dict[str, Any]
Item = tuple[list[int], list[list[int]], int]
"""Prompt, the answers to choose from (of last words: the only one), and which is right."""


@dataclass(frozen=True)
class Bench:
    matrix: ProxyMatrix
    model: LoadedModel
    original: AnyDecoder
    progress: Progress

    def record(self, name: str) -> Row:
        """Proxies and task items of a scheme, beside the original in the same process."""
        matrix, tokenizer = self.matrix, self.model.tokenizer
        lm = self.decoder(name)
        texts = measure_fidelity(self.original, lm, tokenizer, matrix.fidelity, self.progress)
        arms = {"original": lambda: self.original, "quantized": lambda: lm}
        needles = measure_needles(arms, tokenizer, matrix.needle, matrix.seed, self.progress)
        return {
            "engine": engine_name(lm),
            "texts": {str(text.kl.condition["data"]): [w.model_dump() for w in text.windows] for text in texts},
            "needles": [row.model_dump() for row in needles.rows],
            "tasks": self.tasks(lm),
        }

    def decoder(self, name: str) -> AnyDecoder:
        text = Calibration(CALIBRATION, self.model.tokenizer, self.matrix.seed, self.progress)
        with TemporaryDirectory(dir=WORK) as work:
            spec = self.matrix.schemes[name]
            quantized = quantize_model(self.model, spec, FusionSpec(), text, Path(work), torch.float32)
            return open_decoder(quantized, max_length=max(self.matrix.needle.lengths))

    def tasks(self, lm: LM) -> dict[str, list[tuple[float, float]]]:
        items_of = {"mmlu_pro": questions(self.matrix, self.model.tokenizer)}
        items_of["last_word"] = stories(self.matrix, self.model.tokenizer)
        return {
            task: [answer(lm, item) for item in self.progress.track(items, task, len(items))]
            for task, items in items_of.items()
        }


def questions(matrix: ProxyMatrix, tokenizer: Tokenizer) -> list[Item]:
    """MMLU-Pro's questions with their options, spread evenly over the test rows."""
    rows = load_rows("mmlu_pro")
    items: list[Item] = []
    for row in rows[:: max(1, len(rows) // matrix.questions)][: matrix.questions]:
        options = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, row["options"], strict=False))
        prompt = tokenizer.encode(f"Question: {row['question']}\nOptions:{options}\nAnswer:")
        answers = [tokenizer.encode(f" {letter}", special=False) for letter in LETTERS[: len(row["options"])]]
        items.append((prompt, answers, LETTERS.index(row["answer"])))
    return items


def stories(matrix: ProxyMatrix, tokenizer: Tokenizer) -> list[Item]:
    """Stories without their last word, which has to be said: whole, by the likeliest tokens."""
    items: list[Item] = []
    for row in load_rows("tinystories"):
        match = re.fullmatch(r"(.+)( [A-Za-z]{3,})[.!?\"']*\s*", str(row["text"]), re.S)
        prompt = tokenizer.encode(match[1]) if match else []
        if match and len(prompt) in STORY:
            items.append((prompt, [tokenizer.encode(match[2], special=False)], 0))
        if len(items) == matrix.stories:
            return items
    raise SourceError("tinystories", f"has {len(items)} stories of such a length", f"{matrix.stories} are needed")


@torch.no_grad()
def answer(lm: LM, item: Item) -> tuple[float, float]:
    """Whether the right answer is the likeliest (1 or 0), and its nats: of a letter among the letters, or of a word."""
    prompt, answers, right = item
    word = answers[right]
    lm.truncate(0)
    tokens = prompt if len(answers) > 1 else [*prompt, *word[:-1]]
    logp_AV = lm.forward(torch.tensor(tokens), last=1 if len(answers) > 1 else len(word)).float().log_softmax(-1).cpu()
    if len(answers) > 1:
        logp_C = logp_AV[0, torch.tensor([letter[0] for letter in answers])].log_softmax(-1)
        return float(int(logp_C.argmax()) == right), -float(logp_C[right])
    chosen_A = torch.tensor(word)
    return float(torch.equal(logp_AV.argmax(-1), chosen_A)), -float(logp_AV.gather(1, chosen_A[:, None]).sum())


def rows_of(name: str, record: Row, original: Row) -> Row:
    """One scheme: proxies, and tasks as differences from the original on the same items (nats: of the right answer)."""
    windows = [window for text in record["texts"].values() for window in text]
    needles = record["needles"]
    row: Row = {"scheme": name, "engine": record["engine"], "windows": len(windows), "needles": len(needles)}
    row["kl"] = _mean(w["kl"] for w in windows)
    row["top1_lost"] = _mean(1 - w["agreement"] for w in windows)
    row["nll"] = _mean(w["quantized_nll"] - w["original_nll"] for w in windows)
    row |= {f"kl, {text}": _mean(w["kl"] for w in own) for text, own in record["texts"].items()}
    row["needle_nll"] = _mean(n["nll"]["quantized"] - n["nll"]["original"] for n in needles)
    row["needle_found"] = [sum(n["hits"][arm] for n in needles) for arm in ("original", "quantized")]
    for length in dict.fromkeys(n["length"] for n in needles):
        own = [n["nll"]["quantized"] - n["nll"]["original"] for n in needles if n["length"] == length]
        row[f"needle_nll, {length}"] = _mean(own)
    for task in TASKS:
        mine, base = record["tasks"][task], original["tasks"][task]
        row |= {f"{task}, items": len(mine), f"{task}, right": [sum(hit for hit, _ in s) for s in (base, mine)]}
        row[f"{task}, nats"] = _mean(a[1] - b[1] for a, b in zip(mine, base, strict=True))
    return row


def _mean(values: Iterator[float] | Sequence[float]) -> float:
    return round(fmean(values), 6)


def correlations(rows: Sequence[Row]) -> Iterator[Row]:
    """Every proxy against every task, over all schemes: more harm by the one, more by the other (rho > 0)."""
    for task in TASKS:
        harm = {"wrong": [-row[f"{task}, right"][1] for row in rows], "nats": [row[f"{task}, nats"] for row in rows]}
        for measure, values in harm.items():
            for proxy in PROXIES:
                rho, p = rank_correlation([row[proxy] for row in rows], values)
                known = (
                    {"rho": round(rho, 3), "ci": rank_interval(rho, len(rows)), "p": round(p, 4)} if rho == rho else {}
                )
                yield {"proxy": proxy, "task": task, "by": measure, "schemes": len(rows)} | known


def main() -> None:
    args = read_options(__doc__, "proxies.yaml")
    WORK.mkdir(parents=True, exist_ok=True)
    matrix, progress = read_proxy_matrix(args.matrix), Progress()
    shared = matrix.model_dump(mode="json", exclude={"schemes"})
    settings = {name: spec.model_dump(mode="json") for name, spec in matrix.schemes.items()}
    paths = {
        name: WORK / f"{digest([shared, name, spec])}.json" for name, spec in [("original", None), *settings.items()]
    }
    chosen = [name for name in paths if re.search(args.only, name) or name == "original"]  # all are over the original
    todo = [name for name in chosen if args.again or not paths[name].exists()]
    if args.list:
        print(*(f"{'to do' if name in todo else 'kept '} {name}" for name in paths), sep="\n")
        return
    if todo:
        model = load(ModelSpec(model=matrix.model))
        original = open_decoder(model, torch.float32, max(matrix.needle.lengths))
        bench = Bench(matrix, model, original, progress)
    for name in todo:
        progress.stage(name)
        record = {"tasks": bench.tasks(original)} if name == "original" else bench.record(name)
        atomic_write(paths[name], json.dumps(record))
    progress.close()
    kept: Mapping[str, Row] = {name: json.loads(path.read_bytes()) for name, path in paths.items() if path.exists()}
    rows = [rows_of(name, record, kept["original"]) for name, record in kept.items() if name != "original"]
    every = [*rows, *correlations(rows)] if len(rows) > 3 else rows
    write_baseline(Path("eval/baselines") / f"{args.matrix.stem}.json", environment(), every)
    print(*map(json.dumps, every), sep="\n")


if __name__ == "__main__":
    main()
