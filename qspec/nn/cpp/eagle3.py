"""An EAGLE-3 head in C++ (`qspec/native/model.cpp`): true rows and a whole chain of drafts are one call.

The eager twin is `nn.draft_heads.EagerEagle3`. Each matrix may be INT8 or float; none is copied once it is packed.
"""

from collections.abc import Sequence
from ctypes import byref, c_void_p
import os
import weakref

import torch
from torch import Tensor, nn

from qspec.nn.cpp.heads import Choose, guarded
from qspec.nn.cpp.int8_map import INPUTS, Int8Map
from qspec.nn.cpp.interface import (
    CHOOSE,
    CLayer,
    CLead,
    CMatrix,
    CPart,
    CShape,
    failure,
    floats,
    library,
    matrix_of,
    pool_of,
    require_done,
)
from qspec.nn.cpp.model import MOST_HEAD
from qspec.nn.cpp.weights import LANES, Member, Packed, member_form, pack_linears, pack_rows
from qspec.nn.eager.attention import rope_tables
from qspec.nn.eagle3 import Eagle3, HeadLayer
from qspec.ops.native_library import NoLibrary
from qspec.records import QLinear

ROWS = 8
"""Rows of logits that the core wants room for: `CHAINS` of native/model.cpp."""


class NativeSlots:
    """Keys and values of one sequence of a head; implements `nn.draft_heads.HeadSlots`."""

    def __init__(self, chains: "NativeChains") -> None:
        self._lib, self.handle = library(), c_void_p(library().qspec_sequence(chains.handle))
        if not self.handle:
            raise MemoryError("the head's KV cache does not fit: choose a smaller max_length")
        weakref.finalize(self, _end_sequence, chains, self.handle)

    @property
    def length(self) -> int:
        length: int = self._lib.qspec_length(self.handle)
        return length

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length}"
        if not self._lib.qspec_truncate(self.handle, length):
            raise failure("a head's sequence")


def _end_sequence(chains: "NativeChains", handle: c_void_p) -> None:
    """`chains` is an argument so that the weights outlive their sequences."""
    library().qspec_sequence_free(handle)


