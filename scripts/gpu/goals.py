"""What the engine on CUDA is meant to reach, checked on the rows of `gpu_bench`."""

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
BOTH = "FP8 both ends + KV8 + spec"


def goals(rows: Iterable[Row]) -> list[Row]:
    """Each with what was found where (the worst), and whether it is met; None: nothing was measured for it."""
    rows = [row for row in rows if "skipped" not in row]
    decode = [row for row in rows if row["part"] == "decode"]
    large = [row for row in decode if row["target"] == "8B"]
    prefill = [row for row in rows if row["part"] == "prefill" and row["target"] == "8B" and row["prompt"] == 2000]
    plain = [row for row in large if row["drafts"] == 0 and row["batch"] == 1 and "schedule" not in row["arm"]]
    return [
        _goal("decode at batch 1, of the measured bandwidth", plain, lambda row: row["of_ceiling"], 0.8),
        _goal("FP8+KV8 over BF16, 8B", _arm(large, "FP8+KV8"), _speedup, 1.7),
        _goal("FP8 over BF16, a prompt of 2000 tokens", _arm(prefill, "FP8"), _speedup, 1.6),
        _goal(
            f"{BOTH} over BF16 without drafts, batch 1",
            [r for r in _arm(large, BOTH) if r["batch"] == 1],
            _speedup,
            3.0,
        ),
        _goal(
            "with a schedule over the same target without drafts, any batch",
            _arm(decode, f"{BOTH} + schedule"),
            _own,
            1.0,
        ),
    ]


def _arm(rows: Iterable[Row], name: str) -> list[Row]:
    return [row for row in rows if row["arm"] == name]


def _speedup(row: Row) -> float:
    return float(row["speedup"]["median"])


def _own(row: Row) -> float:
    """A schedule that says no drafts is plain decoding, whatever two timings of it differ by."""
    return float(row["speedup_own"]["median"]) if row["drafts"] else 1.0


def _goal(name: str, rows: list[Row], value: Callable[[Row], float], least: float) -> Row:
    if not rows:
        return {"goal": name, "least": least, "found": None, "met": None, "where": "not measured"}
    worst = min(rows, key=value)
    where = f"{worst['target']} {worst['arm']}, {worst['prompt']} tokens, batch {worst['batch']}; worst of {len(rows)}"
    return {"goal": name, "least": least, "found": value(worst), "met": value(worst) >= least, "where": where}
