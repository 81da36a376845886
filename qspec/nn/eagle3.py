"""An EAGLE-3 head: a small transformer over the target's states of several layers, with a KV cache of its own.

    f = fc(h_a, h_b, h_c);  u = norm_u(f);  e = norm_e(E[x])
    a = f + Attn(e, u);  y = a + MLP(norm(a));  logits = lm_head(norm(y))

The row at slot p reads the states of position p and the token x at p + 1, and its logits are for p + 2. In the row
after it, y takes the place of f, until the target has read the token and its states are known.

Letters: T rows, H hidden size of the head, S states of all tapped layers side by side, D ids that can be drafted, V
vocabulary, L slots of the cache, N heads of attention, K their size.
Source: arXiv 2503.01840; SafeAILab/EAGLE and speculators, whose names the modules have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn
import torch.nn.functional as F

from qspec.nn.eager.attention import rotate

Where = torch.device | str | None
INITIAL_DEVIATION = 0.02
"""Standard deviation of new weights, as transformers has it for Llama."""
_FIRST_SLOTS = 64


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes and switches of a head.

    taps: the target's layers whose *entering* residual is read, rising, as vLLM counts them (its number of layers: the
    residual in front of the final norm). draft_vocab: ids that can be drafted, 0 for all. window: slots that a row
    sees, 0 for all. rope_scaling: what config.json says of rotations beside `rope_theta`, if they are scaled;
    rope_inv_freq: the frequencies that come of this, else empty.

    norm_before_residual: f is normed before it is added to, not only before it is read. norm_before_fc: one norm over
    the states of all taps; fc_norm: one for each tap. norm_output: the next row reads y as normed. own_embedding: E is
    the head's, not the target's.
    """

    hidden_size: int
    target_hidden: int
    taps: tuple[int, ...]
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab: int = 0
    n_layers: int = 1
    window: int = 0
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | int | str], ...] = ()
    rope_inv_freq: tuple[float, ...] = ()
    rope_factor: float = 1.0
    norm_eps: float = 1e-5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    own_embedding: bool = False

    @property
    def states(self) -> int:
        """Numbers that a row reads of its target."""
        return len(self.taps) * self.target_hidden

    @property
    def drafted(self) -> int:
        """Ids that can be drafted."""
        return self.draft_vocab or self.vocab_size

    @cached_property
    def inv_freq(self) -> Tensor:
        """Frequencies of the rotations `[K / 2]`."""
        if self.rope_inv_freq:
            return torch.tensor(self.rope_inv_freq)
        return self.rope_theta ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)


class Attention(Protocol):
    """Keys and values that rows of a head read: a `HeadCache`, or in training those of a whole batch."""

    def attend(self, layer: int, q_NTK: Tensor, k_NTK: Tensor, v_NTK: Tensor) -> Tensor:
        """Take the rows' keys and values; what the rows read, heads side by side `[T, N * K]`."""


