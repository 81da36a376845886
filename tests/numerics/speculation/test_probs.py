"""From logits to distributions, from uniform numbers to tokens."""

from hypothesis import given, strategies as st
import pytest
import torch

from qspec.numerics.speculation.probs import exponentials, fits_float32, race, sample, target_probs

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, -5.0, 0.0]], dtype=torch.float64)


def reference_probs(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same distribution token by token, in plain Python."""
    weights = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(0).tolist()
    order = sorted(range(len(logits)), key=lambda i: -weights[i])[: top_k or None]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass < top_p:
            kept.append(i)
        mass += weights[i] / total
    norm = sum(weights[i] for i in kept)
    return [weights[i] / norm if i in kept else 0.0 for i in range(len(logits))]


@given(
    logits=st.lists(st.integers(-300, 300), min_size=2, max_size=7, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.2, 0.71, 0.97, 1.0]),
)
def test_filters_follow_the_common_order(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Catches filters applied in another order, or top-p over the mass from before top-k."""
    values = [x / 100 for x in logits]
    probs = target_probs(torch.tensor([values], dtype=torch.float64), temperature, top_k, top_p)[0]
    expected = torch.tensor(reference_probs(values, temperature, top_k, top_p), dtype=torch.float64)
    assert torch.allclose(probs, expected, rtol=0, atol=1e-14)  # a few float64 roundings of numbers below 1


def test_temperature_zero_is_one_hot_at_the_first_best() -> None:
    """Catches a division by zero, and ties that keep more than one token."""
    assert target_probs(LOGITS, 0.0).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_tiny_temperature_is_finite() -> None:
    """Catches inf - inf = NaN where logits overflow at low temperature."""
    probs = target_probs(torch.tensor([[1e4, 9e3, -1e4]]), 1e-38)
    assert probs.tolist() == [[1.0, 0.0, 0.0]]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    """Catches a threshold that lets all tied tokens pass."""
    assert (target_probs(LOGITS, 1.0, top_k=2) > 0).sum(-1).tolist() == [2, 2]


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    """Catches no token where the best one alone exceeds top-p, and one token too many where it just reaches."""
    halves = torch.tensor([[0.0, 0.0, -100.0]], dtype=torch.float64)
    assert (target_probs(halves, 1.0, top_p=0.01) > 0).sum() == 1
    assert (target_probs(halves, 1.0, top_p=0.5) > 0).sum() == 1
    assert (target_probs(halves, 1.0, top_p=0.51) > 0).sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_top_p_keeps_one_token_however_small(dtype: torch.dtype) -> None:
    """Catches an empty distribution where top-p rounds to 0: a draw from it lies outside the vocabulary."""
    for shape in ((2, 4), (3, 2, 4)):
        probs = target_probs(LOGITS.to(dtype).expand(shape), 1.0, top_p=1e-46)
        assert torch.equal(probs, target_probs(LOGITS.to(dtype).expand(shape), 0.0))


def test_masked_vocabulary_stays_impossible() -> None:
    """Catches padding rows (logit -inf) that get probability back from a filter."""
    probs = target_probs(torch.tensor([[0.0, -torch.inf, 1.0]]), 1.0, top_k=3, top_p=0.999)
    assert probs[0, 1] == 0


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.25 - 1e-12, 1), (0.25, 3), (0.5, 3), (1 - 2**-53, 3)])
def test_inverse_cdf_at_its_steps(uniform: float, token: int) -> None:
    """Catches draws of tokens with probability 0 and ids past the end, at both ends and at a step."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert int(sample(probs, torch.tensor(uniform, dtype=torch.float64))) == token


def test_rows_are_sampled_each_by_its_own_number() -> None:
    """Catches one row's number or mass used for another, also where rows do not sum to one."""
    probs_KV = torch.tensor([[0.2, 0.2], [0.0, 3.0], [0.5, 0.5]])
    assert sample(probs_KV, torch.tensor([0.4, 0.1, 0.6])).tolist() == [0, 1, 1]


def test_large_vocabularies_keep_their_tail() -> None:
    """Catches a float32 CDF: over 2^18 equal float32 tokens its rounding shifts draws by many ids."""
    size = 1 << 18
    probs = torch.full((size,), 1.0) * 0.1
    ids = torch.tensor([1, size // 3, size - 2])
    assert sample(probs.expand(3, -1), (ids + 0.5) / size).tolist() == ids.tolist()


def test_a_temperature_below_every_float_is_greedy() -> None:
    """Catches 0 / 0: in float32 a temperature of 1e-300 is 0, and the distribution NaN."""
    probs = target_probs(LOGITS[:1].float(), 1e-300)
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_a_race_is_won_as_often_as_its_distribution_says() -> None:
    """Catches arrivals that are multiplied, the last to arrive, and numbers that are not exponential."""
    probs_V = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    arrivals_TV = torch.stack([exponentials(7, position, 5) for position in range(4000)])
    counts_V = race(probs_V.expand(4000, -1), arrivals_TV).bincount(minlength=5)
    # five standard errors of the largest share: 5 * sqrt(0.25 / 4000) = 0.04
    assert (counts_V / 4000).tolist() == pytest.approx(probs_V.tolist(), abs=0.04)
    assert counts_V[1] == 0
    assert arrivals_TV.min() > 0
    assert float(arrivals_TV.mean()) == pytest.approx(1.0, abs=0.04)  # 20,000 numbers of deviation 1: 5.7 errors


def test_what_float32_holds() -> None:
    """Catches subnormal numbers, whose reciprocal is infinite, and those that become infinity themselves."""
    limits = torch.finfo(torch.float32)
    assert all(map(fits_float32, (0, 1.0, limits.tiny, -limits.tiny, limits.max)))
    assert not any(
        map(fits_float32, (limits.tiny / 2, 1e-46, 2 * limits.max, -2 * limits.max, float("inf"), float("nan")))
    )
