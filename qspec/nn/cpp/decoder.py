"""The decoder in C++ (`qspec/native/`): the same numbers as `nn.eager.decoder`, several times as many tokens a second.

One call is one parallel region over the whole model. A row's logits do not depend on how many rows a call has, so
greedy speculative decoding equals plain decoding bit for bit. Called through ctypes with raw pointers: the library
knows nothing of torch. Weights are packed and copied once; the torch tensors may then be dropped.
"""

from collections.abc import Hashable, Sequence
from copy import copy
import ctypes
from ctypes import byref, c_int32, c_void_p
import weakref

import torch
from torch import Tensor

from qspec.nn.cpp.interface import (
    LAPS,
    CLayer,
    CMatrix,
    CPart,
    CTaps,
    failure,
    floats,
    instruction_sets,
    library,
    matrix_of,
    pointer,
    pool_of,
    require_done,
)
from qspec.nn.cpp.model import WeightSource, arch_obstacle, cache_kind, quantized_obstacle, ropes_of, shape_of
from qspec.nn.eager.linear import short_headed, widened
from qspec.nn.states import States, Taps
from qspec.numerics.speculation.trees import Parents, check_path
from qspec.ops.native_library import NoLibrary
from qspec.records import ArchMap, LoadedModel, QuantizedModel

_UNREADABLE = 4


