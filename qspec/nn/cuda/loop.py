"""The speculative loop on a device: draft, verify, commit and roll back, in one graph per step, the host out of it.

B sequences, each in its slot of both caches; K drafts and R = K + 1 rows of a step; S steps between two readings; V
vocabulary; E stop tokens; U uniform numbers that a sequence has for a step, 2 K + 1 of them used.

**Roll-back is a number.** Before a step the target's cache holds `lengths` positions, all committed tokens but the
newest. The step writes K + 1 behind them; rejected drafts are overwritten later. The draft's cache may lack the last
position (an accepted draft is never fed to its own model), so its first pass of a step reads the last *two* tokens and
writes that position anew: no case to tell apart, and nothing to remember.

Sequences at rest (`left` 0) run along and change nothing: their slots may be those of others, who write them elsewhere.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from qspec.errors import RecipeError
from qspec.nn.cuda.passes import NODES, Captured, Inputs, Passes, batch_bucket, graph_memory, head
from qspec.numerics.speculation.probs import sample
from qspec.ops import cuda as ops

Distribution = Callable[[Tensor], Tensor]
"""Logits `[…, V]` to probabilities."""


class DraftRule(Protocol):
    """How tokens are drafted and judged, without a word to the host. `draws`: it needs uniform numbers."""

    draws: bool

    def draft(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens `[B]`, and the distributions `[B, V]` that they were drawn from; None for tokens that are certain."""

    def verify(
        self, logits_BRV: Tensor, drafts_BK: Tensor, probs_BKV: Tensor | None, uniforms_BR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many drafts are accepted `[B]`, and the token behind them `[B]`."""


class Greedy:
    """The likeliest token, always."""

    draws = False

    def draft(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor | None]:
        return logits_BV.argmax(-1), None

    def verify(
        self, logits_BRV: Tensor, drafts_BK: Tensor, probs_BKV: Tensor | None, uniforms_BR: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ops.verify_greedy(logits_BRV, drafts_BK)


class Sampled:
    """Tokens drawn from a distribution, by the same rule for target and draft."""

    draws = True

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution

    def draft(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor | None]:
        probs_BV = self._distribution(logits_BV)
        return sample(probs_BV, uniforms_B), probs_BV

    def verify(
        self, logits_BRV: Tensor, drafts_BK: Tensor, probs_BKV: Tensor | None, uniforms_BR: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ops.verify_sampling(self._distribution(logits_BRV), drafts_BK, probs_BKV, uniforms_BR)


class Synthetic(Greedy):
    """Greedy work in full, but drafts are accepted with a given chance, one after the other: for timing alone."""

    draws = True

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def verify(
        self, logits_BRV: Tensor, drafts_BK: Tensor, probs_BKV: Tensor | None, uniforms_BR: Tensor
    ) -> tuple[Tensor, Tensor]:
        super().verify(logits_BRV, drafts_BK, probs_BKV, uniforms_BR)
        accepted_B = (uniforms_BR[:, :-1] < self._alpha).long().cumprod(1).sum(1)
        return accepted_B, logits_BRV.argmax(-1).gather(1, accepted_B[:, None])[:, 0]


@dataclass(frozen=True)
class LoopState:
    """State that steps read and write in place, int64. `previous` precedes `newest`; `left`: tokens still to be made.

    turn_1: where in the ring of S steps the next one is written. For each: tokens, how many of them were committed, how
    many drafts were accepted.
    """

    previous_B: Tensor
    newest_B: Tensor
    lengths_B: Tensor
    left_B: Tensor
    turn_1: Tensor
    tokens_SBR: Tensor
    counts_SB: Tensor
    accepted_SB: Tensor
    uniforms_SBU: Tensor

    @classmethod
    def empty(cls, batch: int, drafts: int, steps: int, device: torch.device) -> "LoopState":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(
            previous_B=zeros(batch),
            newest_B=zeros(batch),
            lengths_B=zeros(batch),
            left_B=zeros(batch),
            turn_1=zeros(1),
            tokens_SBR=zeros(steps, batch, drafts + 1),
            counts_SB=zeros(steps, batch),
            accepted_SB=zeros(steps, batch),
            uniforms_SBU=torch.zeros(steps, batch, 2 * drafts + 1, dtype=torch.float64, device=device),
        )


class CudaLoop:
    """Sequences of a target and, where drafts are asked for, of a draft model, in slots of equal number.

    drafts: most of a step; steps: most between two readings; tokens: ids that are no padding of either vocabulary.
    """

    def __init__(
        self,
        target: Passes,
        draft: Passes | None,
        rule: DraftRule,
        drafts: int,
        eos_ids: Collection[int] = (),
        steps: int = 8,
        tokens: int | None = None,
    ) -> None:
        if drafts >= NODES:
            raise RecipeError(f"{drafts} drafts", f"a pass holds {NODES} rows", f"draft at most {NODES - 1}")
        self.target, self.draft, self.rule, self.drafts = target, draft, rule, drafts
        self.sequences, self.steps = target.cache.sequences, steps
        self._device, self._vocab = target.model.device, target.model.arch.vocab_size
        self._tokens = tokens or min(half.model.arch.vocab_size for half in (target, draft) if half)
        self.eos_ids = frozenset(eos_ids)
        self._eos_E = torch.tensor(sorted(self.eos_ids), dtype=torch.long, device=self._device)
        self.state = LoopState.empty(self.sequences, drafts, steps, self._device)
        self._memory = graph_memory(self._device)
        self._graphs: dict[tuple[int, int], Captured[None]] = {}

    @property
    def room(self) -> int:
        """Positions that prompt and new tokens of a sequence may take: the last drafts need some behind them."""
        return min(half.cache.length for half in (self.target, self.draft) if half) - self.drafts

    def check(self, prompt: int, new: int) -> None:
        """Raises `RecipeError` where a prompt of so many tokens and its answer have no room."""
        if prompt + new > self.room:
            rule = f"caches of {self.target.cache.length} leave {self.room} beside {self.drafts} drafts"
            raise RecipeError(f"{prompt} + {new} tokens", rule, "make them longer, or ask for fewer")

    @torch.inference_mode()
    def begin(self, slot: int, prompt_T: Tensor, new: int, uniform_1: Tensor) -> int:
        """Read a prompt into a slot, to be continued by up to `new` tokens; the first of them. Raises as `check`."""
        self.check(len(prompt_T), new)
        state, hidden_TH = self.state, self.target.read(slot, prompt_T, 0)
        if self.draft is not None:
            self.draft.read(slot, prompt_T, 0)
        logits_11V, _ = head(self.target.model, hidden_TH[None, -1:])
        none_10 = torch.empty(1, 0, dtype=torch.long, device=self._device)
        token = int(self.rule.verify(logits_11V, none_10, None, uniform_1[None].to(self._device))[1])
        state.previous_B[slot], state.newest_B[slot] = int(prompt_T[-1]), token
        state.lengths_B[slot], state.left_B[slot] = len(prompt_T), 0 if token in self.eos_ids else new - 1
        return token

    def rest(self) -> None:
        """Let go of all sequences, also of those that an error has left in the middle."""
        self.state.left_B.zero_()

    @torch.inference_mode()
    def capture(self, drafts: int, batch: int) -> Captured[None]:
        """The graph of a step of that many drafts for the first `batch` slots; captured while all sequences rest."""
        batch = batch_bucket(batch, self.sequences)
        if (drafts, batch) not in self._graphs:
            left_B = self.state.left_B.clone()
            self.rest()
            self._graphs[drafts, batch] = Captured(lambda: self.step(drafts, batch), self._device, self._memory)
            self.state.left_B.copy_(left_B)
        return self._graphs[drafts, batch]

    @torch.inference_mode()
    def run(self, drafts: int, batch: int, steps: int) -> None:
        """Enqueue steps with `drafts` drafts for the sequences in the first `batch` slots; at most `self.steps`."""
        assert drafts <= (self.drafts if self.draft else 0), f"{drafts} drafts"
        assert steps <= self.steps, f"{steps} steps"
        graph = self.capture(drafts, batch)
        self.state.turn_1.zero_()
        for _ in range(steps):
            graph()

    @torch.inference_mode()
    def read(self, batch: int, steps: int) -> tuple[list[list[list[int]]], list[list[int]]]:
        """Results of the last `steps`, by slot and step: committed tokens, and accepted drafts. The host waits."""
        state = self.state
        parts = state.tokens_SBR, state.counts_SB[..., None], state.accepted_SB[..., None]
        rows = torch.cat(parts, -1)[:steps, :batch].transpose(0, 1).tolist()
        return [[row[: row[-2]] for row in own] for own in rows], [[row[-1] for row in own] for own in rows]

    def feed(self, uniforms_SBU: Tensor) -> None:
        """Uniform numbers of the coming steps, for the first slots."""
        s, b, u = uniforms_SBU.shape
        self.state.uniforms_SBU[:s, :b, :u].copy_(uniforms_SBU)

    def step(self, drafts: int, batch: int) -> None:
        """One step for all. Reads nothing on the host."""
        s, b = self.state, slice(batch)
        uniforms_BU = s.uniforms_SBU.index_select(0, s.turn_1)[0, b]
        drafts_BK, probs_BKV = self._draft(drafts, batch, uniforms_BU)
        given = self._behind(self.target, torch.cat([s.newest_B[b, None], drafts_BK], 1), s.lengths_B[b])
        logits_BRV, _ = self.target.run(given)
        judged = self.rule.verify(logits_BRV, drafts_BK, probs_BKV, uniforms_BU[:, drafts : 2 * drafts + 1])
        self._commit(given.tokens_BR, *judged)
        s.turn_1.add_(1).remainder_(self.steps)

    def _draft(self, count: int, batch: int, uniforms_BU: Tensor) -> tuple[Tensor, Tensor | None]:
        s, b = self.state, slice(batch)
        tokens, probs = [s.newest_B[b, None][:, :0]], list[Tensor]()
        rows_BR, lengths_B = torch.stack([s.previous_B[b], s.newest_B[b]], 1), (s.lengths_B[b] - 1).clamp(min=0)
        for i in range(count):
            assert self.draft is not None
            logits_BRV, _ = self.draft.run(self._behind(self.draft, rows_BR, lengths_B))
            token_B, probs_BV = self.rule.draft(logits_BRV[:, -1, : self._tokens], uniforms_BU[:, i])
            lengths_B = lengths_B + rows_BR.shape[1]
            rows_BR = token_B[:, None]
            tokens.append(rows_BR)
            if probs_BV is not None:
                probs.append(pad(probs_BV, (0, self._vocab - probs_BV.shape[1])))
        return torch.cat(tokens, 1), torch.stack(probs, 1) if probs else None

    def _behind(self, half: Passes, tokens_BR: Tensor, lengths_B: Tensor) -> Inputs:
        """The next rows of every sequence; those of one at rest go to the spare position."""
        given, rests_B = Inputs.chain(tokens_BR, lengths_B), self.state.left_B[: len(tokens_BR)] == 0
        return replace(given, slots_BR=given.slots_BR.masked_fill(rests_B[:, None], half.cache.length))

    def _commit(self, rows_BR: Tensor, accepted_B: Tensor, next_B: Tensor) -> None:
        """Keep what stands, up to a stop token or the end; the newest token is the last of it."""
        s, (batch, size) = self.state, rows_BR.shape
        b, accepted_B1 = slice(batch), accepted_B.long()[:, None]
        made_BR = torch.cat([rows_BR[:, 1:], next_B[:, None]], 1).scatter(1, accepted_B1, next_B[:, None])
        stops_BR = (made_BR[..., None] == self._eos_E).any(-1)
        row_R = torch.arange(size, device=rows_BR.device)
        kept_BR = (
            (row_R <= accepted_B1) & (row_R < s.left_B[b, None]) & (stops_BR.long().cumsum(1) - stops_BR.long() == 0)
        )
        count_B = kept_BR.sum(1)
        last_B1, lives_B = (count_B - 1).clamp(min=0)[:, None], count_B > 0
        for mine, rows in ((s.previous_B, rows_BR), (s.newest_B, made_BR)):
            mine[b] = torch.where(lives_B, rows.gather(1, last_B1)[:, 0], mine[b])
        s.lengths_B[b] += count_B
        s.left_B[b] = (s.left_B[b] - count_B) * ~(stops_BR & kept_BR).any(1)
        records = (s.tokens_SBR[:, b, :size], made_BR), (s.counts_SB[:, b], count_B), (s.accepted_SB[:, b], accepted_B)
        for record, x in records:
            record.index_copy_(0, s.turn_1, x[None].long())
