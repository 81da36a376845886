"""Lower bounds on the time of a pass: bytes moved over bandwidth, or operations over rate, whichever is longer.

Batch B sequences, each with a context of L cached tokens and n new rows (1 to decode, gamma + 1 to verify):
`t(B, L, n) = max((W + B L k) / BW, B n (ops / F + L attention_ops / F_attention))`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PassCost:
    """Cost of one pass of a model.

    weight_bytes W: read by a pass of one row; kv_bytes k: read per cached token; ops: matmul operations per row (2 per
    weight that the row uses); attention_ops: operations per row and cached token. Of a mixture of experts, expert_bytes
    are those of all experts, and a row uses expert_share of them: W holds that part.
    """

    weight_bytes: float
    kv_bytes: float
    ops: float
    attention_ops: float
    expert_bytes: float = 0.0
    expert_share: float = 0.0


@dataclass(frozen=True)
class Rates:
    """bandwidth: bytes/s; matmul, attention: operations/s of the linear layers and of attention (its own format)."""

    bandwidth: float
    matmul: float
    attention: float


def bytes_moved(cost: PassCost, batch: int, context: int, rows: int = 1) -> float:
    """Bytes that one pass reads: weights once, each sequence's cache, and experts as if every row chose at random."""
    unread = 1 - cost.expert_share
    more_experts = cost.expert_bytes * (unread - unread ** (batch * rows))
    return cost.weight_bytes + more_experts + batch * context * cost.kv_bytes


def pass_seconds(cost: PassCost, rates: Rates, batch: int, context: int, rows: int) -> float:
    """Floor of one pass in seconds."""
    compute = cost.ops / rates.matmul + context * cost.attention_ops / rates.attention
    return max(bytes_moved(cost, batch, context, rows) / rates.bandwidth, batch * rows * compute)


def prefill_seconds(cost: PassCost, rates: Rates, length: int) -> float:
    """Floor of reading a prompt of `length` tokens (causal attention: half of all pairs)."""
    return length * cost.ops / rates.matmul + length**2 / 2 * cost.attention_ops / rates.attention


def ridge_rows(cost: PassCost, rates: Rates) -> float:
    """Rows per pass up to which more rows are free (context ignored); of a mixture, a second row reads more experts."""
    if cost.expert_bytes:
        return 1.0
    return cost.weight_bytes / rates.bandwidth * rates.matmul / cost.ops


def break_even(pays: list[tuple[int, bool]]) -> int | None:
    """First batch size from which speculation never pays again; None: it pays at the largest one tried."""
    last = max((index for index, (_, good) in enumerate(pays) if good), default=-1)
    return pays[last + 1][0] if last + 1 < len(pays) else None
