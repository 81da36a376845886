// One forward pass of a decoder-only transformer as one parallel region: all threads walk the layers together, take
// pieces of each matmul as they get free, and meet at five barriers per layer. A pass of many rows goes through each
// layer block by block, so that its weights come from memory once.
//
//   norm + rounding of the input   by every thread for itself (few rows), or shared out
//   q/k/v                          piece: a head; its norm, rotation and cache write follow in the same thread
//   attention                      piece: a query of one head
//   o, down                        piece: some panels; added to the residual stream at once
//   gate/up                        piece: some pairs of panels; activation at once
//   mixtures                       piece: some panels of one expert, for all rows that chose it
//   head                           piece: some panels; logits, or the best token so far
//
// An EAGLE-3 head is such a model too, but for what its first layer reads (qspec/nn/eagle3.py): a whole proposal, rows of
// true states and then draft after draft, is one parallel region.
#include "model.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "matmuls.h"
#include "stream.h"

namespace qspec {
namespace {

constexpr int BLOCK = 64;  // rows that a layer takes at once
constexpr int CHAINS = 8;  // drafts that are asked for at once
constexpr size_t HUGE_PAGE = size_t{1} << 21;
constexpr size_t PAGE = 4096;  // what reads past the file cache begin at

// Memory that is never freed piece by piece, on huge pages where the system gives them.
class Arena {
 public:
  ~Arena() {
    for (void* block : blocks_) std::free(block);
  }

  void* take(size_t bytes, size_t align = 64) {
    size_t skipped = -reinterpret_cast<uintptr_t>(next_) % align;
    bytes = rounded_up(bytes, 64);
    if (skipped + bytes > left_) {
      grow(std::max(bytes, 16 * HUGE_PAGE));
      skipped = 0;
    }
    void* out = next_ + skipped;
    next_ += skipped + bytes;
    left_ -= skipped + bytes;
    return out;
  }

  template <class T>
  const T* copy(const T* from, size_t count) {
    if (!from) return nullptr;
    auto* to = static_cast<T*>(take(count * sizeof(T)));
    std::memcpy(to, from, count * sizeof(T));
    return to;
  }

 private:
  void grow(size_t bytes) {
    bytes = rounded_up(bytes, HUGE_PAGE);
    void* block = std::aligned_alloc(HUGE_PAGE, bytes);
    if (!block) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(block, bytes, MADV_HUGEPAGE);
#endif
    blocks_.push_back(block);
    next_ = static_cast<char*>(block);
    left_ = bytes;
  }

  std::vector<void*> blocks_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace

// Keys and values of one sequence.
class Sequence {
 public:
  Sequence(const Shape& shape, const Kernels& kernels, const std::vector<Layer>& layers)
      : s_(shape), run_(kernels), layers_(layers) {
    const size_t positions = rounded_up(s_.max_length, 8) + 24;  // attention reads whole blocks
    head_bytes_ = positions * s_.head_dim * (s_.cache == FLOAT_CACHE ? 4 : 1);
    scales_per_head_ = s_.cache == INT8_CACHE ? positions : 0;
    codes_ = zeros<char>(stores() * head_bytes_);
    scales_ = zeros<float>(stores() * scales_per_head_);
  }

  int64_t bytes() const { return stores() * (head_bytes_ + sizeof(float) * scales_per_head_); }

  HeadCache head(int layer, int head) const {
    const size_t at = 2 * (size_t(layer) * s_.kv_heads + head);
    char* codes = codes_.get() + at * head_bytes_;
    float* scale = scales_.get() + at * scales_per_head_;
    float* value_scale = scale + scales_per_head_;
    if (s_.cache == FP8_CACHE) {  // scales of the model; an FP8 cache only reads them
      scale = const_cast<float*>(layers_[layer].key_scale) + head;
      value_scale = const_cast<float*>(layers_[layer].value_scale) + head;
    }
    return {codes, codes + head_bytes_, scale, value_scale};
  }

  bool of(const Shape& shape) const { return &s_ == &shape; }

  void truncate(int to) {
    require(within(to, 0, length), "a sequence is no longer than it is");
    length = to;
  }

  // Append the nodes of a path. Its nodes rise, so none is overwritten before it has moved.
  void keep(const int32_t* path, int count) {
    for (int i = 0; i < count; ++i)
      require(within(path[i], i ? path[i - 1] + 1 : 0, s_.max_length - 1 - length), "a path leaves its tree");
    for (int i = 0; i < count; ++i)
      for (int layer = 0; layer < s_.layers && path[i] != i; ++layer)
        for (int h = 0; h < s_.kv_heads; ++h)
          run_.move_position(s_.cache, head(layer, h), s_.head_dim, length + path[i], length + i);
    length += count;
  }

  int length = 0;

 private:
  size_t stores() const { return size_t(s_.layers) * s_.kv_heads * 2; }

  const Shape& s_;
  const Kernels& run_;
  const std::vector<Layer>& layers_;
  Buffer<char> codes_;
  Buffer<float> scales_;
  size_t head_bytes_, scales_per_head_;
};

namespace {

// A token of a pass: where it is written, at which position it stands, and what it sees (from `begin` 0 on).
struct Row {
  Sequence* sequence;
  int64_t token;
  int slot;
  Span span;

