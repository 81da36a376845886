"""Proxies beside tasks: what a scheme's row says, and how proxies are judged."""

from typing import Any

import pytest
import torch

from qspec.eval_files import eval_dir
from scripts.accuracy.proxies import answer, correlations, rows_of
from scripts.accuracy.proxy_matrix import read_proxy_matrix


def _record(harm: float, right: int) -> dict[str, Any]:
    window = {"original_nll": 2.0, "quantized_nll": 2.0 + harm, "kl": harm, "agreement": 1 - harm}
    needles = [
        {"length": n, "hits": {"original": 1.0, "quantized": 0.0}, "nll": {"original": 0.1, "quantized": 0.1 + harm}}
        for n in (512, 2048)
    ]
    tasks = {task: [(float(i < right), 1.0 + harm) for i in range(8)] for task in ("mmlu_pro", "last_word")}
    return {"engine": "e", "texts": {"a": [window], "b": [window]}, "needles": needles, "tasks": tasks}


def test_proxies_that_order_the_schemes_as_tasks_do_are_found() -> None:
    """Would catch a sign turned round, arms mixed up, and a perfect order of a few schemes sold as certain."""
    original = {"tasks": _record(0.0, 8)["tasks"]}
    rows = [rows_of(str(harm), _record(harm, 8 - i), original) for i, harm in enumerate((0.1, 0.2, 0.3, 0.4, 0.5), 1)]
    assert (rows[1]["kl"], rows[1]["nll"], rows[1]["needle_nll, 2048"]) == (0.2, 0.2, 0.2)
    assert (rows[1]["needle_found"], rows[1]["mmlu_pro, right"]) == ([2.0, 0.0], [8.0, 6.0])
    found = list(correlations(rows))
    assert {row["rho"] for row in found} == {1.0}
    assert all(row["ci"][0] < 0.8 for row in found)


def test_tasks_that_no_scheme_changes_have_no_correlation() -> None:
    """Would catch a number where nothing varies."""
    rows = [rows_of("x", _record(harm, 4), {"tasks": _record(0.0, 4)["tasks"]}) for harm in (0.1, 0.2, 0.3, 0.4)]
    assert all("rho" not in row for row in correlations(rows) if row["by"] == "wrong")


@pytest.mark.parametrize(("right", "hit"), [(0, 0.0), (1, 1.0)])
def test_an_answer_is_chosen_among_the_letters(right: int, hit: float) -> None:
    """Would catch a letter that loses to a word which is no answer, and the wrong letter's nats."""

    class Fixed:
        def truncate(self, length: int) -> None: ...

        def forward(self, tokens_T: torch.Tensor, last: int) -> torch.Tensor:
            return torch.tensor([[5.0, 0.0, 1.0]])  # token 0 is no letter

    found, nats = answer(Fixed(), ([0], [[1], [2]], right))  # type: ignore[arg-type]
    assert (found, nats) == (hit, pytest.approx(0.3132617 + (1 - right), abs=1e-6))


def test_the_matrix_is_read() -> None:
    """Would catch a scheme that the schema refuses, found out behind half an hour of others."""
    assert len(read_proxy_matrix(eval_dir() / "matrices/proxies.yaml").schemes) >= 6