class HeadCache:
    """Keys and values of one sequence, by layer and slot; grows as it must. `length`: slots that are filled."""

    def __init__(self, shape: Eagle3Shape) -> None:
        self._layers, self._window, self.length = shape.n_layers, shape.window, 0
        self._kv_2NLK = [torch.empty(2, shape.n_kv_heads, _FIRST_SLOTS, shape.head_dim) for _ in range(self._layers)]

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on."""
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length}"
        self.length = length

    def attend(self, layer: int, q_NTK: Tensor, k_NTK: Tensor, v_NTK: Tensor) -> Tensor:
        """Fill the next T slots of a layer, the last of the layers moves on; each row sees the slots up to its own."""
        start, count = self.length, q_NTK.shape[1]
        end = start + count
        kv_2NLK = self._roomy(layer, end)
        kv_2NLK[:, :, start:end] = torch.stack((k_NTK, v_NTK))
        if layer == self._layers - 1:
            self.length = end
        k_NLK, v_NLK = kv_2NLK[:, :, :end]
        return attend(q_NTK, k_NLK, v_NLK, None if count == 1 and not self._window else self._mask(count, end))

    def _mask(self, count: int, end: int) -> Tensor:
        """The slots that each of the newest `count` rows sees `[count, end]`."""
        row, slot = torch.arange(end - count, end)[:, None], torch.arange(end)[None]
        seen_TL = slot <= row
        return seen_TL & (slot > row - self._window) if self._window else seen_TL

    def _roomy(self, layer: int, slots: int) -> Tensor:
        old = self._kv_2NLK[layer]
        if slots > old.shape[2]:
            grown = old.new_empty(*old.shape[:2], max(slots, 2 * old.shape[2]), old.shape[3])
            grown[:, :, : self.length] = old[:, :, : self.length]
            self._kv_2NLK[layer] = grown
        return self._kv_2NLK[layer]


class JoinedCaches:
    """Caches of several sequences, the rows of one behind those of the other: `counts` rows of each."""

    def __init__(self, caches: Sequence[HeadCache], counts: Sequence[int]) -> None:
        self._caches, self._counts = caches, list(counts)

    def attend(self, layer: int, q_NTK: Tensor, k_NTK: Tensor, v_NTK: Tensor) -> Tensor:
        parts = zip(self._caches, *(x.split(self._counts, 1) for x in (q_NTK, k_NTK, v_NTK)), strict=True)
        return torch.cat([cache.attend(layer, *rows) for cache, *rows in parts])


def attend(q_NTK: Tensor, k_NLK: Tensor, v_NLK: Tensor, mask_TL: Tensor | None) -> Tensor:
    """Softmax attention, heads side by side `[T, N * K]`; mask: of what each row sees, None for everything."""
    gqa = q_NTK.shape[0] != k_NLK.shape[0]
    out_NTK = F.scaled_dot_product_attention(q_NTK[None], k_NLK[None], v_NLK[None], mask_TL, enable_gqa=gqa)[0]
    return out_NTK.transpose(0, 1).flatten(1)


class HeadAttention(nn.Module):
    """Attention whose keys and values lie elsewhere."""

    def __init__(self, shape: Eagle3Shape, inputs: int, device: Where = None) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=False, device=device)
        self.k_proj = nn.Linear(inputs, keys, bias=False, device=device)
        self.v_proj = nn.Linear(inputs, keys, bias=False, device=device)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False, device=device)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, shape.norm_eps, device=device) if shape.qk_norm else None for _ in range(2)
        )

    def forward(
        self, x_TH: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """rope: cosines and sines `[T, K]` of the rows."""
        q, k, v = (
            proj(x_TH).view(len(x_TH), -1, self.head_dim).transpose(0, 1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        y_TH: Tensor = self.o_proj(attend(rotate(q, *rope), rotate(k, *rope), v))
        return y_TH


class HeadMlp(nn.Module):
    """A gated MLP, as Llama's."""

    def __init__(self, shape: Eagle3Shape, device: Where = None) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False, device=device) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False, device=device)

    def forward(self, x_TH: Tensor) -> Tensor:
        y_TH: Tensor = self.down_proj(F.silu(self.gate_proj(x_TH)) * self.up_proj(x_TH))
        return y_TH


