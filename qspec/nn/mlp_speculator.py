"""A combined token/embedding speculator: a small stage per drafted token, fed by the state before and the token chosen.

    z = emb_i(token);  s = proj_i(s) + (w_emb / w_state) z;  s = GELU(ln_i(s));  logits = head_i(s)

s starts as the target's final-norm hidden state. A head may draft from a part of the target's vocabulary only, and may
share the target's embedding and output rows behind learned maps, `emb_i = E A` and `head_i = E' B`: then nothing as
large as a vocabulary is trained or stored. Letters: T rows, H hidden size of the target, I inner size, V its
vocabulary, D the draft's, N heads.
Source: arXiv 2404.19124; foundation-model-stack/fms-extras, models/speculator.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
import math

import torch
from torch import Tensor, nn
import torch.nn.functional as F

NORM_EPS = 1e-6
Where = torch.device | str | None


@dataclass(frozen=True)
class SpeculatorShape:
    """Sizes and switches, named as in `config.json` of ibm-ai-platform's accelerators; `inner_dim` 0 is `emb_dim`.

    draft_vocab: ids that can be drafted, 0 for all. shared: embedding and output rows are the target's.
    """

    emb_dim: int
    vocab_size: int
    n_predict: int = 3
    inner_dim: int = 0
    tie_weights: bool = False
    scale_input: bool = False
    draft_vocab: int = 0
    shared: bool = False

    @property
    def inner(self) -> int:
        return self.inner_dim or self.emb_dim

    @property
    def drafted(self) -> int:
        """Ids that can be drafted."""
        return self.draft_vocab or self.vocab_size

    @property
    def state_weight(self) -> float:
        """Share of the state: after all heads half of what counts is still the target's."""
        return float(0.5 ** (0.5 / self.n_predict))

    @property
    def emb_weight(self) -> float:
        return math.sqrt((1 - self.state_weight**2) * (self.inner / 2))