class NativeDecoder:
    """A causal LM with its own KV cache; implements `nn.lm.BatchLM`, `HiddenLM` and `TappedLM`. Float32 on the CPU."""

    _core: "Core"
    _lib: ctypes.CDLL
    _sequence: c_void_p
    _head_ids: Tensor | None = None  # whose logits come first in a row, where the head is short
    _tree: Parents  # nodes that wait behind `length`
    _states: States
    _taps: Taps

    def __init__(
        self, model: LoadedModel | QuantizedModel, max_length: int | None = None, isa: str | None = None
    ) -> None:
        """Threads are torch's at this moment. `isa` is one of `instruction_sets()`, the fastest if not given.

        Raises `NoLibrary` where there is no library; the model must be one that `supports` takes.
        """
        obstacle = self.supports(model)
        assert obstacle is None, obstacle
        if isinstance(model, QuantizedModel):
            model, self._head_ids = short_headed(model), model.head_ids
        self._run_on(Core(model, max_length or model.arch.max_positions, isa), model.arch)

    @classmethod
    def from_float(cls, model: LoadedModel, max_length: int | None = None) -> "NativeDecoder":
        """The original model; weights keep the dtype that they have."""
        return cls(model, max_length)

    @classmethod
    def from_quantized(cls, model: QuantizedModel, max_length: int | None = None) -> "NativeDecoder":
        """A quantized model, weights decoded in registers."""
        return cls(model, max_length)

    @staticmethod
    def supports(model: LoadedModel | QuantizedModel) -> str | None:
        """Why the C++ core does not run this model, in words; None when it does."""
        obstacle = arch_obstacle(model.arch)
        if obstacle is not None or isinstance(model, LoadedModel):
            return obstacle
        return quantized_obstacle(model)

    @staticmethod
    def missing() -> str | None:
        """Why there is no C++ core on this machine, in words; None when there is. Compiles it at first use."""
        try:
            library()
        except NoLibrary as error:
            return str(error)
        return None

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size

    @property
    def max_length(self) -> int:
        return self._core.max_length

    @property
    def length(self) -> int:
        return int(self._lib.qspec_length(self._sequence))

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length}"
        self._core.check(self._lib.qspec_truncate(self._sequence, length))
        self._states.truncate(length)
        self._taps.truncate(length)
        self._tree = ()

    def hidden(self, count: int = 1) -> Tensor:
        return self._states.newest(count)

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = Taps(layers, self.arch.hidden_size, self.arch.n_layers)

    def tapped(self, start: int) -> Tensor:
        return self._taps.since(start)

    def seconds(self) -> dict[str, float]:
        """Where the time of all passes on these weights went so far, by part."""
        seconds = (ctypes.c_double * len(LAPS))()
        self._lib.qspec_seconds(self._core.handle, seconds)
        return dict(zip(LAPS, seconds, strict=True))

    @property
    def weights(self) -> Hashable:
        return self._core

    def fork(self) -> "NativeDecoder":
        """Another, empty sequence on the same weights."""
        other = copy(self)
        other._start()
        return other

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        rows = len(tokens_T) if last is None else min(last, len(tokens_T))
        logits_TV = torch.empty(rows, self.vocab_size)
        self._append(tokens_T, rows, logits_TV, None)
        return self._widened(logits_TV)

    def greedy(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        """The likeliest next tokens, picked while the head runs: no logits are written."""
        rows = len(tokens_T) if last is None else min(last, len(tokens_T))
        best_T = torch.empty(rows, dtype=torch.int64)
        self._append(tokens_T, rows, None, best_T)
        return self._named(best_T)

    def forward_tree(self, tokens_T: Tensor, parents_K: Parents) -> Tensor:
        return self.forward_many([self], [tokens_T], [parents_K])[0]

    def keep(self, path: Sequence[int]) -> None:
        check_path(self._tree, path)
        self._core.check(self._lib.qspec_keep(self._sequence, (c_int32 * len(path))(*path), len(path)))
        self._states.keep(path)
        self._taps.keep(path)
        self._tree = ()

    @classmethod
    def forward_many(
        cls, sequences: Sequence["NativeDecoder"], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        counts = [len(tokens_T) for tokens_T in tokens]
        logits_TV = torch.empty(sum(counts), sequences[0].vocab_size)
        cls._run(sequences, tokens, parents, logits_TV, None)
        return list(sequences[0]._widened(logits_TV).split(counts))

    @classmethod
    def greedy_many(
        cls, sequences: Sequence["NativeDecoder"], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        counts = [len(tokens_T) for tokens_T in tokens]
        best_T = torch.empty(sum(counts), dtype=torch.int64)
        cls._run(sequences, tokens, parents, None, best_T)
        return list(sequences[0]._named(best_T).split(counts))

    def _widened(self, logits_TV: Tensor) -> Tensor:
        """The core leaves the end of a row as it is where the head is short."""
        ids_D = self._head_ids
        return logits_TV if ids_D is None else widened(logits_TV[:, : len(ids_D)], ids_D, self.vocab_size)

    def _named(self, best_T: Tensor) -> Tensor:
        """Ids of rows of the head."""
        return best_T if self._head_ids is None else self._head_ids[best_T]

    def _run_on(self, core: "Core", arch: ArchMap) -> None:
        self._core, self.arch, self.isa, self.threads = core, arch, core.isa, core.threads
        self._start()

    def _start(self) -> None:
        """Hold an empty sequence."""
        self._lib = self._core.lib
        self._tree, self._states, self._taps = (), States(), Taps()
        self._sequence = c_void_p(self._lib.qspec_sequence(self._core.handle))
        if not self._sequence:
            raise MemoryError("the KV cache does not fit: choose a smaller max_length")
        # the core is an argument so that it outlives its sequences
        weakref.finalize(self, _end_sequence, self._core, self._sequence)

    def _append(self, tokens_T: Tensor, rows: int, logits_TV: Tensor | None, best_T: Tensor | None) -> None:
        """A pass of this sequence alone. Every step pays for what Python does here."""
        flat_T = tokens_T.to("cpu", torch.int64).contiguous()
        hidden_TK = torch.empty(rows, self.arch.hidden_size)
        tapped = CopiedStates(self._taps.layers, len(flat_T), self.arch.hidden_size) if self._taps.layers else NOTHING
        self._core.forward([self._part(flat_T, None)], rows, logits_TV, best_T, hidden_TK, tapped)
        self._tree = ()
        self._states.append(hidden_TK, self.length)
        if self._taps.layers:
            self._taps.note(tapped.rows_TNK.flatten(1), self.length, None)

    @staticmethod
    def _run(
        sequences: Sequence["NativeDecoder"],
        tokens: Sequence[Tensor],
        parents: Sequence[Parents | None],
        logits_TV: Tensor | None,
        best_T: Tensor | None,
    ) -> None:
        core, requests = sequences[0]._core, list(zip(sequences, tokens, parents, strict=True))
        assert all(sequence._core is core for sequence in sequences), "forks of different weights"
        flat = [tokens_T.to("cpu", torch.int64).contiguous() for tokens_T in tokens]
        parts = [sequence._part(tokens_T, up) for (sequence, _, up), tokens_T in zip(requests, flat, strict=True)]
        counts = [len(tokens_T) for tokens_T in flat]
        hidden_TK = torch.empty(sum(counts), sequences[0].arch.hidden_size)
        wanted = sorted({layer for sequence in sequences for layer in sequence._taps.layers})
        tapped = CopiedStates(wanted, sum(counts), hidden_TK.shape[1])
        core.forward(parts, sum(counts), logits_TV, best_T, hidden_TK, tapped)
        rows = zip(requests, hidden_TK.split(counts), tapped.rows_TNK.split(counts), strict=True)
        for (sequence, _, parents_K), rows_TK, rows_TNK in rows:
            sequence._tree = tuple(parents_K or ())
            if parents_K is None:
                sequence._states.append(rows_TK, sequence.length)
            else:
                sequence._states.offer(rows_TK, len(parents_K))
            if own := sequence._taps.layers:
                own_TS = rows_TNK[:, [wanted.index(layer) for layer in own]].flatten(1)
                sequence._taps.note(own_TS, sequence.length, parents_K)

    def _part(self, tokens_T: Tensor, parents_K: Parents | None) -> CPart:
        count, size = len(tokens_T), len(tokens_T) if parents_K is None else len(parents_K)
        end = self.length + size
        assert end <= self.max_length, f"{end} positions, cache holds {self.max_length}"
        if parents_K is None:
            return CPart(self._sequence, tokens_T.data_ptr(), None, count, 0)
        assert list(parents_K[: size - count]) == list(self._tree[: size - count]), "another tree than the one begun"
        return CPart(self._sequence, tokens_T.data_ptr(), (c_int32 * size)(*parents_K), count, size)


class CopiedStates:
    """Room for what a pass copies in front of the layers `wanted`, which rise: `[T, len(wanted), hidden]`."""

    def __init__(self, wanted: Sequence[int], rows: int, hidden: int) -> None:
        self.rows_TNK = torch.empty(rows, len(wanted), hidden)
        self.given = CTaps((c_int32 * len(wanted))(*wanted), len(wanted), self.rows_TNK.data_ptr())


NOTHING = CopiedStates((), 0, 0)


class Core:
    """Weights and threads, shared by all sequences of a model."""

    def __init__(self, model: LoadedModel | QuantizedModel, max_length: int, isa: str | None) -> None:
        self.max_length, self.threads, self.lib = max_length, torch.get_num_threads(), library()
        self._pool = pool_of(self.threads)
        kv = model.plan.kv if isinstance(model, QuantizedModel) else None
        shape = shape_of(model.arch, max_length, cache_kind(kv))
        self.isa = isa or instruction_sets()[0]
        assert self.isa in instruction_sets(), f"{isa} is none of {instruction_sets()}"
        self.handle: c_void_p = c_void_p(self.lib.qspec_model(self._pool.handle, byref(shape), self.isa.encode()))
        if not self.handle:
            raise failure("a model")
        weakref.finalize(self, self.lib.qspec_model_free, self.handle)
        self._load(model)

    def forward(
        self,
        parts: list[CPart],
        last: int,
        logits_TV: Tensor | None,
        best_T: Tensor | None,
        hidden_TK: Tensor,
        tapped: "CopiedStates",
    ) -> None:
        given, outputs = (CPart * len(parts))(*parts), map(pointer, (logits_TV, best_T, hidden_TK))
        status = self.lib.qspec_forward(self.handle, given, len(parts), last, *outputs, byref(tapped.given))
        require_done(status, "a forward pass")
        if status == _UNREADABLE:
            raise self.unreadable()

    def unreadable(self) -> Exception:
        """The error of a pass whose layers cannot all be read."""
        raise NotImplementedError("these weights are in memory")

    def _load(self, model: LoadedModel | QuantizedModel) -> None:
        source = WeightSource(model)
        self._set_ropes(model.arch)
        for i, base in enumerate(model.arch.layers):
            packed = source.layer(base)
            self._set_layer(i, source, [matrix_of(p) for p in packed])
        packed = source.ends()
        self._set_ends(source, [matrix_of(p) for p in packed])

    def _set_ropes(self, arch: ArchMap) -> None:
        count = self.max_length * len(arch.rope_inv_freq)
        for which, tables in enumerate(ropes_of(arch, self.max_length)):
            self.check(self.lib.qspec_set_rope(self.handle, which, *(floats(table_LR, count) for table_LR in tables)))

    def _set_layer(self, i: int, source: WeightSource, weights: list[CMatrix], in_place: bool = False) -> None:
        """`weights` as `WeightSource.layer` has them; in_place: they lie, or will, in the model's own memory."""
        arch, base = source.arch, source.arch.layers[i]
        qkv, o, *rest = weights
        router = rest.pop(0) if arch.router(base) else None
        norms, scales = source.norms(base), source.cache_scales(f"{base}.self_attn")
        window, h, d = arch.window(base), arch.hidden_size, arch.head_dim
        layer = CLayer(
            *(floats(norm, size) for norm, size in zip(norms, (h, h, d, d, h, h), strict=True)),
            qkv,
            o,
            *([CMatrix(), CMatrix(), router] if router else [*rest, CMatrix()]),
            (CMatrix * len(rest))(*rest) if router else None,
            *(floats(scale, arch.n_kv_heads) for scale in scales),
            window or 0,
            1 if window is not None and arch.window_inv_freq else 0,
        )
        self.check(self.lib.qspec_set_layer(self.handle, i, byref(layer), in_place))

    def _set_ends(self, source: WeightSource, weights: list[CMatrix], in_place: bool = False) -> None:
        """`weights` as `WeightSource.ends` has them."""
        head, embedding = [*weights, CMatrix()][:2]
        norm_K = source.norm("model.norm")
        norm = floats(norm_K, source.arch.hidden_size)
        self.check(self.lib.qspec_set_ends(self.handle, byref(embedding), norm, byref(head), in_place))

    def check(self, done: int | None) -> None:
        if not done:
            raise failure("the weights")


def _end_sequence(core: Core, sequence: c_void_p) -> None:
    core.lib.qspec_sequence_free(sequence)