  int position() const { return span.end - 1; }
};

// Rows of a pass that go through a layer together, and their hidden states.
struct Block {
  const Row* rows;
  int count;
  float* hidden;
};

// A draft on its way: its number, the sequence, the row that ends it, and what is drafted behind that.
struct Chain {
  int number;
  Sequence* sequence;
  int row;
  int64_t token;
};

// A row's way through one expert.
struct Choice {
  int row, expert;
  float weight;
};

// Where the time of passes goes, as their first thread sees it: most laps end where all threads meet.
enum Lap { EMBEDDING, NORMS, QKV, ATTENTION, O, GATE_UP, DOWN, MIXTURE, HEAD, READING, LAPS };

class Laps {
 public:
  void begin() { last_ = Clock::now(); }

  void end(int thread, Lap lap) {
    if (thread != 0) return;
    const auto now = Clock::now();
    seconds[lap] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  double seconds[LAPS] = {};

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
};

class Model : Matmuls {
 public:
  Model(Pool& pool, const Shape& shape, const Kernels& kernels)
      : Matmuls(pool, kernels, BLOCK, widest_of(shape), shape.norm_eps),
        s_(shape),
        layers_(shape.layers),
        ropes_(2 * shape.ropes) {
    const size_t dims = size_t(s_.heads) * s_.head_dim, choices = BLOCK * size_t(s_.experts_per_token);
    const size_t features = rounded_up(s_.intermediate, 8), expert_features = rounded_up(s_.expert_size, 8);
    const size_t widest = row_stride_;
    hidden_stride_ = static_cast<int64_t>(rounded_up(s_.hidden, 16));
    query_ = zeros<float>(BLOCK * dims);
    mixed_ = zeros<float>(BLOCK * dims);
    gated_ = zeros<float>(std::max(BLOCK * features, choices * expert_features));
    added_ = zeros<float>(std::max(size_t{BLOCK}, choices) * widest);
    routing_ = zeros<float>(BLOCK * size_t(s_.experts));
    if (s_.states) joined_ = zeros<float>(BLOCK * widest);
    chosen_ = scratch_for(choices, widest);
    choices_.resize(choices);
    picked_.reserve(choices);
    active_.reserve(s_.experts);
    order_.resize(choices);
    expert_begin_.resize(s_.experts + 1);
    next_.resize(s_.experts + 1);
    for (Thread& own : threads_) {
      own.scores = zeros<float>(s_.max_length + 16);
      own.best = zeros<float>(BLOCK);
      own.best_token = zeros<int64_t>(BLOCK);
    }
  }

  // A process that was forked from the stream's cannot end its thread.
  ~Model() {
    if (stream_ && !stream_->usable()) stream_.release();
  }

  void* memory(int64_t bytes) {
    require(within(bytes, 0, int64_t{1} << 48), "memory of no such size");
    return arena_.take(static_cast<size_t>(bytes), PAGE);
  }

  // in_place: weights lie, or will, in `memory`; all else is copied.
  void set_layer(int i, const Layer& given, bool in_place) {
    require(within(i, 0, s_.layers - 1), "the model has no such layer");
    require_layer(s_, given, s_.states && i == 0 ? 2 * int64_t(s_.hidden) : s_.hidden);
    Layer& layer = layers_[i];
    layer = given;
    layer.input_norm = arena_.copy(given.input_norm, s_.hidden);
    layer.mlp_norm = arena_.copy(given.mlp_norm, s_.hidden);
    layer.q_norm = arena_.copy(given.q_norm, s_.head_dim);
    layer.k_norm = arena_.copy(given.k_norm, s_.head_dim);
    layer.attention_post_norm = arena_.copy(given.attention_post_norm, s_.hidden);
    layer.mlp_post_norm = arena_.copy(given.mlp_post_norm, s_.hidden);
    layer.experts = arena_.copy(given.experts, 2 * size_t(s_.experts));
    layer.key_scale = arena_.copy(given.key_scale, s_.kv_heads);
    layer.value_scale = arena_.copy(given.value_scale, s_.kv_heads);
    if (in_place) return;
    for (Weight* m : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down, &layer.router})
      if (m->codes) keep(*m);
    for (int e = 0; layer.experts && e < 2 * s_.experts; ++e) keep(const_cast<Weight&>(layer.experts[e]));
  }

  // Pieces rise by layer; these lie in `memory` and are read into it for every pass.
  void set_stream(int file, const Piece* pieces, int count) {
    require(count >= 1, "nothing is streamed");
    for (int i = 0; i < count; ++i) {
      require(within(pieces[i].layer, i ? pieces[i - 1].layer + 1 : 0, s_.layers - 1), "streamed layers do not rise");
      require(pieces[i].to && pieces[i].size >= 0 && pieces[i].start >= 0, "a streamed layer has no place");
    }
    streamed_.assign(s_.layers, false);
    for (const Piece* piece = pieces; piece < pieces + count; ++piece) streamed_[piece->layer] = true;
    stream_ = std::make_unique<Stream>(file, pieces, count);
  }

  Reading reading() const { return stream_ ? stream_->reading() : Reading{}; }

  // By `Lap`, since the model was made.
  void seconds(double* out) {
    std::lock_guard<std::mutex> one(calls_);
    std::copy(laps_.seconds, laps_.seconds + LAPS, out);
  }

  void set_rope(int which, const float* cos, const float* sin) {
    require(within(which, 0, s_.ropes - 1) && cos && sin, "the model has no such rotation");
    const size_t count = size_t(s_.max_length) * (s_.rotary / 2);
    ropes_[2 * which] = arena_.copy(cos, count);
    ropes_[2 * which + 1] = arena_.copy(sin, count);
  }

  // The embedding is row after row; without codes it is the head's own panels.
  void set_ends(const Weight& embedding, const float* norm, const Weight& head, bool in_place) {
    require_ends(s_, embedding, norm, head);
    norm_ = arena_.copy(norm, s_.hidden);
    embedding_ = embedding;
    head_ = head;
    if (in_place) return;
    keep(head_);
    if (embedding.codes) keep(embedding_);
  }

