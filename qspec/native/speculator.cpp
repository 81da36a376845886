// Proposals of an MLP speculator, for one sequence or several, in one parallel region: the heads one after the other, each
// fed with the state before it and the token chosen there. qspec/nn/mlp_speculator.py says what a head computes,
// qspec/nn/draft_heads.py holds the eager twin; linear layers are INT8, the rest is float32.
//
//   state = GELU(norm(proj(state) + ratio * embedding_map(embedding[token])));  logits = out(out_map(state))
#include <cmath>
#include <mutex>

#include "matmuls.h"

namespace qspec {
namespace {

constexpr int ROWS = 8;  // paths that a matmul takes at once

class Speculator : Matmuls {
 public:
  Speculator(Pool& pool, const Kernels& kernels, const Heads& heads)
      : Matmuls(pool, kernels, ROWS, size_t(std::max(heads.hidden, heads.inner)), heads.norm_eps),
        h_(heads),
        stages_(heads.stages, heads.stages + heads.count) {
    for (Buffer<float>* rows : {&embedding_, &embedded_, &states_, &mapped_}) *rows = zeros<float>(ROWS * row_stride_);
  }

  Pool& pool() const { return pool_; }
  bool knows(int64_t token) const { return token >= 0 && token < stages_[0].embedding.n; }

  // Draft behind `count` tokens, the roots, whose states are the rows of `hidden`: of head i the `widths[i]` likeliest
  // tokens behind each path so far. tokens, scores: level after level, the newest token of each path and its
  // log-probability. choose: null, or asked behind every token of chains, which end one by one.
  void draft(const float* hidden, const int64_t* roots, int count, const int32_t* widths, int levels, Choose choose,
             int64_t* tokens, float* scores) {
    std::lock_guard<std::mutex> one(calls_);
    require(count >= 0 && within(levels, 1, h_.count), "there are fewer heads");
    size_t paths = size_t(count);
    for (int i = 0; i < levels; ++i) {
      require(within(widths[i], 1, choose ? 1 : h_.drafted), "there are fewer ids");
      if (i + 1 < levels) paths *= size_t(widths[i]);
      require(paths <= size_t{1} << 24, "there are too many paths");
    }
    outside_ = false;
    before_.resize(paths * row_stride_);
    after_.resize(paths * row_stride_);
    for (int j = 0; j < count; ++j) begin(hidden + int64_t(j) * h_.hidden, before_.data() + j * row_stride_);
    root_scores_.assign(count, 0.0f);
    chains_.resize(count);
    for (int j = 0; j < count; ++j) chains_[j] = j;
    pool_.run([&](int thread) { walk(thread, roots, count, widths, levels, choose, tokens, scores); });
    require(!outside_, "a chosen place lies outside of the head");
  }

 private:
  void begin(const float* hidden, float* state) const {
    if (h_.begin) run_.norm(hidden, h_.begin, norm_eps_, h_.hidden, state);
    else std::memcpy(state, hidden, sizeof(float) * h_.hidden);
  }

  void walk(int thread, const int64_t* fed, int paths, const int32_t* widths, int levels, Choose choose, int64_t* tokens,
            float* scores) {
    const float* score = root_scores_.data();
    int siblings = 1;  // rows of this level that follow the same state
    for (int i = 0; i < levels && paths; ++i) {
      const int width = widths[i];
      for (int first = 0; first < paths; first += ROWS) {
        const int count = std::min(ROWS, paths - first);
        advance(thread, stages_[i], fed, first, count, siblings);
        for (int t; (t = pool_.claim()) < count;)
          take(t, width, score[first + t], tokens + (first + t) * width, scores + (first + t) * width);
        pool_.barrier();
        if (thread == 0 && choose) ask(choose, first, count, score, tokens, scores);
        if (thread == 0 && first + count == paths) paths_ = finish_level(paths * width, tokens, scores);
        pool_.barrier();
      }
      fed = tokens;
      score = scores;
      siblings = width;
      tokens += paths * width;
      scores += paths * width;
      paths = paths_;
    }
  }

  // States and logits of rows [first, first + count) of a level.
  void advance(int thread, const Stage& s, const int64_t* fed, int first, int count, int siblings) {
    float* embedding = (s.embedding_map.codes ? embedding_ : embedded_).get();
    for (int t; (t = pool_.claim()) < count;) {
      run_.embed(s.embedding, false, fed[first + t], 1.0f, embedding + t * row_stride_);
      const float* state = before_.data() + (first + t) / siblings * row_stride_;
      std::memcpy(states_.get() + t * row_stride_, state, sizeof(float) * s.proj.k);
    }
    pool_.barrier();
    if (s.embedding_map.codes) multiply(thread, s.embedding_map, embedding, count, embedded_.get(), row_stride_);
    float* after = after_.data() + first * row_stride_;
    multiply(thread, s.proj, states_.get(), count, after, row_stride_);
    for (int t; (t = pool_.claim()) < count;) activate(s, embedded_.get() + t * row_stride_, after + t * row_stride_);
    pool_.barrier();
    if (s.out_map.codes) multiply(thread, s.out_map, after, count, mapped_.get(), row_stride_);
    multiply(thread, s.out, s.out_map.codes ? mapped_.get() : after, count, h_.logits, h_.logits_stride);
  }

