"""The decoder in C++ (`qspec/native/`): the same numbers as `nn.decoder`, several times as many tokens a second.

One call is one parallel region over the whole model. A row's logits do not depend on how many rows a call has, so
greedy speculative decoding equals plain decoding bit for bit. Called through ctypes with raw pointers: the library
knows nothing of torch. Weights are packed and copied once; the torch tensors may then be dropped.
"""

from collections.abc import Mapping, Sequence
from copy import copy
import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
import os
import weakref

import torch
from torch import Tensor

from qspec.nn.attention import rope_tables
from qspec.nn.lm import FORKED
from qspec.nn.native_weights import Packed, linear_obstacle, member_form, pack_linears, pack_rows
from qspec.nn.states import States
from qspec.numerics.formats import FP8_E4M3, INT8
from qspec.numerics.trees import Parents
from qspec.ops import native_library
from qspec.ops.native_library import NoLibrary
from qspec.plan import KVScheme
from qspec.records import EMBEDDING, ArchMap, LoadedModel, QLinear, QuantizedModel

_FLOAT_CACHE, _INT8_CACHE, _FP8_CACHE = range(3)
_FORKED, _NO_MEMORY, _BAD_TOKEN, UNREADABLE = 1, 2, 3, 4
_MOST_HEAD = 256
"""Head size that a thread has room for: `MOST_PANELS` of native/model.cpp."""