  // The matrix stays where it is.
  void set_lead(const Lead& given) {
    require_lead(s_, given, head_);
    lead_ = given;
    lead_.states_norm = arena_.copy(given.states_norm, s_.states);
    lead_.tap_norms = arena_.copy(given.tap_norms, s_.states);
    lead_.state_norm = arena_.copy(given.state_norm, s_.hidden);
    lead_.ids = arena_.copy(given.ids, head_.n);
  }

  const Shape& shape() const { return s_; }
  Pool& pool() const { return pool_; }
  Sequence* sequence() const { return new Sequence(s_, run_, layers_); }

  // Append tokens to sequences; logits [last, vocab] or the best tokens [last] of the last rows of all, and the normed
  // states [last, hidden] behind them; of all rows what `taps` names. False: a layer cannot be read, nothing is appended.
  bool forward(const Part* parts, int count, int last, float* logits, int64_t* best, float* states, const Taps& taps) {
    std::lock_guard<std::mutex> one(calls_);
    require(!s_.states, "a head is no model");
    require_parts(parts, count);
    require_taps(s_, taps);
    list_rows(parts, count);
    require(within(last, 0, static_cast<int64_t>(rows_.size())) && states, "more rows are asked for than there are");
    make_room();
    laps_.begin();
    pool_.run([&](int thread) { pass(thread, last, logits, best, states, taps); });
    if (!readable_) return false;
    for (const Part* part = parts; part < parts + count; ++part)
      if (!part->parents) part->sequence->length += part->count;
    return true;
  }

  // Append rows of true states [rows, Shape.states], and of the tokens behind them, to sequences of a head; then draft at
  // most `most` tokens behind each, as `choose` decides. logits: room for `CHAINS` rows of `stride`, whole panels.
  void draft(const Part* parts, int count, const float* states, int most, Choose choose, float* logits, int64_t stride) {
    std::lock_guard<std::mutex> one(calls_);
    require(lead_.fc.codes, "a model is no head");
    require_parts(parts, count);
    require(states && choose && logits && most >= 1 && stride >= head_.panels() * 8, "a part of the call is missing");
    for (const Part* part = parts; part < parts + count; ++part) {
      require(!part->parents && part->count >= 1, "a draft continues one row or more");
      require(part->sequence->length + part->count + most - 1 <= s_.max_length, "more positions than the cache holds");
    }
    list_rows(parts, count);
    make_room();
    chains_.clear();
    for (int j = 0, row = -1; j < count; ++j) chains_.push_back({j, parts[j].sequence, row += parts[j].count, -1});
    ends_ = zeros<float>(count * hidden_stride_);
    outside_ = false;
    laps_.begin();
    pool_.run([&](int thread) { propose(thread, states, most, choose, logits, stride); });
    require(!outside_, "a chosen place lies outside of the head");
  }

 private:
  void require_parts(const Part* parts, int count) const {
    for (const Part* part = parts; part < parts + count; ++part) {
      require(part->sequence && part->sequence->of(s_), "a sequence of another model");
      const int64_t size = part->parents ? part->nodes : part->count;
      require(within(part->count, 0, size), "more rows than nodes");
      require(part->sequence->length + size <= s_.max_length, "more positions than the cache holds");
      for (int i = 0; part->parents && i < part->nodes; ++i)
        require(within(part->parents[i], -1, i - 1), "a node of a tree comes before its parent");
    }
  }

  static size_t widest_of(const Shape& s) {
    const size_t dims = size_t(s.heads) * s.head_dim, joined = s.states ? 2 * size_t(s.hidden) : s.hidden;
    return std::max({joined, size_t(s.states), size_t(s.intermediate), size_t(s.expert_size), dims});
  }

  void list_rows(const Part* parts, int count) {
    rows_.clear();
    slots_.clear();
    for (const Part* part = parts; part < parts + count; ++part)
      for (int t = 0; t < part->count; ++t) rows_.push_back(part->parents ? node(*part, t) : next(*part, t));
    for (Row& row : rows_)  // the list of slots has stopped growing
      if (row.span.end > row.span.plain) row.span.slots = slots_.data() + row.span.begin;
    for (Row& row : rows_) row.span.begin = 0;
  }

  static Row next(const Part& part, int t) {
    const int slot = part.sequence->length + t;
    return {part.sequence, part.tokens[t], slot, {0, slot + 1, slot + 1, nullptr}};
  }

  // A node sees the sequence and its own path; until all slots are listed, `begin` is where its own start.
  Row node(const Part& part, int t) {
    const int length = part.sequence->length, own = part.nodes - part.count + t;
    const int first = static_cast<int>(slots_.size());
    for (int i = own; i >= 0; i = part.parents[i]) slots_.push_back(length + i);
    std::reverse(slots_.begin() + first, slots_.end());
    const int end = length + static_cast<int>(slots_.size()) - first;
    return {part.sequence, part.tokens[t], length + own, {first, length, end, nullptr}};
  }

  void make_room() {
    if (rows_.size() <= room_) return;
    hidden_ = zeros<float>(rows_.size() * hidden_stride_);
    room_ = rows_.size();
  }