class HeadLayer(nn.Module):
    """A decoder layer; the first one reads a token beside the state."""

    def __init__(self, shape: Eagle3Shape, first: bool, device: Where = None) -> None:
        super().__init__()
        size = shape.hidden_size
        self.norm_before_residual = shape.norm_before_residual
        norm = partial(nn.RMSNorm, size, shape.norm_eps, device=device)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.hidden_norm = norm() if first else None
        self.self_attn = HeadAttention(shape, 2 * size if first else size, device)
        self.mlp = HeadMlp(shape, device)

    def forward(
        self,
        x_TH: Tensor,
        e_TH: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        if self.hidden_norm is None:
            inputs_TH = self.input_layernorm(x_TH)
        else:
            u_TH = self.hidden_norm(x_TH)
            inputs_TH = torch.cat((self.input_layernorm(e_TH), u_TH), -1)
            x_TH = u_TH if self.norm_before_residual else x_TH
        x_TH = x_TH + self.self_attn(inputs_TH, rope, attend)
        y_TH: Tensor = x_TH + self.mlp(self.post_attention_layernorm(x_TH))
        return y_TH


class Eagle3(nn.Module):
    """The head, in float32. `ids_D`: the ids that can be drafted, rising; None: all."""

    ids_D: Tensor | None
    rows_VH: Tensor | None

    def __init__(
        self,
        shape: Eagle3Shape,
        ids_D: Tensor | None = None,
        embedding_VH: Tensor | None = None,
        device: Where = None,
    ) -> None:
        """embedding_VH: the target's, which is read as it is by a head without its own."""
        super().__init__()
        self.shape, size = shape, shape.hidden_size
        norm = partial(nn.RMSNorm, eps=shape.norm_eps, device=device)
        self.register_buffer("ids_D", ids_D, persistent=False)
        self.register_buffer("rows_VH", None if shape.own_embedding else embedding_VH, persistent=False)
        assert shape.own_embedding or embedding_VH is not None, "a head without an embedding reads the target's"
        self.embed_tokens = nn.Embedding(shape.vocab_size, size, device=device) if shape.own_embedding else None
        self.input_norm = norm(shape.states) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList([norm(shape.target_hidden) for _ in shape.taps] if shape.fc_norm else [])
        self.fc = nn.Linear(shape.states, size, bias=False, device=device)
        self.layers = nn.ModuleList([HeadLayer(shape, i == 0, device) for i in range(shape.n_layers)])
        self.norm = norm(size)
        self.lm_head = nn.Linear(size, shape.drafted, bias=False, device=device)

    def fuse(self, states_TS: Tensor) -> Tensor:
        """f `[T, H]` of the target's states, those of the taps side by side."""
        if self.input_norm is not None:
            states_TS = self.input_norm(states_TS)
        if self.fc_norm:
            parts = zip(self.fc_norm, states_TS.split(self.shape.target_hidden, -1), strict=True)
            states_TS = torch.cat([norm(part) for norm, part in parts], -1)
        f_TH: Tensor = self.fc(states_TS)
        return f_TH

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embeddings `[T, H]`, never scaled (as vLLM reads them)."""
        if self.embed_tokens is not None:
            e_TH: Tensor = self.embed_tokens(tokens_T)
            return e_TH
        assert self.rows_VH is not None
        return F.embedding(tokens_T, self.rows_VH).float()

    def run(self, f_TH: Tensor, tokens_T: Tensor, positions_T: Tensor, cache: Attention) -> Tensor:
        """y `[T, H]` of rows of f, the tokens behind their positions, and those positions."""
        e_TH, rope, x_TH = self.embed(tokens_T), self.rope(positions_T), f_TH
        for i, layer in enumerate(self.layers):
            x_TH = layer(x_TH, e_TH, rope, partial(cache.attend, i))
        return x_TH

    def rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[T, K]`, the halves repeated."""
        angles_TK = torch.outer(positions_T.float(), self.shape.inv_freq.to(positions_T.device)).repeat(1, 2)
        return angles_TK.cos() * self.shape.rope_factor, angles_TK.sin() * self.shape.rope_factor

    def logits(self, y_TH: Tensor) -> Tensor:
        """Logits `[T, D]`."""
        logits_TD: Tensor = self.lm_head(self.norm(y_TH))
        return logits_TD

    def feed(self, y_TH: Tensor) -> Tensor:
        """f of the next row, as long as the target's states are not known."""
        if not self.shape.norm_output:
            return y_TH
        f_TH: Tensor = self.norm(y_TH)
        return f_TH


@torch.no_grad()
def initialize(head: Eagle3, generator: torch.Generator, output_VH: Tensor | None = None) -> None:
    """Linear layers and an embedding of its own ~ N(0, 0.02); norms are ones.

    output_VH: the target's output rows, which a head of the target's hidden size may begin with as its own.
    """
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0, INITIAL_DEVIATION, generator=generator)
    if output_VH is not None:
        assert head.shape.hidden_size == head.shape.target_hidden, "rows of another size"
        head.lm_head.weight.copy_(output_VH if head.ids_D is None else output_VH[head.ids_D])
