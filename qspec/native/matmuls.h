// What a walk through layers needs besides them: inputs as matrices read them, and matmuls that threads take pieces of.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "checks.h"
#include "model.h"
#include "pool.h"

namespace qspec {
namespace {

constexpr int OWN_ROWS = 4;      // rows that each thread prepares for itself: cheaper than a barrier
constexpr int MOST_PANELS = 32;  // of a piece

size_t rounded_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> zeros(size_t count) {
  auto* p = static_cast<T*>(std::calloc(std::max<size_t>(count, 1), sizeof(T)));
  if (!p) throw std::bad_alloc();
  return Buffer<T>(p);
}

// Row t of a matmul's inputs: copied (unless it is there already) and rounded as the matrix reads it.
void prepare_row(const Kernels& run, const Weight& m, const float* x, const Rows& rows, int t) {
  float* values = rows.values + t * rows.stride;
  if (m.input == INT8_INPUT || m.input == INT8_GROUP_INPUT) {
    run.quantize_int8(x, m, rows, t);
    if (m.outlier_ends && x != values) std::memcpy(values, x, sizeof(float) * m.k);  // these read unrounded inputs
    return;
  }
  if (x != values) std::memcpy(values, x, sizeof(float) * m.k);
  if (m.input == FP8_INPUT) run.round_fp8(values, m.k, m.input_scale);
}

// What the weights kept apart add to the outputs of panels [first, first + count).
void add_outliers(const Weight& m, const Rows& x, int first, int count, float* out, int64_t out_stride) {
  if (!m.outlier_ends) return;
  for (int n = first * 8; n < (first + count) * 8; ++n) {
    const int begin = m.outlier_ends[n], end = m.outlier_ends[n + 1];
    for (int t = 0; t < x.count && begin < end; ++t) {
      const float* values = x.values + t * x.stride;
      float total = 0.0f;
      for (int i = begin; i < end; ++i) total += m.outlier_values[i] * values[m.outlier_inputs[i]];
      out[t * out_stride + n - first * 8] += total;
    }
  }
}

struct Thread {
  Buffer<float> out, scratch, scores, values, row_scale, best;
  Buffer<int8_t> codes;
  Buffer<int32_t> start;
  Buffer<int64_t> best_token;
  Rows rows() const { return {values.get(), codes.get(), row_scale.get(), start.get(), 0, 0}; }
};

// Scratch of every thread, and matmuls that they share out. All threads of the pool call the same functions in the same
// order; those that share out end with a barrier.
class Matmuls {
 protected:
  // rows: the most that a matmul takes at once; widest: the most inputs of one.
  Matmuls(Pool& pool, const Kernels& kernels, size_t rows, size_t widest, float norm_eps)
      : pool_(pool), run_(kernels), norm_eps_(norm_eps), row_stride_(static_cast<int64_t>(rounded_up(widest, 64))) {
    shared_ = scratch_for(rows, row_stride_);
    for (int i = 0; i < pool.size(); ++i) {
      threads_.push_back(scratch_for(OWN_ROWS, row_stride_));
      threads_.back().out = zeros<float>(rows * size_t(MOST_PANELS) * 8);
      threads_.back().scratch = zeros<float>(2 * row_stride_ * 8);
    }
  }

  static Thread scratch_for(size_t rows, size_t widest) {
    Thread t;
    t.values = zeros<float>(rows * widest);
    t.codes = zeros<int8_t>(rows * widest);
    t.row_scale = zeros<float>(rows * widest / 32);
    t.start = zeros<int32_t>(rows * widest / 32);
    return t;
  }

  // Rows as matrix `m` reads them: normed (if there are gains), rounded. Few rows: each thread has its own copy.
  Rows prepared(int thread, const Weight& m, const float* x, int64_t x_stride, const float* gain, int count) {
    const bool own = count <= OWN_ROWS;
    Rows rows = (own ? threads_[thread] : shared_).rows();
    rows.stride = row_stride_;
    rows.count = count;
    if (own) {
      for (int t = 0; t < count; ++t) prepare(m, x + t * x_stride, gain, rows, t);
    } else {
      for (int t; (t = pool_.claim()) < count;) prepare(m, x + t * x_stride, gain, rows, t);
      pool_.barrier();
    }
    return rows;
  }

  void prepare(const Weight& m, const float* x, const float* gain, const Rows& rows, int t) const {
    float* values = rows.values + t * rows.stride;
    if (gain) run_.norm(x, gain, norm_eps_, m.k, values);
    prepare_row(run_, m, gain ? values : x, rows, t);
  }

  // Run `done(first panel, panels, outputs [rows][stride])` over the pieces of a matmul that this thread gets.
  template <class Done>
  void pieces(int thread, const Weight& m, const Rows& x, int panels, const Done& done) {
    for (int first; (first = pool_.claim() * panels) < m.panels();) {
      const int count = std::min(panels, m.panels() - first);
      done(first, count, outputs(thread, m, x, first, count, panels * 8), panels * 8);
    }
    pool_.barrier();
  }

  float* outputs(int thread, const Weight& m, const Rows& x, int first, int count, int64_t stride) {
    Thread& own = threads_[thread];
    run_.matmul(m, x, first, first + count, own.scratch.get(), own.out.get(), stride);
    add_outliers(m, x, first, count, own.out.get(), stride);
    return own.out.get();
  }

  // Small enough that threads end together, large enough to stream: a multiple of 4 panels.
  int piece(const Matrix& m) const {
    return std::clamp(m.panels() / (8 * pool_.size()) / 4 * 4, 4, MOST_PANELS);
  }

  Pool& pool_;
  const Kernels& run_;
  const float norm_eps_;
  const int64_t row_stride_;
  Thread shared_;  // inputs of a matmul, for all threads
  std::vector<Thread> threads_;
};

}  // namespace
}  // namespace qspec
