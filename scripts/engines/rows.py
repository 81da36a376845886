"""What the rounds of a comparison of engines say: medians with ranges, ratios paired by round, rows of the baseline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One request's times, as `peers/wire.py` tells them, and its tokens."""

    ttft_s: float
    seconds: float
    first: int
    ids: list[list[int]]

    def tok_s(self, prompt: int) -> float:
        """Tokens of all answers per second after the first of each; of the prompts up to there, if there is no more."""
        later = sum(map(len, self.ids)) - self.first
        if later <= 0:
            return prompt * len(self.ids) / self.ttft_s
        return later / (self.seconds - self.ttft_s)


Rounds = Mapping[int, Answer]
"""Of one cell, by round."""


def spread(values: Sequence[float], digits: int) -> list[float]:
    return [round(min(values), digits), round(max(values), digits)]


def ratios(mine: Rounds, theirs: Rounds, prompt: int) -> list[float]:
    """Speed over another's, in the rounds that both took part in."""
    return [mine[r].tok_s(prompt) / theirs[r].tok_s(prompt) for r in mine if r in theirs]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def agreement(mine: Answer, theirs: Answer) -> float:
    """Share of the answers' tokens before each first parts from the other's."""
    same = sum(common_prefix(a, b) for a, b in zip(mine.ids, theirs.ids, strict=True))
    return same / sum(map(len, mine.ids))


def speed_row(head: Row, mine: Rounds, baseline: Rounds, plain: Rounds, ceiling: float | None) -> Row:
    """A cell's row. baseline: of the same shape; plain: of the same engine without drafts; ceiling: tokens/s or None.

    With a single token to answer, `tok_s` counts the prompt's (prefill).
    """
    prompt = head["prompt"]
    rates, first = [a.tok_s(prompt) for a in mine.values()], [a.ttft_s for a in mine.values()]
    against, gain = ratios(mine, baseline, prompt), ratios(mine, plain, prompt)
    answer = next(iter(mine.values()))
    return head | {
        "tok_s": round(median(rates), 2),
        "ttft_s": round(median(first), 4),
        "repeats": len(mine),
        "spread": {"tok_s": spread(rates, 2), "ttft_s": spread(first, 4)},
        "tok_s_by_round": {str(r): round(answer.tok_s(prompt), 2) for r, answer in mine.items()},
        "ratio_to_transformers_bf16": round(median(against), 3) if against else None,
        "ratio_spread": spread(against, 3) if against else None,
        "ratio_to_plain": round(median(gain), 3) if gain else None,
        "ceiling_tok_s": None if ceiling is None else round(ceiling, 1),
        "agrees_with_baseline": round(agreement(answer, next(iter(baseline.values()))), 3) if baseline else None,
        "agrees_with_plain": round(agreement(answer, next(iter(plain.values()))), 3) if plain else None,
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line per row, the fastest of a shape first."""
    for row in sorted(rows, key=lambda row: (row.get("shape", "~"), -row.get("tok_s", 0.0))):
        name = f"{row['engine']} {row['precision']}"
        if "refused" in row:
            yield f"{name}: refused, {row['refused']}"
        elif "kl" in row:
            yield f"{name} {row['corpus']}: KL {row['kl']:.5f} [{row['ci'][0]:.5f}, {row['ci'][1]:.5f}]"
        else:
            lo, hi = row["spread"]["tok_s"]
            ratio = row["ratio_to_transformers_bf16"]
            yield (
                f"{row['shape']}: {name} {row['speculation']}: {row['tok_s']} tok/s [{lo}, {hi}], first token "
                f"{row['ttft_s']} s, {ratio} times the baseline, n {row['repeats']}"
            )