  // y = m(x) for `count` rows; rows of y hold whole panels.
  void multiply(int thread, const Weight& m, const float* x, int count, float* y, int64_t y_stride) {
    pieces(thread, m, prepared(thread, m, x, row_stride_, nullptr, count), piece(m),
           [&](int first, int panels, float* out, int64_t stride) {
             for (int t = 0; t < count; ++t)
               std::memcpy(y + t * y_stride + first * 8, out + t * stride, sizeof(float) * panels * 8);
           });
  }

  void activate(const Stage& s, const float* embedded, float* x) const {
    for (int j = 0; j < h_.inner; ++j) x[j] += h_.ratio * embedded[j];
    run_.norm(x, s.gain, norm_eps_, h_.inner, x);
    for (int j = 0; j < h_.inner; ++j) {
      const float y = x[j] + s.shift[j];
      x[j] = 0.5f * y * (1.0f + std::erf(y * 0.70710678f));
    }
  }

  // The `width` likeliest ids of row t by their places, of equals the first ones, and the path's log-probability.
  void take(int t, int width, float score, int64_t* places, float* scores) const {
    const float* logits = h_.logits + t * h_.logits_stride;
    int found = 0;
    for (int j = 0; j < h_.drafted; ++j) {
      if (found == width && logits[j] <= scores[width - 1]) continue;
      int at = found < width ? found++ : width - 1;
      for (; at && scores[at - 1] < logits[j]; --at) scores[at] = scores[at - 1], places[at] = places[at - 1];
      scores[at] = logits[j];
      places[at] = j;
    }
    const float mass = scores[0] + std::log(run_.exp_sum(logits, h_.drafted, scores[0]));
    for (int j = 0; j < width; ++j) scores[j] += score - mass;
  }

  // What rows [first, first + count) of a level, whose logits are there now, go on with: a place, or -1.
  void ask(Choose choose, int first, int count, const float* before, int64_t* places, const float* scores) {
    for (int t = 0; t < count; ++t) {
      const int j = first + t;
      places[j] = choose(chains_[j], t, static_cast<int32_t>(places[j]), std::exp(scores[j] - before[j]));
      if (places[j] < h_.drafted) continue;
      outside_ = true;  // told when all threads have ended
      places[j] = -1;
    }
  }

  // Places become ids, and chains that end leave. Returns how many paths there are.
  int finish_level(int paths, int64_t* places, float* scores) {
    int kept = 0;
    for (int j = 0; j < paths; ++j) {
      if (places[j] < 0) continue;
      places[kept] = h_.ids[places[j]];
      if (kept != j) {  // a chain, whose paths are rows
        std::memcpy(after_.data() + kept * row_stride_, after_.data() + j * row_stride_, sizeof(float) * h_.inner);
        scores[kept] = scores[j];
        chains_[kept] = chains_[j];
      }
      ++kept;
    }
    std::swap(before_, after_);
    return kept;
  }

  const Heads h_;
  const std::vector<Stage> stages_;
  Buffer<float> embedding_, embedded_, states_, mapped_;  // [ROWS][row_stride_]
  std::vector<float> before_, after_;                     // states of all paths, of two levels
  std::vector<float> root_scores_;                        // of nothing: zeros
  std::vector<int> chains_;                               // which chain each row is
  int paths_ = 0;                                         // of the newest level
  bool outside_ = false;                                  // whether a place was chosen that is not there
  std::mutex calls_;
};

}  // namespace
}  // namespace qspec

using qspec::Pool;
using qspec::Speculator;

// Null: refused, or out of memory.
QSPEC_API Speculator* qspec_speculator(Pool* pool, const qspec::Heads* heads) {
  Speculator* made = nullptr;
  qspec::guarded([&] {
    qspec::require_heads(*heads);
    made = new Speculator(*pool, *qspec::kernels_named(nullptr), *heads);
  });
  return made;
}

QSPEC_API void qspec_speculator_free(Speculator* s) { delete s; }

// 0; -1: this process was forked from the one whose threads the pool holds; -2: refused, or out of memory; -3: no such token.
QSPEC_API int qspec_draft(Speculator* s, const float* hidden, const int64_t* roots, int count, const int32_t* widths,
                          int levels, qspec::Choose choose, int64_t* tokens, float* scores) {
  if (!s->pool().usable()) return -1;
  for (int j = 0; j < count; ++j)
    if (!s->knows(roots[j])) return -3;
  const auto draft = [&] { s->draft(hidden, roots, count, widths, levels, choose, tokens, scores); };
  return qspec::guarded(draft) ? 0 : -2;
}
