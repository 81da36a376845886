// What is refused before anything is read: sizes that do not belong together, and indices outside of their table. A caller
// answers for the lengths of what its pointers lead to (qspec/nn/cpp/weights.py, interface.py); all else is checked here.
#pragma once
#include <algorithm>
#include <exception>
#include <new>

#include "model.h"

namespace qspec {

// A rule that a call has broken.
struct Refused : std::exception {
  explicit Refused(const char* rule) : rule(rule) {}
  const char* what() const noexcept override { return rule; }
  const char* rule;
};

inline void require(bool holds, const char* rule) {
  if (!holds) throw Refused(rule);
}

inline thread_local const char* refusal = nullptr;  // the rule that this thread's newest call has broken, or null

// Runs `body`; no exception crosses the C interface. False: `refusal` says why, or there is no memory.
template <class Body>
bool guarded(const Body& body) {
  refusal = nullptr;
  try {
    body();
    return true;
  } catch (const Refused& error) {
    refusal = error.rule;
  } catch (...) {
  }
  return false;
}

inline bool within(int64_t x, int64_t least, int64_t most) { return least <= x && x <= most; }

inline int64_t filled(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline bool is_float(const Matrix& m) { return m.kind == F32 || m.kind == BF16 || m.kind == F16; }

inline int64_t row_bytes(const Matrix& m) { return int64_t(m.k) * (m.kind == F32 ? 4 : 2); }

// Bytes of a weight in panels.
inline int64_t panel_bytes(const Matrix& m) {
  const int64_t lanes = int64_t(m.panels()) * 8;
  switch (m.kind) {
    case INT8_DOT: return lanes * filled(m.k, 8);
    case FP8_E4M3:
    case INT8: return lanes * m.k;
    case INT4:
    case INT4_DOT: return lanes * m.k / 2;
    default: return lanes * row_bytes(m);
  }
}

// A weight [n, k] in panels.
inline void require_matrix(const Weight& m, int64_t n, int64_t k) {
  require(m.codes, "a weight is missing");
  require(m.n == n && m.k == k && within(n, 1, INT32_MAX - 8) && within(k, 1, INT32_MAX - 64), "a weight has another shape");
  require(within(m.kind, F32, INT4_DOT) && within(m.input, FLOAT_INPUT, INT8_GROUP_INPUT), "a weight has no known format");
  const bool integers = m.input == INT8_INPUT || m.input == INT8_GROUP_INPUT, dot = m.kind == INT8_DOT || m.kind == INT4_DOT;
  require(integers == dot, "a weight's inputs do not fit its codes");
  require(m.group >= 1 && m.k % m.group == 0, "groups do not divide a weight's inputs");
  require(m.kind != INT4 || m.group % 8 == 0, "groups of 4-bit codes are not whole words");
  require(!dot || m.group == m.k || m.group % 32 == 0, "groups of integer products are no multiples of 32");
  require(m.kind != INT4_DOT || m.k % 32 == 0, "inputs of 4-bit products are no multiple of 32");
  require(m.bytes == panel_bytes(m), "a weight has another number of codes");
  require(m.kind == INT4_DOT || !m.zero, "a weight has zero points that nothing reads");
  require(!m.outlier_ends || m.input != FP8_INPUT, "weights kept apart read no rounded inputs");
}

// An embedding [n, k], row after row.
inline void require_rows(const Weight& m, int64_t n, int64_t k) {
  require(m.codes && is_float(m), "an embedding is missing, or no float");
  require(m.n == n && m.k == k && m.bytes == int64_t(m.n) * row_bytes(m), "an embedding has another shape");
}

// Weights kept apart: rows one after the other, columns among the inputs.
inline void require_outliers(const Weight& m) {
  if (!m.outlier_ends) return;
  const int lanes = m.panels() * 8;
  require(m.outlier_ends[0] == 0, "row ends of a sparse matrix do not start at 0");
  for (int n = 0; n < lanes; ++n) require(m.outlier_ends[n] <= m.outlier_ends[n + 1], "row ends of a sparse matrix fall");
  for (int i = 0; i < m.outlier_ends[lanes]; ++i)
    require(within(m.outlier_inputs[i], 0, m.k - 1), "columns of a sparse matrix lie outside of its inputs");
}

inline void require_shape(const Shape& s) {
  const int64_t most = 1 << 28;
  for (int64_t size : {s.layers, s.hidden, s.intermediate, s.heads, s.kv_heads, s.vocab, s.max_length})
    require(within(size, 1, most), "a size is 0, or none that a model has");
  require(within(s.head_dim, 8, 256) && s.head_dim % 8 == 0, "the head size is no multiple of 8 up to 256");
  require(int64_t(s.heads) * s.head_dim <= most && s.heads % s.kv_heads == 0, "heads are no multiple of the KV heads");
  require(within(s.rotary, 0, s.head_dim) && s.rotary % 2 == 0, "more is rotated than a head holds");
  require(within(s.ropes, 1, 2) && within(s.cache, FLOAT_CACHE, FP8_CACHE), "a switch has no known value");
  require(within(s.experts, 0, most), "a model has no such number of experts");
  require(!s.experts || (within(s.experts_per_token, 1, s.experts) && within(s.expert_size, 1, most)),
          "a token has no such number of experts");
  require(within(s.states, 0, most), "a head reads no such number of states");
}

// inputs: of q, k and v.
inline void require_layer(const Shape& s, const Layer& l, int64_t inputs) {
  const int64_t dims = int64_t(s.heads) * s.head_dim, keys = int64_t(s.kv_heads) * s.head_dim;
  require(l.input_norm && l.mlp_norm && !l.q_norm == !l.k_norm, "a norm is missing");
  require_matrix(l.qkv, dims + 2 * keys, inputs);
  require_matrix(l.o, s.hidden, dims);
  require(!l.experts || s.experts, "the model has no experts");
  if (l.experts) require_matrix(l.router, s.experts, s.hidden);
  const Weight dense[] = {l.gate_up, l.down};
  const int64_t features = l.experts ? s.expert_size : s.intermediate;
  for (int e = 0; e < (l.experts ? s.experts : 1); ++e) {
    const Weight* mlp = l.experts ? l.experts + 2 * e : dense;
    require_matrix(mlp[0], 2 * filled(features, 8), s.hidden);
    require_matrix(mlp[1], s.hidden, features);
  }
  require(s.cache != FP8_CACHE || (l.key_scale && l.value_scale), "an FP8 cache has no scales");
  require(l.window >= 0 && within(l.rope, 0, s.ropes - 1), "a layer has no such window, or rotation");
}

inline void require_ends(const Shape& s, const Weight& embedding, const float* norm, const Weight& head) {
  require(norm && within(head.n, 1, s.vocab), "the last norm is missing, or the head has other rows");
  require_matrix(head, head.n, s.hidden);
  if (embedding.codes) return require_rows(embedding, s.vocab, s.hidden);
  require(is_float(head) && head.n == s.vocab, "a head that is no embedding is taken for one");
}

inline void require_lead(const Shape& s, const Lead& l, const Weight& head) {
  require(s.states && head.codes, "a model without states, or without an end, is no head");
  require_matrix(l.fc, s.hidden, s.states);
  require_outliers(l.fc);
  require(l.state_norm && !(l.states_norm && l.tap_norms), "norms of states are missing, or too many");
  require(within(l.taps, 1, s.states) && s.states % l.taps == 0, "states are no equal parts");
  require(l.ids && within(l.drafted, 1, head.n), "more ids are drafted than a head has rows");
  for (int j = 0; j < head.n; ++j) require(within(l.ids[j], 0, s.vocab - 1), "an id lies outside of the vocabulary");
}

inline void require_taps(const Shape& s, const Taps& taps) {
  require(within(taps.count, 0, s.layers + 1) && (!taps.count || (taps.layers && taps.out)), "no place for what is tapped");
  for (int i = 0; i < taps.count; ++i)
    require(within(taps.layers[i], i ? taps.layers[i - 1] + 1 : 0, s.layers), "the model has no such layer to tap");
}

inline void require_heads(const Heads& h) {
  const int64_t most = 1 << 28;
  require(within(h.count, 1, 1024) && within(h.hidden, 1, most) && within(h.inner, 1, most), "heads have no such sizes");
  require(h.stages && h.ids && h.logits, "a part of the heads is missing");
  const int64_t vocab = h.stages[0].embedding.n;
  for (int i = 0; i < h.count; ++i) {
    const Stage& s = h.stages[i];
    require(s.gain && s.shift, "a norm is missing");
    require_rows(s.embedding, vocab, s.embedding_map.codes ? h.hidden : h.inner);
    if (s.embedding_map.codes) require_matrix(s.embedding_map, h.inner, h.hidden);
    require_matrix(s.proj, h.inner, i ? h.inner : h.hidden);
    if (s.out_map.codes) require_matrix(s.out_map, h.hidden, h.inner);
    require_matrix(s.out, s.out.n, s.out_map.codes ? h.hidden : h.inner);
    require(within(h.drafted, 1, s.out.n), "more ids are drafted than a head has rows");
    require(h.logits_stride >= int64_t(s.out.panels()) * 8, "rows of logits are too short");
    for (const Weight* m : {&s.embedding_map, &s.proj, &s.out_map, &s.out})
      if (m->codes) require_outliers(*m);
  }
  for (int j = 0; j < h.drafted; ++j) require(within(h.ids[j], 0, vocab - 1), "an id lies outside of the vocabulary");
}

}  // namespace qspec
