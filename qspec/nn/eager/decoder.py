"""The decoder that runs here: Llama, Mistral, Mixtral, Qwen, Gemma and Phi, float or quantized.

T rows of a pass, L positions in the cache, H heads, D head size, V vocabulary, K nodes of a tree. Layers that read the
same input (q/k/v, gate/up) are merged into one matmul at load; names on disk stay apart. A decoder is one sequence;
forks share its weights, and a pass may hold rows of several: only attention tells them apart.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
import torch.nn.functional as F

from qspec.errors import RecipeError
from qspec.nn.eager.attention import EXACT_ROWS, Rows, rope_tables, rotate, scores
from qspec.nn.eager.experts import Experts, Mlp
from qspec.nn.eager.kv_cache import FloatKVCache, KVCache, QuantizedKVCache
from qspec.nn.eager.linear import merged_linear, short_headed, widened
from qspec.nn.states import States, Taps
from qspec.numerics.quantization.rotation import hadamard_transform
from qspec.numerics.speculation.trees import Parents, check_path
from qspec.ops.select import Kernels, Linear
from qspec.records import EMBEDDING, ArchMap, LoadedModel, QLinear, QuantizedModel

Observer = Callable[[str, Tensor], None]
"""Called with a linear layer's name and its input `[T, K]`, and `….self_attn.q` / `.k` / `.v` with `[H, T, D]`."""

Streams = dict[int, Tensor]
"""Residuals `[T, hidden]` by the number of the layer that they enter; behind the last one, by the number of layers."""

HEAD_ROWS = 16
"""Rows up to which a float head computes each as if alone (`ops.cpu.FloatLinear`)."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer, ready to run."""

    name: str
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp | Experts
    mlp_post_norm: Tensor | None
    window: int | None