class NativeChains:
    """Implements `nn.draft_heads.Eagle3Chains`. One call at a time."""

    def __init__(self, head: Eagle3, known: int, max_length: int, threads: int = 1, isa: str | None = None) -> None:
        """known: how many of the head's ids may be drafted; max_length: slots of a cache; isa: instruction set by name.

        The head must be one that `runs` takes.
        """
        s, self._lib, self._pool = head.shape, library(), pool_of(threads)
        shape = CShape(
            *(s.n_layers, s.hidden_size, s.intermediate_size, s.n_heads, s.n_kv_heads, s.head_dim, s.vocab_size),
            *(max_length, s.head_dim, 0, 0, 1, 0, 0, 0, 0, s.states),
            *(s.norm_eps, s.head_dim**-0.5, 1.0, 0.0, 0.0),
        )
        name = None if isa is None else isa.encode()
        self.handle = c_void_p(self._lib.qspec_model(self._pool.handle, byref(shape), name))
        if not self.handle:
            raise failure("an EAGLE-3 head")
        weakref.finalize(self, self._lib.qspec_model_free, self.handle)
        self._shape, self._known, self._weights = s, known, list[Packed]()
        self._logits_RD = torch.empty(ROWS, -(-s.drafted // LANES) * LANES)
        self._set_rope(max_length)
        for i, layer in enumerate(head.layers):
            assert isinstance(layer, HeadLayer)
            self._set_layer(i, layer)
        self._set_ends(head)

    @staticmethod
    def runs(head: Eagle3) -> bool:
        """Whether the core is there, and has code for all of the head."""
        try:
            library()
        except NoLibrary:
            return False
        s = head.shape
        if s.head_dim % LANES or s.head_dim > MOST_HEAD or (s.norm_before_fc and s.fc_norm):
            return False
        groups = [layer.get_submodule(part) for layer in head.layers for part in ("self_attn", "mlp")]
        merged = [_members(group, *names) for group in groups for names in (_QKV, _GATE_UP) if hasattr(group, names[0])]
        return all(len({member_form(member) for member in members}) == 1 for members in merged)

    @classmethod
    def shared(cls, head: Eagle3, known: int, max_length: int, threads: int) -> "NativeChains":
        """The same object for the same arguments, as long as the head lives: its weights are packed once."""
        made, key = _MADE.setdefault(head, {}), (os.getpid(), known, max_length, threads)
        if key not in made:
            made[key] = cls(head, known, max_length, threads)
        return made[key]

    def cache(self) -> NativeSlots:
        """An empty sequence."""
        return NativeSlots(self)

    def chains(
        self,
        caches: Sequence[NativeSlots],
        states: Sequence[Tensor],
        tokens: Sequence[Tensor],
        k: int,
        choose: Choose,
    ) -> None:
        flat = [tokens_T.to("cpu", torch.int64).contiguous() for tokens_T in tokens]
        states_TS = torch.cat([states_TS.to("cpu", torch.float32) for states_TS in states])
        rows = sum(map(len, flat))
        parts = [
            CPart(cache.handle, tokens_T.data_ptr(), None, len(tokens_T), 0)
            for cache, tokens_T in zip(caches, flat, strict=True)
        ]
        decide, failed = guarded(choose, self._logits_RD, self._known)
        status = self._lib.qspec_propose(
            *(self.handle, (CPart * len(parts))(*parts), len(parts), floats(states_TS, rows * self._shape.states)),
            *(k, CHOOSE(decide), self._logits_RD.data_ptr(), self._logits_RD.shape[1]),
        )
        if failed:
            raise failed[0]
        require_done(status, "a proposal")

    def _set_rope(self, max_length: int) -> None:
        s = self._shape
        tables = rope_tables(tuple(s.inv_freq.tolist()), s.rope_factor, max_length, torch.float32)
        halves = [table_LK[:, : s.head_dim // 2].contiguous() for table_LK in tables]
        self._check(self._lib.qspec_set_rope(self.handle, 0, *(floats(half, half.numel()) for half in halves)))

    def _set_layer(self, i: int, layer: HeadLayer) -> None:
        s, attention, mlp = self._shape, layer.self_attn, layer.mlp
        qkv, gate_up = self._packed(attention, *_QKV), self._packed(mlp, *_GATE_UP, paired=True)
        norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm, None, None
        h, d = s.hidden_size, s.head_dim
        weights = qkv, self._packed(attention, "o_proj"), gate_up, self._packed(mlp, "down_proj"), CMatrix()
        gains = [_gain(norm, size) for norm, size in zip(norms, (h, h, d, d, h, h), strict=True)]
        given = CLayer(*gains, *weights, None, None, None, 0, 0)
        self._check(self._lib.qspec_set_layer(self.handle, i, byref(given), True))

    def _set_ends(self, head: Eagle3) -> None:
        s, first = self._shape, head.layers[0]
        assert isinstance(first, HeadLayer)
        rows = head.rows_VH if head.embed_tokens is None else head.embed_tokens.weight.detach()
        assert rows is not None
        self._weights.append(pack_rows(rows))
        embedding, norm = matrix_of(self._weights[-1]), _gain(head.norm, s.hidden_size)
        out = self._packed(head, "lm_head")
        self._check(self._lib.qspec_set_ends(self.handle, byref(embedding), norm, byref(out), True))
        taps_S = torch.cat([norm.get_parameter("weight").detach() for norm in head.fc_norm]) if head.fc_norm else None
        ids_D = torch.arange(s.vocab_size) if head.ids_D is None else head.ids_D.contiguous()
        lead = CLead(
            self._packed(head, "fc"),
            *(_gain(head.input_norm, s.states), floats(taps_S, s.states), _gain(first.hidden_norm, s.hidden_size)),
            ids_D.data_ptr(),
            *(len(s.taps), s.norm_before_residual, s.norm_output, self._known),
        )
        self._check(self._lib.qspec_set_lead(self.handle, byref(lead)))

    def _packed(self, parent: nn.Module, *names: str, paired: bool = False) -> CMatrix:
        """Layers of `parent` as one weight, which is kept as long as the core points into it."""
        members = _members(parent, *names)
        self._weights.append(pack_linears(members, [None] * len(members), paired))
        return matrix_of(self._weights[-1])

    def _check(self, done: int) -> None:
        if not done:
            raise failure("an EAGLE-3 head")


_MADE: "weakref.WeakKeyDictionary[Eagle3, dict[tuple[int, ...], NativeChains]]" = weakref.WeakKeyDictionary()
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _members(parent: nn.Module, *names: str) -> list[Member]:
    modules = [parent.get_submodule(name) for name in names]
    return [
        QLinear(m.weight, INPUTS, None, None) if isinstance(m, Int8Map) else m.get_parameter("weight").detach()
        for m in modules
    ]


def _gain(norm: nn.Module | None, size: int) -> int | None:
    return None if norm is None else floats(norm.get_parameter("weight").detach(), size)
