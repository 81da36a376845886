"""The proof that travels with a pair."""

import pytest
import torch

from qspec.measure import prove
from qspec.measure.arm import Arm, Request
from qspec.progress import Progress
from qspec.speculation.drafters.suffix import SuffixDrafter
from tests.arms import Parrot

QUIET = Progress(quiet=True)


def _arms(noise: float) -> tuple[Arm, Arm]:
    target = Parrot(list(range(40, 90)), noise=noise)
    return Arm(target), Arm(target, SuffixDrafter())


def _law(plain: Arm, drafted: Arm) -> float:
    requests = [Request("qa", [40 + i, 41 + i, 40 + i, 41 + i]) for i in range(3)]
    return prove.marginals(plain, drafted, requests, [], 0, QUIET).p_value


def test_exact_speculation_is_not_accused() -> None:
    """Would catch arms that are seeded alike or compared wrongly, so that a sound pair fails."""
    assert _law(*_arms(noise=2.0)) > prove.CERTAIN


def test_drafts_that_are_always_accepted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a proof that a lossy engine passes."""
    from qspec.speculation import request

    def lossy(tokens_K: torch.Tensor, q_KV: object, p_K1V: torch.Tensor, uniforms: torch.Tensor) -> tuple[int, int]:
        return len(tokens_K), int(p_K1V[-1].argmax())

    monkeypatch.setattr(request, "verify_sampling", lossy)
    assert _law(*_arms(noise=2.0)) < prove.CERTAIN
