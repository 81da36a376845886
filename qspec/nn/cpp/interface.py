"""The C interface of `qspec/native/`, called through ctypes: structs, functions, threads, single matmuls."""

import ctypes
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
import os
import weakref

import torch
from torch import Tensor

from qspec.errors import IntegrityError
from qspec.nn.cpp.weights import Packed
from qspec.nn.lm import FORKED
from qspec.ops import native_library
from qspec.ops.native_library import NoLibrary


class CShape(ctypes.Structure):
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
        *[(name, c_int32) for name in ("experts", "experts_per_token", "expert_size", "normed_routing", "states")],
        *[(name, c_float) for name in ("norm_eps", "attention_scale", "embed_scale", "attention_cap", "logit_cap")],
    ]


class CPart(ctypes.Structure):
    """`Part` of native/model.h."""

    _fields_ = [
        ("sequence", c_void_p),
        ("tokens", c_void_p),
        ("parents", POINTER(c_int32)),
        ("count", c_int32),
        ("nodes", c_int32),
    ]


class CMatrix(ctypes.Structure):
    """`Weight` of native/model.h: `Matrix` of native/kernels.h, and outliers."""

    _fields_ = [
        *[(name, c_int32) for name in ("kind", "input", "n", "k", "group")],
        ("input_scale", c_float),
        ("codes", c_void_p),
        ("bytes", c_int64),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("half_scale", c_void_p),
        ("zero", c_void_p),
        *[(name, c_void_p) for name in ("outlier_ends", "outlier_inputs", "outlier_values")],
    ]


class CLayer(ctypes.Structure):
    """`Layer` of native/model.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, c_void_p) for name in ("attention_post_norm", "mlp_post_norm")],
        *[(name, CMatrix) for name in ("qkv", "o", "gate_up", "down", "router")],
        ("experts", POINTER(CMatrix)),
        ("key_scale", c_void_p),
        ("value_scale", c_void_p),
        ("window", c_int32),
        ("rope", c_int32),
    ]


LAPS = ("embedding", "norms", "q/k/v", "attention", "o", "gate/up", "down", "activation", "head", "reading")
"""`Lap` of native/model.cpp. norms: with rounding to the matmuls' inputs; attention: softmax over the cache;
q/k/v: with rotation and the cache's write; gate/up: with its activation; activation: all of a mixture of experts;
reading: waiting for streamed layers."""


class CPiece(ctypes.Structure):
    """`Piece` of native/model.h."""

    _fields_ = [("layer", c_int32), ("start", c_int64), ("size", c_int64), ("to", c_void_p)]


class CTaps(ctypes.Structure):
    """`Taps` of native/model.h."""

    _fields_ = [("layers", POINTER(c_int32)), ("count", c_int32), ("out", c_void_p)]


class CStage(ctypes.Structure):
    """`Stage` of native/model.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("gain", "shift")],
        *[(name, CMatrix) for name in ("embedding", "embedding_map", "proj", "out_map", "out")],
    ]