  void keep(Weight& m) {
    require_outliers(m);
    const size_t lanes = size_t(m.panels()) * 8;
    m.codes = arena_.copy(static_cast<const char*>(m.codes), m.bytes);
    m.scale = arena_.copy(m.scale, lanes * m.groups());
    m.bias = arena_.copy(m.bias, lanes);
    m.half_scale = arena_.copy(m.half_scale, lanes * m.groups());
    m.zero = arena_.copy(m.zero, lanes * m.groups());
    if (!m.outlier_ends) return;
    const size_t outliers = m.outlier_ends[lanes];
    m.outlier_ends = arena_.copy(m.outlier_ends, lanes + 1);
    m.outlier_inputs = arena_.copy(m.outlier_inputs, outliers);
    m.outlier_values = arena_.copy(m.outlier_values, outliers);
  }

  void pass(int thread, int last, float* logits, int64_t* best, float* states, const Taps& taps) {
    const int rows = static_cast<int>(rows_.size());
    int tapped = 0;  // of `taps`, so far
    for (int t; (t = pool_.claim()) < rows;)
      run_.embed(embedding_.codes ? embedding_ : head_, !embedding_.codes, rows_[t].token, s_.embed_scale,
                 hidden_.get() + t * hidden_stride_);
    pool_.barrier();
    laps_.end(thread, EMBEDDING);
    for (int i = 0; i < s_.layers; ++i) {
      if (!arrived(thread, i)) return;
      if (tapped < taps.count && taps.layers[tapped] == i) copy_hidden(thread, taps, tapped++);
      for (int begin = 0; begin < rows; begin += BLOCK) run_layer(thread, i, block(begin, rows));
      if (thread == 0 && streams(i)) stream_->give_back();
    }
    if (tapped < taps.count) copy_hidden(thread, taps, tapped);
    for (int t = thread; t < last; t += pool_.size())
      run_.norm(hidden_.get() + (rows - last + t) * hidden_stride_, norm_, s_.norm_eps, s_.hidden,
                states + int64_t(t) * s_.hidden);
    for (int begin = rows - last; begin < rows; begin += BLOCK) {
      const int64_t done = begin - (rows - last);
      decide(thread, block(begin, rows), logits ? logits + done * s_.vocab : nullptr, best ? best + done : nullptr);
    }
    laps_.end(thread, HEAD);
  }

  // The hidden states of all rows as they are, into their place among what is tapped. Nobody writes them before the next
  // barrier.
  void copy_hidden(int thread, const Taps& taps, int place) const {
    const int64_t width = s_.hidden;
    for (size_t t = thread; t < rows_.size(); t += pool_.size())
      std::memcpy(taps.out + (t * taps.count + place) * width, hidden_.get() + t * hidden_stride_, sizeof(float) * width);
  }

  void propose(int thread, const float* states, int most, Choose choose, float* logits, int64_t stride) {
    fuse(thread, states);
    for (int step = 1;; ++step) {
      const int rows = static_cast<int>(rows_.size()), chains = static_cast<int>(chains_.size());
      for (int i = 0; i < s_.layers; ++i)
        for (int begin = 0; begin < rows; begin += BLOCK) run_layer(thread, i, block(begin, rows));
      for (int j = thread; j < chains; j += pool_.size())
        std::memcpy(end(j), hidden_.get() + chains_[j].row * hidden_stride_, sizeof(float) * s_.hidden);
      pool_.barrier();
      for (int first = 0; first < chains; first += CHAINS) {
        const int count = std::min(CHAINS, chains - first);
        const Rows x = prepared(thread, head_, end(first), hidden_stride_, norm_, count);
        pieces(thread, head_, x, piece(head_), [&](int panel, int n, const float* out, int64_t out_stride) {
          for (int t = 0; t < count; ++t)
            std::memcpy(logits + t * stride + panel * 8, out + t * out_stride, sizeof(float) * n * 8);
        });
        laps_.end(thread, HEAD);
        if (thread == 0)
          for (int t = 0; t < count; ++t) ask(chains_[first + t], t, logits + t * stride, choose);
        pool_.barrier();
      }
      if (thread == 0) step_on(step < most);
      pool_.barrier();
      if (rows_.empty()) return;
    }
  }

  // What the rows of true states begin as.
  void fuse(int thread, const float* states) {
    const int rows = static_cast<int>(rows_.size()), width = s_.states / lead_.taps;
    for (int begin = 0; begin < rows; begin += BLOCK) {
      const float* x = states + int64_t(begin) * s_.states;
      int64_t x_stride = s_.states;
      const int count = std::min(BLOCK, rows - begin);
      if (lead_.tap_norms) {
        for (int n; (n = pool_.claim()) < count * lead_.taps;) {
          const int t = n / lead_.taps, at = n % lead_.taps * width;
          run_.norm(x + t * x_stride + at, lead_.tap_norms + at, s_.norm_eps, width, joined_.get() + t * row_stride_ + at);
        }
        pool_.barrier();
        x = joined_.get();
        x_stride = row_stride_;
      }
      const Rows in = prepared(thread, lead_.fc, x, x_stride, lead_.states_norm, count);
      pieces(thread, lead_.fc, in, piece(lead_.fc), [&](int first, int panels, const float* out, int64_t stride) {
        const int n = std::min(panels * 8, s_.hidden - first * 8);
        for (int t = 0; t < count; ++t)
          std::memcpy(hidden_.get() + (begin + t) * hidden_stride_ + first * 8, out + t * stride, sizeof(float) * n);
      });
    }
    laps_.end(thread, EMBEDDING);
  }

  // Inputs of a head's first layer: each row's token beside its state.
  Rows joined(int thread, const Block& b) {
    for (int t; (t = pool_.claim()) < b.count;) {
      float *token = joined_.get() + t * row_stride_, *state = b.hidden + t * hidden_stride_, *normed = token + s_.hidden;
      run_.embed(embedding_.codes ? embedding_ : head_, !embedding_.codes, b.rows[t].token, s_.embed_scale, token);
      run_.norm(token, layers_[0].input_norm, s_.norm_eps, s_.hidden, token);
      run_.norm(state, lead_.state_norm, s_.norm_eps, s_.hidden, normed);
      if (lead_.norm_before_residual) std::memcpy(state, normed, sizeof(float) * s_.hidden);
    }
    pool_.barrier();
    return prepared(thread, layers_[0].qkv, joined_.get(), row_stride_, nullptr, b.count);
  }

