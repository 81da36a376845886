// The C interface, called through ctypes (qspec/nn/native.py mirrors these structs). All data is copied on arrival.
#pragma once
#include "kernels.h"

#define QSPEC_API extern "C" __attribute__((visibility("default")))

namespace qspec {

struct Shape {
  int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, max_length, rotary, activation, cache, ropes;
  float norm_eps, attention_scale, embed_scale;
};

// qkv rows: all query heads, then keys, then values. gate_up panels: gate, up, gate, up, … q_norm and k_norm may be
// null. window 0: none. rope: which table. Scales of an FP8 cache, per KV head.
struct Layer {
  const float *input_norm, *mlp_norm, *q_norm, *k_norm;
  Matrix qkv, o, gate_up, down;
  const float *key_scale, *value_scale;
  int32_t window, rope;
};

class Sequence;

// Tokens for one sequence: its next ones, or (parents given) the last `count` of a tree of `nodes` at its end.
struct Part {
  Sequence* sequence;
  const int64_t* tokens;
  const int32_t* parents;
  int32_t count, nodes;
};

}  // namespace qspec