class ShiftedNorm(nn.Module):
    """RMS norm with a learned scale and shift."""

    def __init__(self, size: int, device: Where = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.bias = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return normed(x) * self.weight + self.bias


class SharedEmbedding(nn.Module):
    """The target's embedding `[V, H]` and a learned map to the inner size."""

    rows: Tensor

    def __init__(self, rows_VH: Tensor, inner: int, device: Where = None) -> None:
        super().__init__()
        self.register_buffer("rows", rows_VH, persistent=False)
        self.map = nn.Linear(rows_VH.shape[1], inner, bias=False, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.rows)
        z: Tensor = self.map(rows.float() if rows.element_size() < 4 else rows)
        return z


class SharedHead(nn.Module):
    """A learned map to the target's hidden size, and its output rows `[D, H]`: one layer for all heads, not trained."""

    def __init__(self, rows: nn.Linear, inner: int, device: Where = None) -> None:
        super().__init__()
        self.map = nn.Linear(inner, rows.in_features, bias=False, device=device)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.rows(self.map(x))
        return logits


class MLPSpeculator(nn.Module):
    """The heads, in float32. `ids_D`: the ids that can be drafted, rising; None: all."""

    ids_D: Tensor | None

    def __init__(
        self,
        shape: SpeculatorShape,
        ids_D: Tensor | None = None,
        embedding_VH: Tensor | None = None,
        output_VH: Tensor | None = None,
        device: Where = None,
    ) -> None:
        """embedding_VH, output_VH: the target's; a shared head reads the first as it is, and rows of the other."""
        super().__init__()
        self.shape = shape
        self.register_buffer("ids_D", ids_D, persistent=False)
        n, inner = shape.n_predict, shape.inner
        own = range(1 if shape.tie_weights else n)
        embs: list[nn.Module]
        heads: list[nn.Module]
        if shape.shared:
            assert embedding_VH is not None, "a shared head needs the target's embedding"
            assert output_VH is not None, "and its output rows"
            rows = _frozen((output_VH if ids_D is None else output_VH[ids_D]).float())
            embs = [SharedEmbedding(embedding_VH, inner, device=device) for _ in own]
            heads = [SharedHead(rows, inner, device=device) for _ in own]
        else:
            embs = [nn.Embedding(shape.vocab_size, inner, device=device) for _ in own]
            heads = [nn.Linear(inner, shape.drafted, bias=False, device=device) for _ in own]
        norms = [ShiftedNorm(inner, device=device) for _ in own]
        first = nn.Linear(shape.emb_dim, inner, bias=False, device=device)
        later = [nn.Linear(inner, inner, bias=False, device=device) for _ in own[: n - 1]]
        self.emb, self.head, self.ln = (nn.ModuleList((part * n)[:n]) for part in (embs, heads, norms))
        self.proj = nn.ModuleList([first, *(later * n)[: n - 1]])

    def begin(self, hidden_TH: Tensor) -> Tensor:
        """The state in front of the first head, of the target's final-norm hidden states."""
        return normed(hidden_TH) / math.sqrt(2) if self.shape.scale_input else hidden_TH

    def advance(self, i: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Head `i`: the state behind `tokens`, and logits `[T, D]` of what follows them."""
        z = self.emb[i](tokens)
        state = torch.add(self.proj[i](state), z, alpha=self.shape.emb_weight / self.shape.state_weight)
        state = F.gelu(self.ln[i](state))
        return state, self.head[i](state)

    def forward(self, hidden_TH: Tensor, tokens_TN: Tensor) -> list[Tensor]:
        """Logits `[T, D]` of every head; column i of `tokens_TN` is the token `i + 1` behind the state."""
        state, logits = self.begin(hidden_TH), list[Tensor]()
        for i in range(tokens_TN.shape[1]):
            state, logits_TD = self.advance(i, state, tokens_TN[:, i])
            logits.append(logits_TD)
        return logits


def _frozen(weight_NK: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    return linear


def normed(x: Tensor) -> Tensor:
    """Divided by the root of the mean square of its last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)


@torch.no_grad()
def initialize(head: MLPSpeculator, generator: torch.Generator) -> None:
    """Embeddings and linear layers ~ N(0, 1 / inner), as the source does; a shared embedding gives such values."""
    deviation = head.shape.inner**-0.5
    for module in dict.fromkeys(head.modules()):
        if isinstance(module, nn.Embedding | nn.Linear) and module.weight.requires_grad:
            module.weight.normal_(0, deviation, generator=generator)
    for emb in dict.fromkeys(head.emb):
        if isinstance(emb, SharedEmbedding):
            emb.map.weight /= emb.rows.float().square().mean().sqrt() * emb.rows.shape[1] ** 0.5


@torch.no_grad()
def start_from(head: MLPSpeculator, embedding_VH: Tensor, output_VH: Tensor) -> None:
    """Begin an unshared head with the target's embedding and output rows, at the size that `initialize` gives them.

    An inner size other than the target's fills what is common and leaves the rest as it is.
    """
    deviation, size = head.shape.inner**-0.5, min(head.shape.inner, head.shape.emb_dim)
    rows_DH = output_VH if head.ids_D is None else output_VH[head.ids_D]
    for emb in head.emb:
        assert isinstance(emb, nn.Embedding), "a shared head has the target's rows already"
        emb.weight[:, :size] = embedding_VH[:, :size].float() * (deviation / embedding_VH.float().std())
    for out in head.head:
        assert isinstance(out, nn.Linear)
        out.weight[:, :size] = rows_DH[:, :size].float() * (deviation / rows_DH.float().std())


def swap_linears(head: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put `make(linear)` in the place of every linear layer; a tied one is made once."""
    made: dict[nn.Module, nn.Module] = {}
    for name, module in list(head.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear):
            if module not in made:
                made[module] = make(module)
            parent, _, part = name.rpartition(".")
            setattr(head.get_submodule(parent), part, made[module])