  // What comes out of the row that ends a chain.
  float* end(int chain) const { return ends_.get() + chain * hidden_stride_; }

  void ask(Chain& chain, int row, const float* logits, Choose choose) {
    const float* best = std::max_element(logits, logits + lead_.drafted);
    const float probability = 1.0f / run_.exp_sum(logits, lead_.drafted, *best);
    const int32_t place = choose(chain.number, row, static_cast<int32_t>(best - logits), probability);
    outside_ |= place >= lead_.drafted;  // told when all threads have ended
    chain.token = place >= 0 && place < lead_.drafted ? lead_.ids[place] : -1;
  }

  // Rows become positions; those of the drafts that go on follow, each reading what the row before it ended with.
  void step_on(bool more) {
    for (const Row& row : rows_) ++row.sequence->length;
    rows_.clear();
    for (size_t j = 0; more && j < chains_.size(); ++j) {
      Chain chain = chains_[j];
      if (chain.token < 0) continue;
      float* to = hidden_.get() + rows_.size() * hidden_stride_;
      if (lead_.norm_output) run_.norm(end(static_cast<int>(j)), norm_, s_.norm_eps, s_.hidden, to);
      else std::memcpy(to, end(static_cast<int>(j)), sizeof(float) * s_.hidden);
      chain.row = static_cast<int>(rows_.size());
      const Part next_one = {chain.sequence, &chain.token, nullptr, 1, 1};
      chains_[rows_.size()] = chain;
      rows_.push_back(next(next_one, 0));
    }
    chains_.resize(rows_.size());
  }

  bool streams(int i) const { return stream_ && streamed_[i]; }

  // Whether a layer's weights are there; all threads get the same answer.
  bool arrived(int thread, int i) {
    if (!streams(i)) return true;
    if (thread == 0) readable_ = stream_->take();
    pool_.barrier();
    laps_.end(thread, READING);
    return readable_;
  }

  Block block(int begin, int end) const {
    return {rows_.data() + begin, std::min(BLOCK, end - begin), hidden_.get() + begin * hidden_stride_};
  }

  void run_layer(int thread, int i, const Block& b) {
    const int dims = s_.heads * s_.head_dim, features = static_cast<int>(rounded_up(s_.intermediate, 8));
    const Layer& l = layers_[i];
    project(thread, i, b.rows, s_.states && i == 0 ? joined(thread, b)
                               : prepared(thread, l.qkv, b.hidden, hidden_stride_, l.input_norm, b.count));
    laps_.end(thread, QKV);
    attend(thread, i, b);
    laps_.end(thread, ATTENTION);
    add(thread, l.o, prepared(thread, l.o, mixed_.get(), dims, nullptr, b.count), l.attention_post_norm, b);
    laps_.end(thread, O);
    if (l.experts) {
      mix(thread, l, b);
      return laps_.end(thread, MIXTURE);
    }
    feed(thread, l.gate_up, prepared(thread, l.gate_up, b.hidden, hidden_stride_, l.mlp_norm, b.count));
    laps_.end(thread, GATE_UP);
    add(thread, l.down, prepared(thread, l.down, gated_.get(), features, nullptr, b.count), l.mlp_post_norm, b);
    laps_.end(thread, DOWN);
  }

  Rows prepared(int thread, const Weight& m, const float* x, int64_t x_stride, const float* gain, int count) {
    const Rows rows = Matmuls::prepared(thread, m, x, x_stride, gain, count);
    laps_.end(thread, NORMS);
    return rows;
  }

  void project(int thread, int i, const Row* given, const Rows& x) {
    const Layer& l = layers_[i];
    const int dim = s_.head_dim;
    pieces(thread, l.qkv, x, dim / 8, [&](int first, int, float* out, int64_t stride) {
      const int head = first * 8 / dim;
      for (int t = 0; t < x.count; ++t) finish_head(i, head, given[t], t, out + t * stride);
    });
  }

  void finish_head(int i, int head, const Row& row, int t, float* x) {
    const Layer& l = layers_[i];
    const int dim = s_.head_dim, keys = head - s_.heads, values = keys - s_.kv_heads;
    if (values >= 0) return run_.store_value(s_.cache, row.sequence->head(i, values), x, dim, row.slot);
    const float* gain = keys < 0 ? l.q_norm : l.k_norm;
    if (gain) run_.norm(x, gain, s_.norm_eps, dim, x);
    const int64_t angles = int64_t(row.position()) * (s_.rotary / 2);
    run_.rotate(x, ropes_[2 * l.rope] + angles, ropes_[2 * l.rope + 1] + angles, s_.rotary);
    if (keys >= 0) return run_.store_key(s_.cache, row.sequence->head(i, keys), x, dim, row.slot);
    std::memcpy(query_.get() + (int64_t(t) * s_.heads + head) * dim, x, sizeof(float) * dim);
  }