class CHeads(ctypes.Structure):
    """`Heads` of native/model.h."""

    _fields_ = [
        *[(name, c_int32) for name in ("count", "hidden", "inner", "drafted")],
        *[(name, c_float) for name in ("norm_eps", "ratio")],
        ("begin", c_void_p),
        ("stages", POINTER(CStage)),
        ("ids", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
    ]


class CLead(ctypes.Structure):
    """`Lead` of native/model.h."""

    _fields_ = [
        ("fc", CMatrix),
        *[(name, c_void_p) for name in ("states_norm", "tap_norms", "state_norm", "ids")],
        *[(name, c_int32) for name in ("taps", "norm_before_residual", "norm_output", "drafted")],
    ]


CHOOSE = CFUNCTYPE(c_int32, c_int32, c_int32, c_int32, c_float)
"""`Choose` of native/model.h."""


class CReading(ctypes.Structure):
    """`Reading` of native/model.h."""

    _fields_ = [("bytes", c_int64), ("seconds", c_double), ("waited", c_double), ("error", c_int32)]


def failure(what: str) -> Exception:
    """Why this thread's newest call of the library has failed: a rule that it broke, or memory that was not there."""
    rule = library().qspec_refusal()
    if rule is None:
        return MemoryError(f"no memory for {what}")
    return IntegrityError(what, f"cannot be run by the C++ core: {rule.decode()}", "fetch an intact copy of the model")


def require_done(status: int, what: str) -> None:
    """Raise the error of a pass whose status says so: of another process's threads, refused, or of unknown tokens."""
    if status == 1:
        raise RuntimeError(FORKED)
    if status == 2:
        raise failure(what)
    if status == 3:
        raise IndexError("a token lies outside of the vocabulary")


def floats(x: Tensor | None, count: int) -> int | None:
    """Address of `count` floats, of which the library knows only where they begin; whoever calls keeps `x` alive.

    Raises `IntegrityError`.
    """
    if x is not None and (x.dtype != torch.float32 or x.numel() != count or not x.is_contiguous()):
        value, rule = f"{list(x.shape)} of {x.dtype}", f"the C++ core reads {count} floats there"
        raise IntegrityError(value, rule, "fetch an intact copy of the model")
    return pointer(x)


def matrix_of(p: Packed) -> CMatrix:
    codes, *others = map(pointer, p.arrays)
    return CMatrix(p.kind, p.input, p.n, p.k, p.group, p.input_scale, codes, p.codes.nbytes, *others)


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


class _Pool:
    """Threads of the library, shared by all decoders that use as many; they end with the last of those."""

    def __init__(self, threads: int) -> None:
        lib = library()
        self.handle = c_void_p(lib.qspec_pool(threads))
        if not self.handle:
            raise MemoryError(f"{threads} threads cannot be started")
        weakref.finalize(self, lib.qspec_pool_free, self.handle)


_POOLS: "weakref.WeakValueDictionary[tuple[int, int], _Pool]" = weakref.WeakValueDictionary()


def pool_of(threads: int) -> _Pool:
    """The pool of this process: threads do not survive a fork."""
    key = (os.getpid(), threads)
    pool = _POOLS.get(key)
    if pool is None:
        _POOLS[key] = pool = _Pool(threads)
    return pool


def library() -> ctypes.CDLL:
    """The library with its functions declared; compiled if need be. Raises `NoLibrary`, each time without a new try."""
    loaded = _library()
    if isinstance(loaded, str):
        raise NoLibrary(loaded)
    return loaded


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none, in words."""
    try:
        path = native_library.library()
    except NoLibrary as error:
        return str(error)
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:  # of another system, or without the functions
        return f"{path} cannot be loaded ({error}); remove it, so that it is compiled anew"


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    signatures = {
        "qspec_isa": (c_char_p, [c_int]),
        "qspec_pool": (c_void_p, [c_int]),
        "qspec_pool_free": (None, [c_void_p]),
        "qspec_refusal": (c_char_p, []),
        "qspec_model": (c_void_p, [c_void_p, POINTER(CShape), c_char_p]),
        "qspec_model_free": (None, [c_void_p]),
        "qspec_set_layer": (c_int, [c_void_p, c_int, POINTER(CLayer), c_int]),
        "qspec_set_rope": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
        "qspec_set_ends": (c_int, [c_void_p, POINTER(CMatrix), c_void_p, POINTER(CMatrix), c_int]),
        "qspec_memory": (c_void_p, [c_void_p, c_int64]),
        "qspec_set_stream": (c_int, [c_void_p, c_int, POINTER(CPiece), c_int]),
        "qspec_reading": (None, [c_void_p, POINTER(CReading)]),
        "qspec_seconds": (None, [c_void_p, POINTER(c_double)]),
        "qspec_sequence": (c_void_p, [c_void_p]),
        "qspec_sequence_free": (None, [c_void_p]),
        "qspec_cache_bytes": (c_int64, [c_void_p]),
        "qspec_keep": (c_int, [c_void_p, POINTER(c_int32), c_int]),
        "qspec_length": (c_int, [c_void_p]),
        "qspec_truncate": (c_int, [c_void_p, c_int]),
        "qspec_forward": (
            c_int,
            [c_void_p, POINTER(CPart), c_int, c_int, c_void_p, c_void_p, c_void_p, POINTER(CTaps)],
        ),
        "qspec_speculator": (c_void_p, [c_void_p, POINTER(CHeads)]),
        "qspec_speculator_free": (None, [c_void_p]),
        "qspec_draft": (
            c_int,
            [c_void_p, c_void_p, POINTER(c_int64), c_int, POINTER(c_int32), c_int, CHOOSE, c_void_p, c_void_p],
        ),
        "qspec_set_lead": (c_int, [c_void_p, POINTER(CLead)]),
        "qspec_propose": (
            c_int,
            [c_void_p, POINTER(CPart), c_int, c_void_p, c_int, CHOOSE, c_void_p, c_int64],
        ),
        "qspec_linear": (c_int, [c_void_p, c_char_p, POINTER(CMatrix), c_void_p, c_int, c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def instruction_sets() -> list[str]:
    """Names of those that the library has code for and this machine runs, the fastest first. Raises `NoLibrary`."""
    names, lib = list[str](), library()
    while (name := lib.qspec_isa(len(names))) is not None:
        names.append(name.decode())
    if not names:  # the portable one runs everywhere
        raise MemoryError("no memory to try the instruction sets")
    return names


class NativeLinear:
    """Packed layers without bias on one thread, for what is too small to share out. isa: an instruction set by name."""

    def __init__(self, packed: Packed, isa: str | None = None) -> None:
        """Raises `NoLibrary` where there is no library."""
        self.packed, self._isa = packed, None if isa is None else isa.encode()
        self._lib, self._pool, self._matrix = library(), pool_of(1), matrix_of(packed)

    def __call__(self, x_TK: Tensor) -> Tensor:
        x_TK, y_TN = x_TK.contiguous(), torch.empty(len(x_TK), self.packed.n)
        x, y = floats(x_TK, len(x_TK) * self.packed.k), y_TN.data_ptr()
        if not self._lib.qspec_linear(self._pool.handle, self._isa, byref(self._matrix), x, len(x_TK), y):
            raise failure("a matmul")
        return y_TN
