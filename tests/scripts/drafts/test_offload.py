"""The benchmark of targets that are read for every pass: the rows that it makes of its runs."""

from pathlib import Path
from typing import Any, cast

import pytest

from qspec.nn.cpp.offload import Reading
from qspec.speculation.types import Generation, StepRecord
from scripts.drafts import offload as bench_offload

ROOT = Path(__file__).resolve().parents[3]


def _run(seconds: float, accepted: int, read: Reading, tokens: int = 7) -> bench_offload.Run:
    steps = [StepRecord(accepted, accepted, 0.0, 1.0, 0.0)] * ((tokens - 1) // (accepted + 1))
    arm = bench_offload.Arm(0.0, "any", "any", cast(Any, None))
    return bench_offload.Run(arm, "rag", Generation(list(range(tokens)), steps, 0.1, seconds), read)


def test_a_row_compares_prompt_by_prompt() -> None:
    """Catches speeds of one prompt divided by another's, and reads of one arm that are another's."""
    plain = [_run(6.0, 0, Reading(600, 6.0, 6.0)), _run(12.0, 0, Reading(600, 6.0, 6.0))]
    drafted = [_run(3.0, 1, Reading(3_000_000, 1.0, 0.25)), _run(3.0, 2, Reading(1_000_000, 1.0, 0.25))]
    found = bench_offload.row(drafted, plain)
    assert (found["n"], found["equal"]) == (2, 2)
    assert found["tokens_per_s"] == 2.0
    assert found["speedup"] == pytest.approx(3.0)
    assert found["speedup_spread"] == [2.5, 3.5]
    assert found["tokens_per_step"] == pytest.approx(12 / 5, abs=1e-3)
    assert (found["read_mb_s"], found["read_hidden"]) == (2, 0.75)
    assert bench_offload.row(plain[:1], plain[:1])["speedup_spread"] == [1.0, 1.0]


def test_a_target_in_memory_reads_nothing() -> None:
    """Catches a bandwidth of nothing over nothing."""
    row = bench_offload.row([_run(1.0, 0, Reading(0, 0.0, 0.0))], [_run(1.0, 0, Reading(0, 0.0, 0.0))])
    assert (row["read_mb_s"], row["read_hidden"], row["speedup"]) == (None, None, 1.0)