  void attend(int thread, int i, const Block& b) {
    const int dim = s_.head_dim, shared_by = s_.heads / s_.kv_heads, window = layers_[i].window;
    for (int n; (n = pool_.claim()) < b.count * s_.heads;) {
      const int t = n % b.count, head = n / b.count;
      const int64_t at = (int64_t(t) * s_.heads + head) * dim;
      Span span = b.rows[t].span;
      if (window) span.begin = std::max(0, span.end - window);
      run_.attend(s_.cache, b.rows[t].sequence->head(i, head / shared_by), query_.get() + at, dim, span,
                  s_.attention_scale, s_.attention_cap, threads_[thread].scores.get(), mixed_.get() + at);
    }
    pool_.barrier();
  }

  // Add to the residual stream; with gains, what is added is normed first, which takes whole rows.
  void add(int thread, const Weight& m, const Rows& x, const float* gain, const Block& b) {
    float* target = gain ? added_.get() : b.hidden;
    const int64_t stride_to = gain ? row_stride_ : hidden_stride_;
    pieces(thread, m, x, piece(m), [&](int first, int count, float* out, int64_t stride) {
      const int n = std::min(count * 8, m.n - first * 8);
      for (int t = 0; t < x.count; ++t) {
        float* to = target + t * stride_to + first * 8;
        for (int j = 0; j < n; ++j) to[j] = gain ? out[t * stride + j] : to[j] + out[t * stride + j];
      }
    });
    if (!gain) return;
    for (int t; (t = pool_.claim()) < x.count;) {
      float* y = added_.get() + t * row_stride_;
      run_.norm(y, gain, s_.norm_eps, s_.hidden, y);
      for (int j = 0; j < s_.hidden; ++j) b.hidden[t * hidden_stride_ + j] += y[j];
    }
    pool_.barrier();
  }

  void feed(int thread, const Weight& m, const Rows& x) {
    const int64_t features = static_cast<int64_t>(rounded_up(s_.intermediate, 8));
    pieces(thread, m, x, piece(m), [&](int first, int count, float* out, int64_t stride) {
      for (int t = 0; t < x.count; ++t)
        run_.gate(s_.activation, out + t * stride, count / 2, gated_.get() + t * features + first * 4);
    });
  }

  // A mixture of experts. Rows are grouped by expert, so that each weight is read once.
  void mix(int thread, const Layer& l, const Block& b) {
    const int rows = b.count;
    const Rows x = prepared(thread, l.router, b.hidden, hidden_stride_, l.mlp_norm, rows);
    pieces(thread, l.router, x, piece(l.router), [&](int first, int count, float* out, int64_t stride) {
      const int n = std::min(count * 8, s_.experts - first * 8);
      for (int t = 0; t < rows; ++t)
        std::memcpy(routing_.get() + t * s_.experts + first * 8, out + t * stride, sizeof(float) * n);
    });
    if (thread == 0) route(rows);
    pool_.barrier();
    const int64_t features = static_cast<int64_t>(rounded_up(s_.expert_size, 8));
    const int size = rows * s_.experts_per_token;
    for (int i; (i = pool_.claim()) < size;) {
      const Choice& c = choices_[i];
      prepare(l.experts[2 * c.expert], b.hidden + c.row * hidden_stride_, l.mlp_norm, chosen(0, size), i);
    }
    pool_.barrier();
    expert_pieces(thread, l.experts, [&](int i, int first, int count, const float* out) {
      run_.gate(s_.activation, out, count / 2, gated_.get() + i * features + first * 4);
    });
    for (int i; (i = pool_.claim()) < size;)
      prepare(l.experts[2 * choices_[i].expert + 1], gated_.get() + i * features, nullptr, chosen(0, size), i);
    pool_.barrier();
    expert_pieces(thread, l.experts + 1, [&](int i, int first, int count, const float* out) {
      std::memcpy(added_.get() + i * row_stride_ + first * 8, out, sizeof(float) * count * 8);
    });
    for (int t; (t = pool_.claim()) < rows;) combine(t, b.hidden + t * hidden_stride_);
    pool_.barrier();
  }

  // Each row's most probable experts (of equals the first); then all choices in order of experts.
  void route(int rows) {
    const int each = s_.experts_per_token;
    picked_.clear();
    for (int t = 0; t < rows; ++t) pick(t, routing_.get() + t * s_.experts);
    std::fill(expert_begin_.begin(), expert_begin_.end(), 0);
    for (const Choice& c : picked_) ++expert_begin_[c.expert + 1];
    active_.clear();
    for (int e = 0; e < s_.experts; ++e) {
      if (expert_begin_[e + 1]) active_.push_back(e);
      expert_begin_[e + 1] += expert_begin_[e];
    }
    next_ = expert_begin_;  // of equal size: nothing is allocated here
    for (int i = 0; i < rows * each; ++i) {
      order_[i] = next_[picked_[i].expert]++;
      choices_[order_[i]] = picked_[i];
    }
  }

