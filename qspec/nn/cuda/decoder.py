"""A decoder for CUDA: `nn.lm.BatchLM`, `HiddenLM`, `TappedLM` over static tensors: every pass is one captured graph.

All sequences of a model share one cache with a slot for each. T rows of a pass, V vocabulary, K nodes of a tree.
Short passes (decoding, verification) run for the first slots together; longer ones (prompts) one sequence at a time.
On a CPU everything runs the same way on the eager twins of the operations.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Self
import weakref
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qspec.errors import RecipeError
from qspec.nn.cuda.cache import CudaCache
from qspec.nn.cuda.loop import CudaLoop
from qspec.nn.cuda.model import CudaModel, load
from qspec.nn.cuda.passes import NODES, Inputs, Passes, batch_bucket, head, row_bucket
from qspec.nn.states import States, Taps
from qspec.numerics.speculation.trees import Parents, check_path, depths
from qspec.records import LoadedModel, QuantizedModel

LOOPS = 8
"""Loops whose graphs are kept, of one draft model: the oldest goes."""


class Pool:
    """A model, its cache and graphs, and which slots are free. Shared by all sequences."""

    def __init__(self, model: CudaModel, length: int, sequences: int) -> None:
        self.passes = Passes(model, CudaCache(model, sequences, length))
        self.free = list(range(sequences))
        self._loops = WeakKeyDictionary[Pool, dict[Hashable, CudaLoop]]()

    def take(self) -> int:
        """The lowest free slot, of a cache that grows as it must: passes cover all slots below the highest in use."""
        if not self.free:
            before = self.passes.cache.sequences
            self._loops.clear()
            self.passes.grow(2 * before)
            self.free += range(before, 2 * before)
        slot = min(self.free)
        self.free.remove(slot)
        return slot

    def loop(self, draft: "Pool | None", key: Hashable, make: Callable[[Passes, Passes | None], CudaLoop]) -> CudaLoop:
        """The loop of that key over this cache, with the weights of a draft model; made if it is not there yet.

        Such weights have a cache of their own here, the same for all keys: its slots are those of this one.
        """
        loops = self._loops.setdefault(draft or self, {})
        if key not in loops:
            drafting = next((loop.draft for loop in loops.values() if loop.draft is not None), None)
            if draft is not None and drafting is None:
                model, length = draft.passes.model, draft.passes.cache.length
                drafting = Passes(model, CudaCache(model, self.passes.cache.sequences, length))
            if len(loops) == LOOPS:
                del loops[next(iter(loops))]
            loops[key] = make(self.passes, drafting if draft is not None else None)
        return loops[key]


class CudaDecoder:
    """One sequence of a model."""

    def __init__(self, pool: Pool) -> None:
        self.arch, self._pool = pool.passes.model.arch, pool
        self._length, self._states, self._taps = 0, States(), Taps()
        self._tree: Parents = ()  # nodes that wait behind `length`

    @classmethod
    def load(
        cls,
        model: LoadedModel | QuantizedModel,
        dtype: torch.dtype = torch.bfloat16,
        max_length: int | None = None,
        sequences: int = 1,
        device: torch.device | str = "cuda",
    ) -> Self:
        """Pack a model onto a device, with room for `sequences` of `max_length` positions; forks beyond make more.

        Raises `RecipeError` for what `model.obstacle` names.
        """
        place, length = torch.device(device), max_length or model.arch.max_positions
        return cls(Pool(load(model, place, dtype), length, sequences))

    @cached_property
    def slot(self) -> int:
        """Its place in the cache, taken when it is first needed."""
        slot = self._pool.take()
        weakref.finalize(self, self._pool.free.append, slot)
        return slot

    @property
    def device(self) -> torch.device:
        return self._pool.passes.model.device

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size

    @property
    def max_length(self) -> int:
        return self._pool.passes.cache.length

    @property
    def length(self) -> int:
        return self._length

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length}"
        self._states.truncate(length)
        self._taps.truncate(length)
        self._length, self._tree = length, ()

    def hold(self, length: int) -> None:
        """A loop has left that many positions in its slot. Their states are not known, and nothing is tapped."""
        self._length, self._tree, self._states, self._taps = length, (), States(), Taps()

    def hidden(self, count: int = 1) -> Tensor:
        """As `HiddenLM` says, on the CPU, where speculator heads are."""
        return self._states.newest(count).cpu()

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = Taps(layers, self.arch.hidden_size, self.arch.n_layers)
        self._pool.passes.tap(self._taps.layers)

    def tapped(self, start: int) -> Tensor:
        """As `TappedLM` says, on the CPU, where heads are."""
        return self._taps.since(start)

    @property
    def weights(self) -> Pool:
        return self._pool

    def fork(self) -> Self:
        """Another, empty sequence on the same weights."""
        return type(self)(self._pool)

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        if len(tokens_T) > NODES:
            return self._read(tokens_T, last)
        logits_TV = self.forward_many([self], [tokens_T], [None])[0]
        return logits_TV if last is None else logits_TV[-last:]

    def forward_tree(self, tokens_T: Tensor, parents_K: Parents) -> Tensor:
        return self.forward_many([self], [tokens_T], [parents_K])[0]

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        check_path(self._tree, path)
        if list(path) != list(range(len(path))):
            self._pool.passes.cache.keep(self.slot, self._length, path)
        self._states.keep(path)
        self._taps.keep(path)
        self._length, self._tree = self._length + len(path), ()

    @classmethod
    @torch.inference_mode()
    def forward_many(
        cls, sequences: Sequence["CudaDecoder"], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        pool, requests = sequences[0]._pool, list(zip(sequences, tokens, parents, strict=True))
        assert all(sequence._pool is pool for sequence in sequences), "forks of different weights"
        if any(max(len(tokens_T), len(up or ())) > NODES for _, tokens_T, up in requests):
            return [sequence._alone(tokens_T, up) for sequence, tokens_T, up in requests]
        batch, cache = max(sequence.slot for sequence in sequences) + 1, pool.passes.cache
        batch = batch_bucket(batch, cache.sequences)
        given = Inputs.padding(batch, row_bucket(max(map(len, tokens))), cache.length)
        for sequence, tokens_T, parents_K in requests:
            sequence._place(given, tokens_T, parents_K)
        logits_BRV, hidden_BRH = pool.passes(given)
        out = []
        for sequence, tokens_T, parents_K in requests:
            rows = slice(len(tokens_T))
            sequence._advance(len(tokens_T), parents_K, hidden_BRH[sequence.slot, rows].clone())
            out.append(logits_BRV[sequence.slot, rows].clone())
        return out

    def _alone(self, tokens_T: Tensor, parents_K: Parents | None) -> Tensor:
        if parents_K is None:
            return self.forward(tokens_T)
        if len(parents_K) > NODES:
            rule = f"a pass on CUDA tells {NODES} nodes apart"
            raise RecipeError(f"a tree of {len(parents_K)} nodes", rule, "draft fewer")
        return self.forward_tree(tokens_T, parents_K)

    def _place(self, given: Inputs, tokens_T: Tensor, parents_K: Parents | None) -> None:
        """Write this sequence's rows into a pass."""
        count, size = len(tokens_T), len(tokens_T) if parents_K is None else len(parents_K)
        end = self._length + size
        assert end <= self.max_length, f"{end} positions, cache holds {self.max_length}"
        up = list(range(-1, count - 1)) if parents_K is None else list(parents_K)
        assert up[: size - count] == list(self._tree[: size - count]), "another tree than the one begun"
        row = self.slot, slice(count)
        given.tokens_BR[row] = tokens_T.cpu()
        given.positions_BR[row] = self._length + torch.tensor(depths(up)[-count:])
        given.slots_BR[row] = torch.arange(end - count, end)
        given.ancestors_BR[row] = torch.tensor(ancestors(up)[-count:])
        given.lengths_B[self.slot] = self._length

    def _advance(self, count: int, parents_K: Parents | None, hidden_TH: Tensor) -> None:
        """Take states as `passes.Outputs` has them, of all rows."""
        normed_TH = hidden_TH[:, : self.arch.hidden_size].float()
        if parents_K is None:
            self._length, self._tree = self._length + count, ()
            self._states.append(normed_TH, self._length)
        else:
            self._tree = tuple(parents_K)
            self._states.offer(normed_TH, len(parents_K))
        if self._taps.layers:
            places = [self._pool.passes.taps.index(layer) for layer in self._taps.layers]
            parts = hidden_TH.split(self.arch.hidden_size, 1)
            rows_TS = torch.cat([parts[1 + place] for place in places], 1).float().cpu()
            self._taps.note(rows_TS, self._length, parents_K)

    def _read(self, tokens_T: Tensor, last: int | None) -> Tensor:
        """A long text; of the last or of all its tokens the logits that are asked for."""
        hidden_TH = self._pool.passes.read(self.slot, tokens_T, self._length)
        self._advance(len(tokens_T), None, hidden_TH)
        return head(self._pool.passes.model, hidden_TH[None, -(last or len(tokens_T)) :])[0][0]


def ancestors(parents_K: Parents) -> list[int]:
    """The nodes that each sees, itself among them, as bits of an int64."""
    seen = list[int]()
    for node, parent in enumerate(parents_K):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return [bits - (1 << 64) if bits >> 63 else bits for bits in seen]
