"""The EAGLE-3 head against a plain reference, its cache, and what a batch shares."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qspec.nn.cpp.int8_map import Int8Map
from qspec.nn.eagle3 import Eagle3, Eagle3Shape, HeadCache, JoinedCaches, initialize
from qspec.nn.mlp_speculator import swap_linears

SHAPE = Eagle3Shape(
    hidden_size=32,
    target_hidden=32,
    taps=(0, 1, 3),
    intermediate_size=48,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=40,
    draft_vocab=12,
)
IDS_D = torch.arange(1, 37, 3)
FLAGS = [field.name for field in fields(Eagle3Shape) if field.type in (bool, "bool")]
LENGTH = 9


def a_head(shape: Eagle3Shape = SHAPE, seed: int = 0) -> Eagle3:
    """Random weights, larger than new ones, and norms that are not ones."""
    generator = torch.Generator().manual_seed(seed)
    ids_D = IDS_D if shape.draft_vocab else None
    head = Eagle3(shape, ids_D, torch.randn(shape.vocab_size, shape.hidden_size, generator=generator))
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1 + 0.3 * noise)
    return head.eval().requires_grad_(False)


def inputs(shape: Eagle3Shape = SHAPE, seed: int = 1) -> tuple[Tensor, Tensor]:
    """States of positions, and the tokens behind them."""
    generator = torch.Generator().manual_seed(seed)
    states_TS = torch.randn(LENGTH, shape.states, generator=generator)
    return states_TS, torch.randint(shape.vocab_size, (LENGTH,), generator=generator)


class Reference:
    """The forward pass of the papers, row by row in plain torch: `tensors` by name, `shape` for switches alone."""

    def __init__(self, tensors: dict[str, Tensor], shape: Eagle3Shape, embedding_VH: Tensor) -> None:
        self.w, self.shape = tensors, shape
        self.embedding_VH = tensors.get("embed_tokens.weight", embedding_VH)
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(shape.n_layers)]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + self.shape.norm_eps).sqrt() * self.w[f"{name}.weight"]

    def fuse(self, states_S: Tensor) -> Tensor:
        if self.shape.norm_before_fc:
            states_S = self.norm(states_S, "input_norm")
        if self.shape.fc_norm:
            parts = states_S.view(-1, self.shape.target_hidden)
            states_S = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.w["fc.weight"] @ states_S

    def step(self, f_H: Tensor, token: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """y, logits, and the next f; keys and values of the row are appended."""
        s, x_H = self.shape, f_H
        for i, rows in enumerate(self.rows):
            base = f"layers.{i}"
            if i == 0:
                u_H = self.norm(x_H, f"{base}.hidden_norm")
                given = torch.cat([self.norm(self.embedding_VH[token], f"{base}.input_layernorm"), u_H])
                x_H = u_H if s.norm_before_residual else x_H
            else:
                given = self.norm(x_H, f"{base}.input_layernorm")
            q, k, v = (
                (self.w[f"{base}.self_attn.{n}_proj.weight"] @ given).view(-1, s.head_dim) for n in ("q", "k", "v")
            )
            if s.qk_norm:
                q, k = (
                    torch.stack([self.norm(h, f"{base}.self_attn.{name}_norm") for h in x])
                    for x, name in ((q, "q"), (k, "k"))
                )
            rows.append((self.turned(k, position), v))
            seen = rows[-s.window :]
            out = [self.read(h, j * s.n_kv_heads // s.n_heads, seen) for j, h in enumerate(self.turned(q, position))]
            x_H = x_H + self.w[f"{base}.self_attn.o_proj.weight"] @ torch.cat(out)
            given = self.norm(x_H, f"{base}.post_attention_layernorm")
            gate, up = (self.w[f"{base}.mlp.{n}_proj.weight"] @ given for n in ("gate", "up"))
            x_H = x_H + self.w[f"{base}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        normed = self.norm(x_H, "norm")
        return x_H, self.w["lm_head.weight"] @ normed, normed if s.norm_output else x_H

    def turned(self, x_NK: Tensor, position: int) -> Tensor:
        half = x_NK.shape[1] // 2
        angles = position / self.shape.rope_theta ** (torch.arange(half) / half)
        a, b = x_NK[:, :half], x_NK[:, half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], 1)

    def read(self, q_K: Tensor, key_head: int, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        scores = torch.stack([q_K @ k[key_head] for k, _ in rows]) / self.shape.head_dim**0.5
        return (scores.softmax(0)[:, None] * torch.stack([v[key_head] for _, v in rows])).sum(0)

    def chain(self, states_TS: Tensor, tokens_T: Tensor, steps: int) -> Iterator[Tensor]:
        """Logits behind the last of the rows, then of steps that read their own outputs and likeliest drafts."""
        for position, (states_S, token) in enumerate(zip(states_TS, tokens_T.tolist(), strict=True)):
            _, logits_D, f_H = self.step(self.fuse(states_S), token, position)
        yield logits_D
        for i in range(1, steps):
            best = int(logits_D.argmax())
            token = int(IDS_D[best]) if self.shape.draft_vocab else best
            _, logits_D, f_H = self.step(f_H, token, len(states_TS) + i - 1)
            yield logits_D


def chain(head: Eagle3, states_TS: Tensor, tokens_T: Tensor, steps: int) -> Iterator[Tensor]:
    """The same by the head: all rows in one pass, then one by one."""
    cache, ids_D = HeadCache(head.shape), torch.arange(head.shape.vocab_size) if head.ids_D is None else head.ids_D
    y_TH = head.run(head.fuse(states_TS), tokens_T, torch.arange(len(tokens_T)), cache)
    for i in range(steps):
        logits_1D = head.logits(y_TH[-1:])
        yield logits_1D[0]
        tokens_1, position_1 = ids_D[logits_1D.argmax(-1)], torch.tensor([len(tokens_T) + i])
        y_TH = head.run(head.feed(y_TH[-1:]), tokens_1, position_1, cache)


VARIANTS: list[dict[str, Any]] = [
    {},
    *({flag: True} for flag in FLAGS),
    dict.fromkeys(FLAGS, True),
    {"n_layers": 2, "norm_before_residual": True, "qk_norm": True},
    {"draft_vocab": 0, "rope_theta": 500.0},
    {"taps": (2,), "fc_norm": True},
    {"window": 3},
    {"target_hidden": 24, "own_embedding": True, "fc_norm": True},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_chains_equal_the_reference(changes):
    """Would catch a norm at the wrong place, halves swapped, a wrong rotation, or a step that reads another output."""
    shape = replace(SHAPE, **changes)
    head, (states_TS, tokens_T) = a_head(shape), inputs(shape)
    rows_VH = torch.zeros(0) if head.rows_VH is None else head.rows_VH
    reference = Reference(dict(head.state_dict()), shape, rows_VH)
    for got, want in zip(chain(head, states_TS, tokens_T, 4), reference.chain(states_TS, tokens_T, 4), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)  # float32, sums in another order


def test_rolled_back_rows_leave_no_trace():
    """Would catch slots of rejected drafts that later rows still see, or rooms that lose rows as they grow."""
    head, (states_TS, tokens_T) = a_head(replace(SHAPE, n_layers=2)), inputs()
    f_TH, cache, other = head.fuse(states_TS), HeadCache(head.shape), HeadCache(head.shape)
    whole_TH = head.run(f_TH, tokens_T, torch.arange(LENGTH), other)
    head.run(f_TH[:4], tokens_T[:4], torch.arange(4), cache)
    for position in range(4, 104):
        head.run(f_TH[:1], tokens_T[:1], torch.tensor([position]), cache)
    cache.truncate(4)
    rest_TH = head.run(f_TH[4:], tokens_T[4:], torch.arange(4, LENGTH), cache)
    torch.testing.assert_close(rest_TH, whole_TH[4:], atol=1e-5, rtol=1e-5)
    assert cache.length == other.length == LENGTH


def test_sequences_share_a_pass():
    """Would catch a sequence that reads another one's keys, or rows given to the wrong cache."""
    head, (states_TS, tokens_T) = a_head(), inputs()
    f_TH, counts = head.fuse(states_TS), (2, 6, 1)
    positions_T = torch.cat([torch.arange(count) for count in counts])
    caches = [HeadCache(SHAPE) for _ in counts]
    together = head.run(f_TH, tokens_T, positions_T, JoinedCaches(caches, counts)).split(counts)
    parts = zip(f_TH.split(counts), tokens_T.split(counts), positions_T.split(counts), strict=True)
    for got, part, cache in zip(together, parts, caches, strict=True):
        torch.testing.assert_close(got, head.run(*part, HeadCache(SHAPE)), atol=1e-5, rtol=1e-5)
        assert cache.length == len(got)


def test_int8_layers_take_the_place_of_linear_ones():
    """Would catch a linear layer that stays in float, or a head whose parts cannot be replaced."""
    head, given = a_head(), inputs()
    exact = torch.stack(list(chain(head, *given, 1)))
    swap_linears(head, lambda linear: Int8Map.rounded(linear.weight))
    assert not any(isinstance(module, nn.Linear) for module in head.modules())
    rounded = torch.stack(list(chain(head, *given, 1)))
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()  # eight bits each of weights and inputs


def test_new_heads_learn():
    """Would catch parts that no gradient reaches, the target's embedding trained, rows of other ids to begin with."""
    generator = torch.Generator().manual_seed(0)
    rows_VH = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator)
    head = Eagle3(replace(SHAPE, norm_before_fc=True, fc_norm=True, qk_norm=True), IDS_D, rows_VH)
    initialize(head, generator, rows_VH)
    assert torch.equal(head.lm_head.weight, rows_VH[IDS_D])
    states_TS, tokens_T = inputs()
    y_TH = head.run(head.fuse(states_TS), tokens_T, torch.arange(LENGTH), HeadCache(head.shape))
    head.logits(y_TH).square().sum().backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in head.parameters())
    assert "rows_VH" not in dict(head.named_parameters())
