// The C interface, called through ctypes (qspec/nn/cpp/interface.py mirrors these structs). All data is copied on
// arrival, but weights that lie in the model's own memory.
#pragma once
#include "kernels.h"

#define QSPEC_API extern "C" __attribute__((visibility("default")))

namespace qspec {

struct Shape {
  int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, max_length, rotary, activation, cache, ropes;
  int32_t experts, experts_per_token, expert_size, normed_routing, states;  // states: of an EAGLE-3 head; 0: no head
  float norm_eps, attention_scale, embed_scale, attention_cap, logit_cap;
};

// A matrix beside weights that are kept apart: output n's are [ends[n], ends[n + 1]) of inputs and values. They read
// unrounded inputs, so FP8_INPUT has none. ends null: none at all.
struct Weight : Matrix {
  const int32_t* outlier_ends;
  const int32_t* outlier_inputs;
  const float* outlier_values;
};

// qkv rows: all query heads, then keys, then values. gate_up panels: gate, up, gate, up, … Norms of q and k, and of
// what attention and the MLP add, may be null. window 0: none. rope: which table. Scales of an FP8 cache, per KV head.
// A mixture has a router instead of gate_up and down, and those of every expert in `experts`: gate_up, down, gate_up, …
struct Layer {
  const float *input_norm, *mlp_norm, *q_norm, *k_norm, *attention_post_norm, *mlp_post_norm;
  Weight qkv, o, gate_up, down, router;
  const Weight* experts;
  const float *key_scale, *value_scale;
  int32_t window, rope;
};

// A layer that is read for every pass: bytes [start, start + size) of a file, and where in the model's memory they go.
// Neighbours need different places; the more layers share one, the less memory it takes.
struct Piece {
  int32_t layer;
  int64_t start, size;
  void* to;
};

// What a stream has read: seconds that reading took, and those of them that passes waited for it. error: 0, an error
// number, or -1: the file ends too early.
struct Reading {
  int64_t bytes;
  double seconds, waited;
  int32_t error;
};

class Sequence;

// Tokens for one sequence: its next ones, or (parents given) the last `count` of a tree of `nodes` at its end.
struct Part {
  Sequence* sequence;
  const int64_t* tokens;
  const int32_t* parents;
  int32_t count, nodes;
};

// Layers in front of which a pass copies the hidden states of all rows [rows, count, hidden]; the number of layers: in
// front of the last norm. They rise.
struct Taps {
  const int32_t* layers;
  int32_t count;
  float* out;
};

// A head of an MLP speculator. Maps without codes are none. `embedding` lies row after row.
struct Stage {
  const float *gain, *shift;  // of the norm [inner]
  Weight embedding, embedding_map, proj, out_map, out;
};

// All of them; weights stay where they are. begin: gains [hidden] of the norm in front of the first, null: none. ids: what
// of the target's vocabulary can be drafted, of which the first `drafted` may be. logits: room for eight rows of
// `logits_stride`, whole panels.
struct Heads {
  int32_t count, hidden, inner, drafted;
  float norm_eps, ratio;
  const float* begin;
  const Stage* stages;
  const int64_t* ids;
  float* logits;
  int64_t logits_stride;
};

// What makes a model an EAGLE-3 head: its first layer reads a token, normed by `input_norm`, beside a state, normed by
// `state_norm`, and its rows begin as fc [hidden, Shape.states] of the target's states or as what came out of the row
// before. states_norm: gains [states] of a norm over all of them, tap_norms: of one for each of `taps` equal parts; null:
// none, and never both. ids: which token each row of the model's head is, of which the first `drafted` may be drafted.
struct Lead {
  Weight fc;
  const float *states_norm, *tap_norms, *state_norm;
  const int64_t* ids;
  int32_t taps, norm_before_residual, norm_output, drafted;
};

// Told a chain, the row of `logits` that is its own, the likeliest id there by place, and its probability. Says the place of
// the id to draft, or -1: nothing behind it. Must not call the library.
using Choose = int32_t (*)(int32_t chain, int32_t row, int32_t best, float probability);

}  // namespace qspec