class NativeDecoder:
    """A causal LM with its own KV cache; implements `nn.lm.BatchLM` and `HiddenLM`. Computes in float32 on the CPU."""

    _core: "Core"
    _lib: ctypes.CDLL
    _sequence: c_void_p
    _tree: Parents  # nodes that wait behind `length`
    _states: States

    def __init__(
        self, model: LoadedModel | QuantizedModel, max_length: int | None = None, isa: str | None = None
    ) -> None:
        """Threads are torch's at this moment. `isa` is one of `instruction_sets()`, the fastest if not given.

        Raises `NoLibrary` where there is no library; the model must be one that `supports` takes.
        """
        obstacle = self.supports(model)
        assert obstacle is None, obstacle
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
        found = _arch_obstacle(model.arch)
        if found is not None or isinstance(model, LoadedModel):
            return found
        return _quantized_obstacle(model)

    @staticmethod
    def missing() -> str | None:
        """Why there is no C++ core on this machine, in words; None when there is. Compiles it at first use."""
        try:
            _library()
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
        self._lib.qspec_truncate(self._sequence, length)
        self._states.truncate(length)
        self._tree = ()

    def hidden(self, count: int = 1) -> Tensor:
        return self._states.newest(count)

    def fork(self) -> "NativeDecoder":
        """Another, empty sequence on the same weights."""
        other = copy(self)
        other._start()
        return other

    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        rows = len(tokens_T) if last is None else min(last, len(tokens_T))
        logits_TV = torch.empty(rows, self.vocab_size)
        self._run([self], [tokens_T], [None], logits_TV=logits_TV)
        return logits_TV

    def greedy(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        """Append tokens like `forward`; the likeliest next tokens `[last or T]` only, without their logits."""
        rows = len(tokens_T) if last is None else min(last, len(tokens_T))
        best_T = torch.empty(rows, dtype=torch.int64)
        self._run([self], [tokens_T], [None], best_T=best_T)
        return best_T

    def forward_tree(self, tokens_T: Tensor, parents_K: Parents) -> Tensor:
        return self.forward_many([self], [tokens_T], [parents_K])[0]

    def keep(self, path: Sequence[int]) -> None:
        edges = zip((-1, *path), path, strict=False)
        assert all(self._tree[node] == parent for parent, node in edges), f"{path} is no path from the root"
        self._lib.qspec_keep(self._sequence, (c_int32 * len(path))(*path), len(path))
        self._states.keep(path)
        self._tree = ()

    @classmethod
    def forward_many(
        cls, sequences: Sequence["NativeDecoder"], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        counts = [len(tokens_T) for tokens_T in tokens]
        logits_TV = torch.empty(sum(counts), sequences[0].vocab_size)
        cls._run(sequences, tokens, parents, logits_TV=logits_TV)
        return list(logits_TV.split(counts))

    def _run_on(self, core: "Core", arch: ArchMap) -> None:
        self._core, self.arch, self.isa, self.threads = core, arch, core.isa, core.threads
        self._start()

    def _start(self) -> None:
        """Hold an empty sequence."""
        self._lib = self._core.lib
        self._tree, self._states = (), States()
        self._sequence = c_void_p(self._lib.qspec_sequence(self._core.handle))
        if not self._sequence:
            raise MemoryError("the KV cache does not fit: choose a smaller max_length")
        # the core is an argument so that it outlives its sequences
        weakref.finalize(self, _end_sequence, self._core, self._sequence)

    @staticmethod
    def _run(
        sequences: Sequence["NativeDecoder"],
        tokens: Sequence[Tensor],
        parents: Sequence[Parents | None],
        logits_TV: Tensor | None = None,
        best_T: Tensor | None = None,
    ) -> None:
        core, asked = sequences[0]._core, list(zip(sequences, tokens, parents, strict=True))
        assert all(sequence._core is core for sequence in sequences), "forks of different weights"
        flat = [tokens_T.to("cpu", torch.int64).contiguous() for tokens_T in tokens]
        parts = [sequence._part(tokens_T, up) for (sequence, _, up), tokens_T in zip(asked, flat, strict=True)]
        out = logits_TV if best_T is None else best_T
        assert out is not None
        hidden_TK = torch.empty(len(out), sequences[0].arch.hidden_size)
        core.forward(parts, len(out), logits_TV, best_T, hidden_TK)
        counts = [len(tokens_T) for tokens_T in flat] if len(asked) > 1 else [len(out)]
        for (sequence, _, parents_K), rows_TK in zip(asked, hidden_TK.split(counts), strict=True):
            sequence._tree = tuple(parents_K or ())
            if parents_K is None:
                sequence._states.append(rows_TK, sequence.length)
            else:
                sequence._states.offer(rows_TK, len(parents_K))

    def _part(self, tokens_T: Tensor, parents_K: Parents | None) -> "_Part":
        count, size = len(tokens_T), len(tokens_T) if parents_K is None else len(parents_K)
        end = self.length + size
        assert end <= self.max_length, f"{end} positions, cache holds {self.max_length}"
        if parents_K is None:
            return _Part(self._sequence, tokens_T.data_ptr(), None, count, 0)
        assert list(parents_K[: size - count]) == list(self._tree[: size - count]), "another tree than the one begun"
        return _Part(self._sequence, tokens_T.data_ptr(), (c_int32 * size)(*parents_K), count, size)


class Core:
    """Weights and threads, shared by all sequences of a model."""

    def __init__(self, model: LoadedModel | QuantizedModel, max_length: int, isa: str | None) -> None:
        self.max_length, self.threads, self.lib = max_length, torch.get_num_threads(), _library()
        self._pool = _pool(self.threads)
        kv = model.plan.kv if isinstance(model, QuantizedModel) else None
        shape = _shape(model.arch, max_length, _cache_kind(kv))
        self.isa = isa or instruction_sets()[0]
        assert self.isa in instruction_sets(), f"{isa} is none of {instruction_sets()}"
        self.handle: c_void_p = c_void_p(self.lib.qspec_model(self._pool.handle, byref(shape), self.isa.encode()))
        if not self.handle:
            raise MemoryError("no memory for a model")
        weakref.finalize(self, self.lib.qspec_model_free, self.handle)
        self._load(model)

    def forward(
        self, parts: list["_Part"], last: int, logits_TV: Tensor | None, best_T: Tensor | None, hidden_TK: Tensor
    ) -> None:
        given, outputs = (_Part * len(parts))(*parts), map(_pointer, (logits_TV, best_T, hidden_TK))
        status = self.lib.qspec_forward(self.handle, given, len(parts), last, *outputs)
        if status == _FORKED:
            raise RuntimeError(FORKED)
        if status == _NO_MEMORY:
            raise MemoryError("no memory for a forward pass")
        if status == _BAD_TOKEN:
            raise IndexError("a token lies outside of the vocabulary")
        if status == UNREADABLE:
            raise self.unreadable()

    def unreadable(self) -> Exception:
        """What a pass raises when a layer of it cannot be read."""
        raise NotImplementedError("these weights are in memory")

    def _load(self, model: LoadedModel | QuantizedModel) -> None:
        source = Source(model)
        self._set_ropes(model.arch)
        for i, base in enumerate(model.arch.layers):
            packed = source.layer(base)
            self._set_layer(i, source, [_matrix(p) for p in packed])
        packed = source.ends()
        self._set_ends(source, [_matrix(p) for p in packed])

    def _set_ropes(self, arch: ArchMap) -> None:
        for which, (cos_LR, sin_LR) in enumerate(_ropes(arch, self.max_length)):
            self.check(self.lib.qspec_set_rope(self.handle, which, cos_LR.data_ptr(), sin_LR.data_ptr()))

    def _set_layer(self, i: int, source: "Source", weights: "list[Matrix]", in_place: bool = False) -> None:
        """`weights` as `Source.layer` has them; in_place: they lie, or will, in the model's own memory."""
        arch, base = source.arch, source.arch.layers[i]
        qkv, o, *rest = weights
        router = rest.pop(0) if arch.router(base) else None
        norms, scales = source.norms(base), source.cache_scales(f"{base}.self_attn")
        window = arch.window(base)
        layer = _Layer(
            *(_pointer(norm) for norm in norms),
            qkv,
            o,
            *([Matrix(), Matrix(), router] if router else [*rest, Matrix()]),
            (Matrix * len(rest))(*rest) if router else None,
            *(_pointer(scale) for scale in scales),
            window or 0,
            1 if window is not None and arch.window_inv_freq else 0,
        )
        self.check(self.lib.qspec_set_layer(self.handle, i, byref(layer), in_place))

    def _set_ends(self, source: "Source", weights: "list[Matrix]", in_place: bool = False) -> None:
        """`weights` as `Source.ends` has them."""
        head, embedding = [*weights, Matrix()][:2]
        norm_K = source.norm("model.norm")
        done = self.lib.qspec_set_ends(self.handle, byref(embedding), norm_K.data_ptr(), byref(head), in_place)
        self.check(done)

    def check(self, done: int | None) -> None:
        if not done:
            raise MemoryError("no memory for the weights")


class Source:
    """Looks a model's tensors up by name and packs them."""

    def __init__(self, model: LoadedModel | QuantizedModel) -> None:
        self.arch, self._model, self._tensors = model.arch, model, model.tensors
        self._linears: Mapping[str, QLinear] = model.linears if isinstance(model, QuantizedModel) else {}

    def layer(self, base: str) -> list[Packed]:
        """Weights of a decoder layer: q/k/v, o, the router of a mixture, then gate/up and down of each MLP."""
        attn, router = f"{base}.self_attn", self.arch.router(base)
        attention = [self.linear(*(f"{attn}.{x}_proj" for x in "qkv")), self.linear(f"{attn}.o_proj")]
        mlps = [packed for name in self.arch.mlps(base) for packed in self.mlp(name)]
        return [*attention, *([self.linear(router)] if router else []), *mlps]

    def ends(self) -> list[Packed]:
        """The head, and the embedding where it is not the head's own weight."""
        embedding_VK = self._tensors[EMBEDDING]
        if self.arch.tied and "lm_head" not in self._linears:
            return [pack_linears([embedding_VK], [None])]
        return [self.linear("lm_head"), pack_rows(embedding_VK)]

    def norms(self, base: str) -> list[Tensor | None]:
        """Norms of a decoder layer, as `_Layer` has them; None for those that the architecture lacks."""
        return [self.norm(f"{base}.{name}") if name else None for name in _norm_names(self.arch)]

    def norm(self, name: str) -> Tensor:
        """Gain in float32 with the architecture's offset added."""
        return (self._tensors[f"{name}.weight"].float() + self.arch.norm_offset).contiguous()

    def cache_scales(self, attn: str) -> tuple[Tensor | None, Tensor | None]:
        """Key and value scale of each KV head, for a cache with stored ones."""
        model = self._model
        if not isinstance(model, QuantizedModel) or model.plan.kv is None or not model.plan.kv.stored:
            return None, None
        heads, stored = self.arch.n_kv_heads, (model.k_scale, model.v_scale)
        k, v = (scales[attn].float().reshape(-1).expand(heads).contiguous() for scales in stored)
        return k, v

    def linear(self, *names: str, paired: bool = False) -> Packed:
        members = [self._linears[n] if n in self._linears else self._tensors[f"{n}.weight"] for n in names]
        biases = [
            m.bias if isinstance(m, QLinear) else self._tensors.get(f"{n}.bias")
            for n, m in zip(names, members, strict=True)
        ]
        return pack_linears(members, biases, paired)

    def mlp(self, name: str) -> tuple[Packed, Packed]:
        """gate and up as one, and down."""
        return self.linear(f"{name}.gate_proj", f"{name}.up_proj", paired=True), self.linear(f"{name}.down_proj")


def _arch_obstacle(arch: ArchMap) -> str | None:
    """What of an architecture the C++ core has no code for."""
    reasons = {
        "a rotation in front of down_proj": arch.down_hadamard,
        f"head size {arch.head_dim}, no multiple of 8": arch.head_dim % 8 != 0,
        f"head size {arch.head_dim}, above {_MOST_HEAD}": arch.head_dim > _MOST_HEAD,
        "norms after a mixture of experts": arch.n_experts > 0 and arch.post_norms,
        "a piece of a model": not arch.has_head or arch.first_layer != 0,
    }
    return next((reason for reason, found in reasons.items() if found), None)


def _norm_names(arch: ArchMap) -> list[str | None]:
    """Norms of a decoder layer, as `_Layer` has them; None for those that the architecture lacks."""
    attention = ["self_attn.q_norm", "self_attn.k_norm"] if arch.qk_norm else [None, None]
    post = ["post_attention_layernorm", "post_feedforward_layernorm"] if arch.post_norms else [None, None]
    return ["input_layernorm", arch.mlp_norm, *attention, *post]


def _quantized_obstacle(model: QuantizedModel) -> str | None:
    kv = model.plan.kv
    if kv is not None and (found := _cache_obstacle(kv, bool(model.q_scale))):
        return found
    for name, linear in model.linears.items():
        if found := linear_obstacle(linear):
            return f"{name}: {found}"
    for group in model.arch.fused_groups():
        members = [model.linears.get(name, model.tensors.get(f"{name}.weight")) for name in group]
        if len({member_form(m) for m in members if m is not None}) > 1:
            return f"{group[0]}: formats or input scales of merged layers differ"
    return None


def _cache_obstacle(kv: KVScheme, rounds_queries: bool) -> str | None:
    key, value = kv.parts
    simple = key == value and not key.outliers and not key.piecewise
    served = (key.fmt == INT8 and key.granularity == "token_head") or (key.fmt == FP8_E4M3 and key.stored)
    if simple and served and not kv.residual and not kv.skip_layers and not (kv.query and rounds_queries):
        return None
    return f"KV cache {kv.label}" + (", rounded queries" if kv.query else "")


def _cache_kind(kv: KVScheme | None) -> int:
    if kv is None:
        return _FLOAT_CACHE
    return _FP8_CACHE if kv.stored else _INT8_CACHE


def _ropes(arch: ArchMap, length: int) -> list[tuple[Tensor, Tensor]]:
    """cos and sin `[length, R / 2]`; the second table is for layers with a window of its own frequencies."""
    half = len(arch.rope_inv_freq)
    tables = [rope_tables(arch.rope_inv_freq, arch.rope_factor, length, torch.float32)]
    if arch.window_inv_freq:
        tables.append(rope_tables(arch.window_inv_freq, 1.0, length, torch.float32))
    return [(cos_LR[:, :half].contiguous(), sin_LR[:, :half].contiguous()) for cos_LR, sin_LR in tables]


class _Shape(ctypes.Structure):
    """`Shape` of native/model.h."""

    _fields_ = [
        *[
            (name, c_int32)
            for name in [
                "layers",
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "head_dim",
                "vocab",
                "max_length",
                "rotary",
            ]
        ],
        *[(name, c_int32) for name in ("activation", "cache", "ropes")],
        *[(name, c_int32) for name in ("experts", "experts_per_token", "expert_size", "normed_routing")],
        *[(name, c_float) for name in ("norm_eps", "attention_scale", "embed_scale", "attention_cap", "logit_cap")],
    ]


class _Part(ctypes.Structure):
    """`Part` of native/model.h."""

    _fields_ = [
        ("sequence", c_void_p),
        ("tokens", c_void_p),
        ("parents", POINTER(c_int32)),
        ("count", c_int32),
        ("nodes", c_int32),
    ]


class Matrix(ctypes.Structure):
    """`Weight` of native/model.h: `Matrix` of native/kernels.h, and outliers."""

    _fields_ = [
        *[(name, c_int32) for name in ("kind", "input", "n", "k", "group")],
        ("input_scale", c_float),
        ("codes", c_void_p),
        ("bytes", c_int64),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("zero", c_void_p),
        *[(name, c_void_p) for name in ("outlier_ends", "outlier_inputs", "outlier_values")],
    ]


class _Layer(ctypes.Structure):
    """`Layer` of native/model.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, c_void_p) for name in ("attention_post_norm", "mlp_post_norm")],
        *[(name, Matrix) for name in ("qkv", "o", "gate_up", "down", "router")],
        ("experts", POINTER(Matrix)),
        ("key_scale", c_void_p),
        ("value_scale", c_void_p),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class Piece(ctypes.Structure):
    """`Piece` of native/model.h."""

    _fields_ = [("layer", c_int32), ("start", c_int64), ("size", c_int64), ("to", c_void_p)]


class ReadingStruct(ctypes.Structure):
    """`Reading` of native/model.h."""

    _fields_ = [("bytes", c_int64), ("seconds", c_double), ("waited", c_double), ("error", c_int32)]


def _end_sequence(core: Core, sequence: c_void_p) -> None:
    core.lib.qspec_sequence_free(sequence)


def _shape(arch: ArchMap, max_length: int, cache: int) -> _Shape:
    return _Shape(
        arch.n_layers,
        arch.hidden_size,
        arch.intermediate_size,
        arch.n_heads,
        arch.n_kv_heads,
        arch.head_dim,
        arch.vocab_size,
        max_length,
        2 * len(arch.rope_inv_freq),
        int(arch.activation == "gelu_tanh"),
        cache,
        2 if arch.window_inv_freq else 1,
        arch.n_experts,
        arch.experts_per_token,
        arch.expert_size,
        int(arch.normed_routing),
        arch.norm_eps,
        arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale,
        arch.embed_scale,
        arch.attention_softcap or 0.0,
        arch.logit_softcap or 0.0,
    )


def _matrix(p: Packed) -> Matrix:
    codes, *others = map(_pointer, p.arrays)
    return Matrix(p.kind, p.input, p.n, p.k, p.group, p.input_scale, codes, p.codes.nbytes, *others)


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class _Pool:
    """Threads of the library, shared by all decoders that use as many; they end with the last of those."""

    def __init__(self, threads: int) -> None:
        lib = _library()
        self.handle = c_void_p(lib.qspec_pool(threads))
        if not self.handle:
            raise MemoryError(f"{threads} threads cannot be started")
        weakref.finalize(self, lib.qspec_pool_free, self.handle)


_POOLS: "weakref.WeakValueDictionary[tuple[int, int], _Pool]" = weakref.WeakValueDictionary()


def _pool(threads: int) -> _Pool:
    """Of this process: threads do not survive a fork."""
    key = (os.getpid(), threads)
    pool = _POOLS.get(key)
    if pool is None:
        _POOLS[key] = pool = _Pool(threads)
    return pool


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The library with its functions declared; compiled if need be. Raises `NoLibrary`."""
    path = native_library.library()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibrary(f"{path} cannot be loaded ({error})") from error
    signatures = {
        "qspec_isa": (c_char_p, [c_int]),
        "qspec_pool": (c_void_p, [c_int]),
        "qspec_pool_free": (None, [c_void_p]),
        "qspec_model": (c_void_p, [c_void_p, POINTER(_Shape), c_char_p]),
        "qspec_model_free": (None, [c_void_p]),
        "qspec_set_layer": (c_int, [c_void_p, c_int, POINTER(_Layer), c_int]),
        "qspec_set_rope": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
        "qspec_set_ends": (c_int, [c_void_p, POINTER(Matrix), c_void_p, POINTER(Matrix), c_int]),
        "qspec_memory": (c_void_p, [c_void_p, c_int64]),
        "qspec_set_stream": (c_int, [c_void_p, c_int, POINTER(Piece), c_int]),
        "qspec_reading": (None, [c_void_p, POINTER(ReadingStruct)]),
        "qspec_sequence": (c_void_p, [c_void_p]),
        "qspec_sequence_free": (None, [c_void_p]),
        "qspec_cache_bytes": (c_int64, [c_void_p]),
        "qspec_keep": (None, [c_void_p, POINTER(c_int32), c_int]),
        "qspec_length": (c_int, [c_void_p]),
        "qspec_truncate": (None, [c_void_p, c_int]),
        "qspec_forward": (c_int, [c_void_p, POINTER(_Part), c_int, c_int, c_void_p, c_void_p, c_void_p]),
        "qspec_linear": (c_int, [c_void_p, c_char_p, POINTER(Matrix), c_void_p, c_int, c_void_p]),
        "qspec_read": (c_float, [c_void_p, c_void_p, c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def instruction_sets() -> list[str]:
    """Names of those that the library has code for and this machine runs, the fastest first. Raises `NoLibrary`."""
    names, lib = list[str](), _library()
    while (name := lib.qspec_isa(len(names))) is not None:
        names.append(name.decode())
    return names


class NativeLinear:
    """A quantized layer without bias on one thread, for what is too small to share out."""

    def __init__(self, linear: QLinear) -> None:
        """Raises `NoLibrary` where there is no library."""
        self._packed = pack_linears([linear], [None])
        self._lib, self._pool, self._matrix = _library(), _pool(1), _matrix(self._packed)

    def __call__(self, x_TK: Tensor) -> Tensor:
        x_TK, y_TN = x_TK.contiguous(), torch.empty(len(x_TK), self._packed.n)
        x, y, rows = x_TK.data_ptr(), y_TN.data_ptr(), len(x_TK)
        if not self._lib.qspec_linear(self._pool.handle, None, byref(self._matrix), x, rows, y):
            raise MemoryError("no memory for a matmul")
        return y_TN


def native_linear(packed: Packed, x_TK: Tensor, isa: str | None = None) -> Tensor:
    """One matmul of the library `[T, N]`, for comparison with `ops.reference`."""
    lib, pool, matrix = _library(), _pool(1), _matrix(packed)
    x_TK, y_TN = x_TK.float().contiguous(), torch.empty(len(x_TK), packed.n)
    name = None if isa is None else isa.encode()
    done = lib.qspec_linear(pool.handle, name, byref(matrix), x_TK.data_ptr(), len(x_TK), y_TN.data_ptr())
    assert done, f"no memory for one matmul, or no {isa}"
    return y_TN


def read_floats(data: Tensor, threads: int) -> float:
    """Sum of float32 `data` with as little work as reading takes: times the memory that decoding is bound by."""
    pool = _pool(threads)
    return float(_library().qspec_read(pool.handle, data.data_ptr(), data.numel()))