  // Append the choices of row t, its experts in rising order. Overwrites `scores`.
  void pick(int t, float* scores) {
    const int each = s_.experts_per_token;
    const float top = *std::max_element(scores, scores + s_.experts);
    float mass = 0.0f, kept = 0.0f;
    for (int e = 0; e < s_.experts; ++e) mass += scores[e] = std::exp(scores[e] - top);
    for (int j = 0; j < each; ++j) {
      float* best = std::max_element(scores, scores + s_.experts);
      picked_.push_back({t, static_cast<int>(best - scores), *best / mass});
      kept += *best / mass;
      *best = -1.0f;
    }
    const auto own = picked_.end() - each;
    std::sort(own, picked_.end(), [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
    for (auto c = own; s_.normed_routing && c != picked_.end(); ++c) c->weight /= kept;
  }

  // Inputs of `count` choices from `begin` on.
  Rows chosen(int begin, int count) const {
    const int64_t at = begin * row_stride_;
    float* values = chosen_.values.get() + at;
    return {values, chosen_.codes.get() + at, chosen_.row_scale.get() + at / 32, chosen_.start.get() + at / 32,
            row_stride_, count};
  }

  // `done(choice, first panel, panels, outputs)` for every second one of `matrices`, all of one shape.
  template <class Done>
  void expert_pieces(int thread, const Weight* matrices, const Done& done) {
    const int panels = piece(*matrices), each = (matrices->panels() + panels - 1) / panels;
    for (int n; (n = pool_.claim()) < each * static_cast<int>(active_.size());) {
      const int e = active_[n / each], first = n % each * panels, count = std::min(panels, matrices->panels() - first);
      const Rows x = chosen(expert_begin_[e], expert_begin_[e + 1] - expert_begin_[e]);
      const float* out = outputs(thread, matrices[2 * e], x, first, count, panels * 8);
      for (int t = 0; t < x.count; ++t) done(expert_begin_[e] + t, first, count, out + t * panels * 8);
    }
    pool_.barrier();
  }

  // Add what a row's experts say, weighted, to the residual stream.
  void combine(int t, float* to) {
    const int* own = order_.data() + t * s_.experts_per_token;
    for (int j = 0; j < s_.hidden; ++j) {
      float total = 0.0f;
      for (int c = 0; c < s_.experts_per_token; ++c)
        total += choices_[own[c]].weight * added_[own[c] * row_stride_ + j];
      to[j] += total;
    }
  }

  void decide(int thread, const Block& b, float* logits, int64_t* best) {
    const Rows x = prepared(thread, head_, b.hidden, hidden_stride_, norm_, b.count);
    Thread& own = threads_[thread];
    std::fill_n(own.best.get(), x.count, -3e38f);
    std::fill_n(own.best_token.get(), x.count, int64_t{0});
    pieces(thread, head_, x, piece(head_), [&](int first, int count, float* out, int64_t stride) {
      const int n = std::min(count * 8, head_.n - first * 8);
      for (int t = 0; t < x.count; ++t) {
        float* from = out + t * stride;
        if (s_.logit_cap > 0.0f) run_.soft_cap(from, n, 1.0f, s_.logit_cap);
        if (logits) std::memcpy(logits + int64_t(t) * s_.vocab + first * 8, from, sizeof(float) * n);
        else
          for (int j = 0; j < n; ++j)
            if (from[j] > own.best[t]) own.best[t] = from[j], own.best_token[t] = first * 8 + j;
      }
    });
    if (!best) return;
    if (thread == 0) collect_best(x.count, best);
    pool_.barrier();
  }

  // A thread takes pieces in rising order, so it holds the first of its equals; among threads the lower token wins.
  void collect_best(int rows, int64_t* best) const {
    for (int t = 0; t < rows; ++t) {
      const Thread* winner = &threads_[0];
      for (const Thread& other : threads_)
        if (other.best[t] > winner->best[t] ||
            (other.best[t] == winner->best[t] && other.best_token[t] < winner->best_token[t]))
          winner = &other;
      best[t] = winner->best_token[t];
    }
  }

  const Shape s_;
  Arena arena_;
  std::vector<Layer> layers_;
  std::vector<bool> streamed_;  // by layer; empty: none
  bool readable_ = true;
  std::vector<const float*> ropes_;
  Weight embedding_{}, head_{};
  const float* norm_ = nullptr;
  Lead lead_{};  // of a head
  int64_t hidden_stride_;
  size_t room_ = 0;  // rows of hidden states
  Buffer<float> hidden_, query_, mixed_, gated_, added_, routing_;
  Buffer<float> joined_, ends_;  // of a head: inputs of its first layer, and what chains end with
  std::vector<Chain> chains_;
  bool outside_ = false;  // whether a place was chosen that is not there
  Thread chosen_;  // inputs of a matmul, by choice
  std::vector<Choice> picked_, choices_;  // by row, and by expert
  std::vector<int> order_, expert_begin_, next_, active_;  // place of a picked one among the choices; experts' first
  std::mutex calls_;
  std::vector<Row> rows_;       // of the call at hand
  std::vector<int32_t> slots_;  // of its tree nodes' paths
  Laps laps_;
  std::unique_ptr<Stream> stream_;  // ends before the memory that it fills
};

void apply(Pool& pool, const Kernels& run, const Weight& w, const float* x, int count, float* y) {
  const int64_t stride = static_cast<int64_t>(rounded_up(w.k, 64)), out_stride = w.panels() * 8;
  auto values = zeros<float>(count * stride), scales = zeros<float>(count * stride / 32);
  auto scratch = zeros<float>(2 * stride * 8);
  auto codes = zeros<int8_t>(count * stride);
  auto start = zeros<int32_t>(count * stride / 32);
  auto out = zeros<float>(count * out_stride);
  const Rows rows{values.get(), codes.get(), scales.get(), start.get(), stride, count};
  for (int t = 0; t < count; ++t) prepare_row(run, w, x + int64_t(t) * w.k, rows, t);
  pool.run([&](int thread) {
    if (thread == 0) run.matmul(w, rows, 0, w.panels(), scratch.get(), out.get(), out_stride);
  });
  add_outliers(w, rows, 0, w.panels(), out.get(), out_stride);
  for (int t = 0; t < count; ++t) std::memcpy(y + int64_t(t) * w.n, out.get() + t * out_stride, sizeof(float) * w.n);
}

}  // namespace
}  // namespace qspec

using qspec::Model;
using qspec::Pool;
using qspec::Sequence;

// Names of the instruction sets that run here, the fastest first; null behind the last, and without memory to try them.
QSPEC_API const char* qspec_isa(int i) {
  const char* name = nullptr;
  qspec::guarded([&] {
    const auto& sets = qspec::instruction_sets();
    if (i < static_cast<int>(sets.size())) name = sets[i]->name;
  });
  return name;
}

QSPEC_API Pool* qspec_pool(int threads) {
  Pool* pool = nullptr;
  qspec::guarded([&] { pool = new Pool(threads); });
  return pool;
}

QSPEC_API void qspec_pool_free(Pool* pool) {
  if (pool && pool->usable()) delete pool;
}

// `isa`: the name of an instruction set, null for the fastest. Null: out of memory, or no such instruction set.
QSPEC_API Model* qspec_model(Pool* pool, const qspec::Shape* shape, const char* isa) {
  Model* model = nullptr;
  qspec::guarded([&] {
    qspec::require_shape(*shape);
    if (const qspec::Kernels* kernels = qspec::kernels_named(isa)) model = new Model(*pool, *shape, *kernels);
  });
  return model;
}

// The rule that this thread's newest call has broken; null: none, a call that failed has lacked memory.
QSPEC_API const char* qspec_refusal() { return qspec::refusal; }

QSPEC_API void qspec_model_free(Model* model) { delete model; }
QSPEC_API int qspec_set_layer(Model* m, int i, const qspec::Layer* layer, int in_place) {
  return qspec::guarded([&] { m->set_layer(i, *layer, in_place); });
}
QSPEC_API int qspec_set_rope(Model* m, int i, const float* cos, const float* sin) {
  return qspec::guarded([&] { m->set_rope(i, cos, sin); });
}
QSPEC_API int qspec_set_ends(Model* m, const qspec::Weight* embedding, const float* norm, const qspec::Weight* head,
                             int in_place) {
  return qspec::guarded([&] { m->set_ends(*embedding, norm, *head, in_place); });
}

// Memory for weights that are read into place, at the beginning of a page; null: there is none. It ends with the model.
QSPEC_API void* qspec_memory(Model* m, int64_t bytes) {
  void* found = nullptr;
  qspec::guarded([&] { found = m->memory(bytes); });
  return found;
}

QSPEC_API int qspec_set_stream(Model* m, int file, const qspec::Piece* pieces, int count) {
  return qspec::guarded([&] { m->set_stream(file, pieces, count); });
}

QSPEC_API void qspec_reading(const Model* m, qspec::Reading* out) { *out = m->reading(); }

// Seconds that all passes took since the model was made, by part, in the order of `Lap`.
QSPEC_API void qspec_seconds(Model* m, double* out) { m->seconds(out); }

// Sequences end before their model does.
QSPEC_API Sequence* qspec_sequence(const Model* m) {
  Sequence* sequence = nullptr;
  qspec::guarded([&] { sequence = m->sequence(); });
  return sequence;
}

// Bytes of a sequence; 0: there is no memory for one.
QSPEC_API int64_t qspec_cache_bytes(const Model* m) {
  int64_t bytes = 0;
  qspec::guarded([&] { bytes = std::unique_ptr<Sequence>(m->sequence())->bytes(); });
  return bytes;
}

QSPEC_API void qspec_sequence_free(Sequence* s) { delete s; }
QSPEC_API int qspec_length(const Sequence* s) { return s->length; }
QSPEC_API int qspec_truncate(Sequence* s, int length) {
  return qspec::guarded([&] { s->truncate(length); });
}
QSPEC_API int qspec_keep(Sequence* s, const int32_t* path, int count) {
  return qspec::guarded([&] { s->keep(path, count); });
}

static bool tokens_known(const Model& m, const qspec::Part* parts, int count) {
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < parts[i].count; ++t)
      if (parts[i].tokens[t] < 0 || parts[i].tokens[t] >= m.shape().vocab) return false;
  return true;
}

// 0: done; 1: this process was forked from the one whose threads the pool holds; 2: refused, or out of memory; 3: no such
// token; 4: a layer cannot be read.
QSPEC_API int qspec_forward(Model* m, const qspec::Part* parts, int count, int last, float* logits, int64_t* best,
                            float* states, const qspec::Taps* taps) {
  if (!m->pool().usable()) return 1;
  if (!tokens_known(*m, parts, count)) return 3;
  bool read = true;
  if (!qspec::guarded([&] { read = m->forward(parts, count, last, logits, best, states, *taps); })) return 2;
  return read ? 0 : 4;
}

QSPEC_API int qspec_set_lead(Model* m, const qspec::Lead* lead) {
  return qspec::guarded([&] { m->set_lead(*lead); });
}

// As `qspec_forward`, but for 4.
QSPEC_API int qspec_propose(Model* m, const qspec::Part* parts, int count, const float* states, int most,
                            qspec::Choose choose, float* logits, int64_t stride) {
  if (!m->pool().usable()) return 1;
  if (!tokens_known(*m, parts, count)) return 3;
  return qspec::guarded([&] { m->draft(parts, count, states, most, choose, logits, stride); }) ? 0 : 2;
}

// One matmul [rows, n] of float inputs, rounded as the matrix says: for comparison with other implementations.
QSPEC_API int qspec_linear(Pool* pool, const char* isa, const qspec::Weight* w, const float* x, int rows, float* y) {
  const qspec::Kernels* kernels = nullptr;
  const bool done = qspec::guarded([&] {
    qspec::require(rows >= 0, "fewer rows than none");
    qspec::require_matrix(*w, w->n, w->k);
    qspec::require_outliers(*w);
    kernels = qspec::kernels_named(isa);
    if (kernels) qspec::apply(*pool, *kernels, *w, x, rows, y);
  });
  return kernels && done;
}