class Decoder:
    """A causal LM with its own KV cache; implements `nn.lm.BatchLM`, `HiddenLM` and `TappedLM`."""

    def __init__(
        self,
        arch: ArchMap,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, QLinear],
        new_cache: Callable[[], KVCache],
        dtype: torch.dtype,
        kernels: Kernels = "auto",
        head_ids: Tensor | None = None,
    ) -> None:
        self.arch, self._dtype, self._new_cache, self._head_ids = arch, dtype, new_cache, head_ids
        self._cache, self._length = new_cache(), 0
        self._tree: Parents = ()  # nodes that wait behind `length`
        self._states, self._taps = States(), Taps()
        self.observer: Observer | None = None
        weights = _Weights(arch, tensors, linears, dtype, kernels)
        self._embed_VK = tensors[EMBEDDING].to(dtype) if EMBEDDING in tensors else None
        self._layers = [_layer(weights, layer) for layer in arch.layers]
        self._norm = weights.norm("model.norm") if arch.has_head else None
        self._head = self._own_head(weights, linears) if arch.has_head else None
        self._rope = rope_tables(arch.rope_inv_freq, arch.rope_factor, self.max_length, dtype)
        self._window_rope = self._rope
        if arch.window_inv_freq:
            self._window_rope = rope_tables(arch.window_inv_freq, 1.0, self.max_length, dtype)

    @classmethod
    def from_float(
        cls, model: LoadedModel, dtype: torch.dtype = torch.float32, max_length: int | None = None
    ) -> "Decoder":
        """The original model, weights converted to `dtype`."""
        new_cache = partial(FloatKVCache, model.arch, max_length or model.arch.max_positions, dtype)
        return cls(model.arch, model.tensors, {}, new_cache, dtype)

    @classmethod
    def from_quantized(
        cls,
        model: QuantizedModel,
        dtype: torch.dtype = torch.float32,
        max_length: int | None = None,
        kernels: Kernels = "auto",
    ) -> "Decoder":
        """A quantized model on this machine's kernels, or on their eager twins (`kernels="reference"`)."""
        model = short_headed(model)
        length, scheme = max_length or model.arch.max_positions, model.plan.kv
        new_cache: Callable[[], KVCache] = partial(FloatKVCache, model.arch, length, dtype)
        if scheme is not None:
            scales = model.k_scale, model.v_scale, model.q_scale
            new_cache = partial(QuantizedKVCache, model.arch, length, dtype, scheme, *scales)
        return cls(model.arch, model.tensors, model.linears, new_cache, dtype, kernels, model.head_ids)

    def _own_head(self, weights: "_Weights", linears: Mapping[str, QLinear]) -> Linear:
        if self.arch.tied and "lm_head" not in linears:
            assert self._embed_VK is not None, "a tied head is the embedding"
            return merged_linear([self._embed_VK], [None], self._dtype)
        return weights.linear("lm_head")

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size

    @property
    def max_length(self) -> int:
        return self._cache.max_length

    @property
    def length(self) -> int:
        return self._length

    @property
    def device(self) -> torch.device:
        """Where its weights are, and what it reads has to be."""
        return self._rope[0].device

    @property
    def cache(self) -> KVCache:
        return self._cache

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length}"
        self._cache.truncate(length)
        self._states.truncate(length)
        self._taps.truncate(length)
        self._length, self._tree = length, ()

    def hidden(self, count: int = 1) -> Tensor:
        return self._states.newest(count)

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = Taps(layers, self.arch.hidden_size, len(self._layers))

    def tapped(self, start: int) -> Tensor:
        return self._taps.since(start)

    @property
    def weights(self) -> Hashable:
        return id(self._layers)

    def fork(self) -> "Decoder":
        """Another, empty sequence on the same weights."""
        other = copy(self)
        other._cache, other._length, other._tree = self._new_cache(), 0, ()
        other._states, other._taps = States(), Taps()
        return other

    def with_layers(self, numbers: Sequence[int]) -> "Decoder":
        """Another, empty sequence on the same weights that goes through some of the layers only."""
        other = self.fork()
        other._layers = [self._layers[i] for i in numbers]
        return other

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, last: int | None = None) -> Tensor:
        streams = self._next_rows(self.embed(tokens_T))
        self._note(streams, None, last)
        return self.run_head(streams[len(self._layers)], last)

    def forward_tree(self, tokens_T: Tensor, parents_K: Parents) -> Tensor:
        return self.forward_many([self], [tokens_T], [parents_K])[0]

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        check_path(self._tree, path)
        self._cache.keep(self._length, path)
        self._states.keep(path)
        self._taps.keep(path)
        self._length, self._tree = self._length + len(path), ()

    @classmethod
    @torch.inference_mode()
    def forward_many(
        cls, sequences: Sequence["Decoder"], tokens: Sequence[Tensor], parents: Sequence[Parents | None]
    ) -> list[Tensor]:
        first, counts = sequences[0], [len(tokens_T) for tokens_T in tokens]
        assert all(sequence.weights == first.weights for sequence in sequences), "forks of different weights"
        requests = list(zip(sequences, counts, parents, strict=True))
        plans = [sequence._rows(count, parents_K) for sequence, count, parents_K in requests]
        wanted = {layer for sequence in sequences for layer in sequence._taps.layers}
        streams = first._run_together(plans, first.embed(torch.cat(list(tokens))).split(counts), wanted)
        hidden_TK = torch.cat([own[len(first._layers)] for own in streams])
        logits_TV = torch.cat([first.run_head(x_TK) for x_TK in hidden_TK.split(EXACT_ROWS - 1)])
        for (sequence, count, parents_K), own in zip(requests, streams, strict=True):
            sequence._advance(count, parents_K)
            sequence._note(own, parents_K)
        return list(logits_TV.split(counts))

    @torch.inference_mode()
    def embed(self, tokens_T: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` before the first layer."""
        assert self._embed_VK is not None, "this piece of a model holds no embedding"
        return F.embedding(tokens_T, self._embed_VK) * self.arch.embed_scale

    @torch.inference_mode()
    def run_head(self, x_TK: Tensor, last: int | None = None) -> Tensor:
        """Float32 logits `[last or T, V]` of hidden states after the last layer."""
        assert self._head is not None, "this piece of a model holds no head"
        assert self._norm is not None
        if self.observer is None and last is not None:
            x_TK = x_TK[-last:]
        x_TK = self._normed(x_TK, self._norm)
        self._observe("lm_head", x_TK)
        x_TK = x_TK if last is None else x_TK[-last:]
        size = HEAD_ROWS if x_TK.shape[0] <= EXACT_ROWS else x_TK.shape[0]
        logits_TV = _joined([self._head(part_TK) for part_TK in x_TK.split(size)]).float()
        cap = self.arch.logit_softcap
        logits_TV = logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
        return widened(logits_TV, self._head_ids, self.vocab_size)

    @torch.inference_mode()
    def run_layers(self, x_TK: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` of the next T positions, from before the first layer to after the last one."""
        return self._next_rows(x_TK)[len(self._layers)]

    def _next_rows(self, x_TK: Tensor) -> Streams:
        count = x_TK.shape[0]
        (streams,) = self._run_together([self._rows(count, None)], [x_TK], self._taps.layers)
        self._advance(count, None)
        return streams

    def _rows(self, count: int, parents_K: Parents | None) -> list[Rows]:
        """The next rows, in parts that go through the model one after the other (nearly always one)."""
        start, size = self._length, count if parents_K is None else len(parents_K)
        assert start + size <= self.max_length, f"{start + size} positions, cache holds {self.max_length}"
        if parents_K is None:
            sizes = self._cache.segments(start, start + size)
            return [Rows(self._cache, at, n) for at, n in zip(accumulate(sizes, initial=start), sizes, strict=False)]
        assert list(parents_K[: size - count]) == list(self._tree[: size - count]), "another tree than the one begun"
        if not self._cache.takes_trees:
            rule = "this KV cache rounds tokens by their positions, which the nodes of a tree share"
            raise RecipeError(f"a tree of {size} drafts", rule, "draft chains, or keep kv without groups and residual")
        return [Rows(self._cache, start, count, parents_K)]

    def _advance(self, count: int, parents_K: Parents | None) -> None:
        if parents_K is None:
            self._length, self._tree = self._length + count, ()
        else:
            self._tree = tuple(parents_K)

    def _note(self, streams: Streams, parents_K: Parents | None, last: int | None = None) -> None:
        """Keep the states behind the last rows of this pass, normed as the head reads them, and what is tapped."""
        assert self._norm is not None
        x_TK = streams[len(self._layers)]
        rows_TK = self._normed(x_TK if last is None else x_TK[-last:], self._norm).float()
        if parents_K is None:
            self._states.append(rows_TK, self._length)
        else:
            self._states.offer(rows_TK, len(parents_K))
        if self._taps.layers:
            tapped_TS = torch.cat([streams[layer].float() for layer in self._taps.layers], 1)
            self._taps.note(tapped_TS, self._length, parents_K)

    def _run_together(self, plans: Sequence[list[Rows]], x: Sequence[Tensor], wanted: Collection[int]) -> list[Streams]:
        """Residuals of every sequence, as `_pass` has them; each turn is one pass over the next part of all."""
        pairs = zip(plans, x, strict=True)
        queues = [deque(zip(plan, x_TK.split(_counts(plan)), strict=True)) for plan, x_TK in pairs]
        out: list[list[Streams]] = [[] for _ in plans]
        while any(queues):
            now = [i for i, queue in enumerate(queues) if queue]
            parts, inputs = zip(*(queues[i].popleft() for i in now), strict=True)
            streams = self._pass(parts, _joined(inputs), wanted)
            split = {layer: x_TK.split(_counts(parts)) for layer, x_TK in streams.items()}
            for place, i in enumerate(now):
                out[i].append({layer: pieces[place] for layer, pieces in split.items()})
        return [{layer: _joined([part[layer] for part in own]) for layer in own[0]} for own in out]

    def _pass(self, parts: Sequence[Rows], x_TK: Tensor, wanted: Collection[int]) -> Streams:
        """The residuals in front of the layers that are wanted, and behind the last one."""
        positions_T = _joined([rows.positions for rows in parts])
        ropes = [tuple(table_LD[positions_T] for table_LD in tables) for tables in (self._rope, self._window_rope)]
        masks = {window: [rows.mask(window) for rows in parts] for window in {layer.window for layer in self._layers}}
        exact = all(rows.count <= EXACT_ROWS for rows in parts)
        streams: Streams = {}
        for i, layer in enumerate(self._layers):
            if i in wanted:
                streams[i] = x_TK
            rope = ropes[layer.window is not None]
            y_TK = self._attention(i, layer, self._normed(x_TK, layer.input_norm), parts, rope, masks[layer.window])
            x_TK = x_TK + self._post_normed(y_TK, layer.attention_post_norm)
            y_TK = self._feed_forward(layer.mlp, self._normed(x_TK, layer.mlp_norm), exact)
            x_TK = x_TK + self._post_normed(y_TK, layer.mlp_post_norm)
        streams[len(self._layers)] = x_TK
        return streams

    def _attention(
        self,
        i: int,
        layer: Layer,
        x_TK: Tensor,
        parts: Sequence[Rows],
        rope: tuple[Tensor, ...],
        masks: list[Tensor | None],
    ) -> Tensor:
        a, name, t = self.arch, f"{layer.name}.self_attn", x_TK.shape[0]
        self._observe(f"{name}.q_proj", x_TK)
        heads_HTD = layer.qkv(x_TK).view(t, -1, a.head_dim).transpose(0, 1)
        q, k, v = torch.split(heads_HTD, [a.n_heads, a.n_kv_heads, a.n_kv_heads])
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        q, k = rotate(q, *rope), rotate(k, *rope)
        self._observe(f"{name}.q", q)
        self._observe(f"{name}.k", k)
        self._observe(f"{name}.v", v)
        by_model = partial(scores, scale=a.attention_scale, softcap=a.attention_softcap)
        if len(parts) == 1:
            y_TK = parts[0].attend(i, by_model, q, k, v, masks[0], layer.window)
        else:
            own = zip(parts, *(x.split(_counts(parts), 1) for x in (q, k, v)), masks, strict=True)
            y_TK = torch.cat([rows.attend(i, by_model, *x, mask_TL, layer.window) for rows, *x, mask_TL in own])
        self._observe(f"{name}.o_proj", y_TK)
        return layer.o(y_TK)

    def _feed_forward(self, mlp: Mlp | Experts, x_TK: Tensor, exact: bool) -> Tensor:
        if isinstance(mlp, Mlp):
            return self._mlp(mlp, x_TK)
        self._observe(mlp.router, x_TK)
        if self.observer is not None or not exact:
            return mlp.mix(x_TK, self._mlp)
        return torch.cat([mlp.mix(row_1K, self._mlp) for row_1K in x_TK.split(1)])

    def _mlp(self, mlp: Mlp, x_TK: Tensor) -> Tensor:
        self._observe(f"{mlp.name}.gate_proj", x_TK)
        gate, up = mlp.gate_up(x_TK).chunk(2, -1)
        gate = F.silu(gate) if self.arch.activation == "silu" else F.gelu(gate, approximate="tanh")
        x_TF = gate * up
        if self.arch.down_hadamard:
            x_TF = hadamard_transform(x_TF)
        self._observe(f"{mlp.name}.down_proj", x_TF)
        return mlp.down(x_TF)

    def _post_normed(self, x_TK: Tensor, gain: Tensor | None) -> Tensor:
        return x_TK if gain is None else self._normed(x_TK, gain)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return (x32 * scale * gain).to(self._dtype)

    def _observe(self, name: str, x: Tensor) -> None:
        if self.observer is not None:
            self.observer(name, x)


class _Weights:
    """Looks tensors up by name and turns them into callables."""

    def __init__(
        self,
        arch: ArchMap,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, QLinear],
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self.arch, self._tensors, self._linears, self._dtype, self._kernels = arch, tensors, linears, dtype, kernels

    def norm(self, name: str) -> Tensor:
        """RMSNorm gain in float32 with the architecture's offset added."""
        return self._tensors[f"{name}.weight"].float() + self.arch.norm_offset

    def kept(self, name: str) -> Tensor:
        """A weight that is never quantized, in the compute dtype."""
        return self._tensors[f"{name}.weight"].to(self._dtype)

    def linear(self, *names: str) -> Linear:
        members = [self._linears[n] if n in self._linears else self._tensors[f"{n}.weight"] for n in names]
        biases = [
            m.bias if isinstance(m, QLinear) else self._tensors.get(f"{n}.bias")
            for n, m in zip(names, members, strict=True)
        ]
        return merged_linear(members, biases, self._dtype, self._kernels)


def _layer(w: _Weights, base: str) -> Layer:
    a, attn = w.arch, f"{base}.self_attn"
    return Layer(
        name=base,
        input_norm=w.norm(f"{base}.input_layernorm"),
        qkv=w.linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
        q_norm=w.norm(f"{attn}.q_norm") if a.qk_norm else None,
        k_norm=w.norm(f"{attn}.k_norm") if a.qk_norm else None,
        o=w.linear(f"{attn}.o_proj"),
        attention_post_norm=w.norm(f"{base}.post_attention_layernorm") if a.post_norms else None,
        mlp_norm=w.norm(f"{base}.{a.mlp_norm}"),
        mlp=_feed_forward(w, base),
        mlp_post_norm=w.norm(f"{base}.post_feedforward_layernorm") if a.post_norms else None,
        window=a.window(base),
    )


def _feed_forward(w: _Weights, layer: str) -> Mlp | Experts:
    members = [
        Mlp(name, w.linear(f"{name}.gate_proj", f"{name}.up_proj"), w.linear(f"{name}.down_proj"))
        for name in w.arch.mlps(layer)
    ]
    router = w.arch.router(layer)
    if router is None:
        return members[0]
    return Experts(router, w.kept(router), tuple(members), w.arch.experts_per_token, w.arch.normed_routing)


def _counts(parts: Sequence[Rows]) -> list[int]:
    return [rows.count for rows in parts]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
