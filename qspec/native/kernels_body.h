// The kernels, compiled once per instruction set (see kernels_*.cpp).
//
// A row's result never depends on the other rows of a call: every output is one chain of additions over k, in order,
// whatever the tile. Lanes are outputs (or positions, for scores), so no sum crosses lanes except in norms and softmax.
#include "kernels.h"
#include "simd.h"

// Loops over a tile: its accumulators must end up in registers.
#define UNROLL _Pragma("GCC unroll 8")

namespace {

using qspec::HeadCache;
using qspec::Matrix;
using qspec::Rows;
using qspec::Span;

constexpr float SCALE_FLOOR = 1.0f / (448.0f * 512.0f);  // numerics/quantization/formats.py

// ---- rows -----------------------------------------------------------------------------------------------------------

void norm(const float* x, const float* gain, float eps, int n, float* y) {
  F8 squares = splat(0.0f);
  int i = 0;
  for (; i + 8 <= n; i += 8) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (i = 0; i + 8 <= n; i += 8) store(y + i, load(x + i) * splat(scale) * load(gain + i));
  for (; i < n; ++i) y[i] = x[i] * scale * gain[i];
}

float largest_magnitude(const float* x, int n) {
  F8 m = splat(0.0f);
  int i = 0;
  for (; i + 8 <= n; i += 8) m = max(m, abs(load(x + i)));
  float most = largest(m);
  for (; i < n; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
  return most;
}

float scale_of(const float* x, int n, float fixed_scale, float qmax) {
  if (fixed_scale > 0.0f) return fixed_scale;
  const float scale = largest_magnitude(x, n) / qmax;
  return scale > SCALE_FLOOR ? scale : SCALE_FLOOR;
}

// e4m3 bits of a float, saturating, ties to even. Below 2^-6 codes are steps of 2^-9; code 8 is 2^-6 itself.
inline uint8_t e4m3(float x) {
  const uint32_t sign = (bits_of(x) >> 24) & 0x80u;
  float a = std::fabs(x);
  a = a < 448.0f ? a : 448.0f;
  if (a < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::nearbyint(a * 512.0f)));
  uint32_t u = bits_of(a);
  u = (u + 0x7FFFFu + ((u >> 20) & 1u)) >> 20;
  return static_cast<uint8_t>(sign | (u - (120u << 3)));
}

inline float rounded_e4m3(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u;
  float a = std::fabs(x);
  a = a < 448.0f ? a : 448.0f;
  const uint32_t u = bits_of(a);
  const float normal = float_of((u + 0x7FFFFu + ((u >> 20) & 1u)) & ~0xFFFFFu);
  const float small = std::nearbyint(a * 512.0f) * (1.0f / 512.0f);
  return float_of(sign | bits_of(a < 0x1p-6f ? small : normal));
}

void round_fp8(float* x, int n, float fixed_scale) {
  const float scale = scale_of(x, n, fixed_scale, 448.0f);
  for (int i = 0; i < n; ++i) x[i] = rounded_e4m3(x[i] / scale) * scale;
}

// A token's row of an embedding that is stored row after row, or in the panels of the head that it is tied to.
void embed(const Matrix& m, bool in_panels, int64_t token, float factor, float* y) {
  const int64_t first = in_panels ? token / 8 * 8 * m.k + token % 8 : token * m.k, step = in_panels ? 8 : 1;
  const auto* words = static_cast<const uint16_t*>(m.codes) + first;
  for (int64_t i = 0; i < m.k; ++i) {
    float x;
    if (m.kind == qspec::F32) x = static_cast<const float*>(m.codes)[first + i * step];
    else if (m.kind == qspec::BF16) x = float_of(static_cast<uint32_t>(words[i * step]) << 16);
    else x = half_to_float(words[i * step]);
    y[i] = x * factor;
  }
}

// ---- matmul ---------------------------------------------------------------------------------------------------------
//
// A tile is P panels by R rows, with P * R accumulators in registers: per input k, P weight vectors are loaded (and
// decoded), and each row's input is broadcast into all of them.

struct Tile {
  const Matrix& w;
  int panel;              // first panel
  const Rows& x;
  int row;                // first row
  float* out;             // of that panel and row
  int64_t out_stride;
};

inline F8 scale_at(const Matrix& w, int panel, int group) {
  const int64_t at = (int64_t(panel) * w.groups() + group) * 8;
  return w.half_scale ? load_f16(w.half_scale + at) : load(w.scale + at);
}

inline void put(const Tile& t, int p, int r, F8 y) {
  if (t.w.bias) y = y + load(t.w.bias + (t.panel + p) * 8);
  store(t.out + r * t.out_stride + p * 8, y);
}

}  // namespace

#include "integers.h"
#if defined(QSPEC_AMX)
#include "amx.h"
#endif

namespace {

// How a kind of code becomes floats: STEP inputs of one panel are read at once.
struct FromF32 {
  using Code = float;
  static constexpr int STEP = 1, CODES = 8;
  using Block = F8;
  static Block block(const float* p) { return load(p); }
  static F8 value(Block b, int) { return b; }
};
struct FromBF16 : FromF32 {
  using Code = uint16_t;
  static Block block(const Code* p) { return load_bf16(p); }
};
struct FromF16 : FromF32 {
  using Code = uint16_t;
  static Block block(const Code* p) { return load_f16(p); }
};
struct FromFP8 : FromF32 {  // 1/256 of the value: scales hold the factor
  using Code = uint8_t;
  static Block block(const Code* p) { return load_e4m3_256th(p); }
};
struct FromINT8 : FromF32 {
  using Code = int8_t;
  static Block block(const Code* p) { return load_i8(p); }
};
struct FromINT4 {
  using Code = int32_t;
  static constexpr int STEP = 8, CODES = 8;
  using Block = I8;
  static Block block(const Code* p) { return load_i32(p); }
  static F8 value(Block b, int j) { return nibble(b, j); }
};

template <class From, int P, int R>
void float_tile(const Tile& t, const typename From::Code* codes, int64_t panel_codes) {
  const int k = t.w.k, group = t.w.scaled() ? t.w.group : k;
  const float* x = t.x.values + t.row * t.x.stride;
  F8 total[P][R];
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r) total[p][r] = splat(0.0f);
  for (int begin = 0, g = 0; begin < k; begin += group, ++g) {
    F8 acc[P][R];
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int r = 0; r < R; ++r) acc[p][r] = splat(0.0f);
    for (int i = begin; i < begin + group; i += From::STEP) {
      typename From::Block block[P];
      UNROLL for (int p = 0; p < P; ++p) block[p] = From::block(codes + p * panel_codes + i / From::STEP * From::CODES);
      UNROLL for (int j = 0; j < From::STEP; ++j) {
        F8 w[P];
        UNROLL for (int p = 0; p < P; ++p) w[p] = From::value(block[p], j);
        UNROLL for (int r = 0; r < R; ++r) {
          const F8 input = splat(x[r * t.x.stride + i + j]);
          UNROLL for (int p = 0; p < P; ++p) acc[p][r] = fma(input, w[p], acc[p][r]);
        }
      }
    }
    UNROLL for (int p = 0; p < P; ++p) {
      const F8 scale = t.w.scaled() ? scale_at(t.w, t.panel + p, g) : splat(1.0f);
      UNROLL for (int r = 0; r < R; ++r) total[p][r] = fma(acc[p][r], scale, total[p][r]);
    }
  }
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r) put(t, p, r, total[p][r]);
}

template <class From>
struct FloatTile {
  using Code = typename From::Code;
  template <int P, int R>
  static void run(const Tile& t, const Code* codes, int64_t panel_codes) {
    float_tile<From, P, R>(t, codes, panel_codes);
  }
};
// `count` panels by R rows, in tiles of as many accumulators as registers hold.
template <class Kind, int R>
void panels(Tile t, const typename Kind::Code* codes, int64_t panel_codes, int count) {
  auto advance = [&](int p) { t.panel += p, t.out += p * 8, codes += p * panel_codes, count -= p; };
  if constexpr (R <= 2)
    for (; count >= 4; advance(4)) Kind::template run<4, R>(t, codes, panel_codes);
  for (; count >= 2; advance(2)) Kind::template run<2, R>(t, codes, panel_codes);
  for (; count >= 1; advance(1)) Kind::template run<1, R>(t, codes, panel_codes);
}

// `count` panels by all rows, four at a time.
template <class Kind>
void all_rows(Tile t, const typename Kind::Code* codes, int64_t panel_codes, int count) {
  for (; t.row + 4 <= t.x.count; t.row += 4, t.out += 4 * t.out_stride) panels<Kind, 4>(t, codes, panel_codes, count);
  switch (t.x.count - t.row) {
    case 3: return panels<Kind, 3>(t, codes, panel_codes, count);
    case 2: return panels<Kind, 2>(t, codes, panel_codes, count);
    case 1: return panels<Kind, 1>(t, codes, panel_codes, count);
  }
}

// Codes that cost work to decode: for one or two rows in registers, for more once into floats that stay in the cache.
template <class From>
void decoded(Tile t, int count, float* scratch) {
  const int k = t.w.k;
  const int64_t panel_codes = int64_t(k) / From::STEP * From::CODES;
  const auto* codes = static_cast<const typename From::Code*>(t.w.codes) + t.panel * panel_codes;
  if (t.x.count == 1) return panels<FloatTile<From>, 1>(t, codes, panel_codes, count);
  if (t.x.count == 2) return panels<FloatTile<From>, 2>(t, codes, panel_codes, count);
  for (int p = 0; p < count; ++p)
    for (int i = 0; i < k; i += From::STEP) {
      const auto block = From::block(codes + p * panel_codes + i / From::STEP * From::CODES);
      float* to = scratch + (int64_t(p) * k + i) * 8;
      UNROLL for (int j = 0; j < From::STEP; ++j) store(to + 8 * j, From::value(block, j));
    }
  all_rows<FloatTile<FromF32>>(t, scratch, int64_t(k) * 8, count);
}

void matmul(const Matrix& w, const Rows& x, int first, int last, float* scratch, float* out, int64_t out_stride) {
#if defined(QSPEC_AMX)
  if (w.kind == qspec::INT8_DOT && takes_tiles(w, x)) return tile_matmul(w, x, first, last, scratch, out, out_stride);
#endif
  if (w.kind == qspec::INT4_DOT) return integer_matmul<Int4Codes>(w, x, first, last, out, out_stride);
  if (w.kind == qspec::INT8_DOT && w.input_scale > 0.0f)  // given scales clip inputs to -128 too
    return integer_matmul<Int8Codes<AnySignedBytes>>(w, x, first, last, out, out_stride);
  if (w.kind == qspec::INT8_DOT) return integer_matmul<Int8Codes<SignedBytes>>(w, x, first, last, out, out_stride);
  const int at_once = x.count <= 2 ? 4 : 2;  // panels that stay in the cache while all rows pass
  for (int panel = first; panel < last; panel += at_once) {
    const int count = last - panel < at_once ? last - panel : at_once;
    const Tile t{w, panel, x, 0, out + (panel - first) * 8, out_stride};
    const int64_t floats = int64_t(w.k) * 8;
    switch (w.kind) {
      case qspec::F32:
        all_rows<FloatTile<FromF32>>(t, static_cast<const float*>(w.codes) + panel * floats, floats, count);
        break;
      case qspec::BF16: decoded<FromBF16>(t, count, scratch); break;
      case qspec::F16: decoded<FromF16>(t, count, scratch); break;
      case qspec::FP8_E4M3: decoded<FromFP8>(t, count, scratch); break;
      case qspec::INT8: decoded<FromINT8>(t, count, scratch); break;
      case qspec::INT4: decoded<FromINT4>(t, count, scratch); break;
    }
  }
}

void gate(int activation, const float* gate_up, int panel_pairs, float* y) {
  const F8 one = splat(1.0f), zero = splat(0.0f);
  for (int j = 0; j < panel_pairs; ++j) {
    const F8 g = load(gate_up + 16 * j), up = load(gate_up + 16 * j + 8);
    F8 u = g;  // gelu's tanh form is x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
    if (activation == qspec::GELU_TANH) u = splat(1.5957691216057308f) * fma(splat(0.044715f) * g * g, g, g);
    store(y + 8 * j, g / (one + exp(zero - u)) * up);
  }
}

// ---- attention ------------------------------------------------------------------------------------------------------

void rotate(float* x, const float* cos, const float* sin, int rotary) {
  const int half = rotary / 2;
  for (int i = 0; i < half; ++i) {
    const float left = x[i], right = x[i + half];
    x[i] = left * cos[i] - right * sin[i];
    x[i + half] = right * cos[i] + left * sin[i];
  }
}

// Codes of one head's vector into `to[d * stride]`; INT8 leaves its scale in `*scale`, FP8 reads it there.
void store_cache(int kind, void* to, int64_t stride, const float* x, int dim, float* scale) {
  if (kind == qspec::FLOAT_CACHE) {
    for (int d = 0; d < dim; ++d) static_cast<float*>(to)[d * stride] = x[d];
  } else if (kind == qspec::FP8_CACHE) {
    for (int d = 0; d < dim; ++d) static_cast<uint8_t*>(to)[d * stride] = e4m3(x[d] / *scale);
  } else {
    *scale = scale_of(x, dim, 0.0f, 127.0f);
    for (int d = 0; d < dim; ++d)
      static_cast<int8_t*>(to)[d * stride] = static_cast<int8_t>(std::nearbyint(x[d] / *scale));
  }
}

inline int64_t cache_bytes(int kind) { return kind == qspec::FLOAT_CACHE ? 4 : 1; }

void store_key(int kind, HeadCache c, const float* x, int dim, int position) {
  const int64_t at = int64_t(position / 8) * dim * 8 + position % 8;
  float* scale = c.key_scale + (kind == qspec::INT8_CACHE ? position : 0);
  store_cache(kind, static_cast<char*>(c.keys) + at * cache_bytes(kind), 8, x, dim, scale);
}

void store_value(int kind, HeadCache c, const float* x, int dim, int position) {
  const int64_t at = int64_t(position) * dim;
  float* scale = c.value_scale + (kind == qspec::INT8_CACHE ? position : 0);
  store_cache(kind, static_cast<char*>(c.values) + at * cache_bytes(kind), 1, x, dim, scale);
}

// Dot products of a query with B blocks of eight positions.
template <class From, int B>
void key_blocks(const float* q, const typename From::Code* keys, int dim, float* scores) {
  F8 acc[B];
  UNROLL for (int b = 0; b < B; ++b) acc[b] = splat(0.0f);
  for (int d = 0; d < dim; ++d) {
    const F8 query = splat(q[d]);
    UNROLL for (int b = 0; b < B; ++b) acc[b] = fma(query, From::block(keys + (int64_t(b) * dim + d) * 8), acc[b]);
  }
  UNROLL for (int b = 0; b < B; ++b) store(scores + 8 * b, acc[b]);
}

// Dot products with all that the query sees, position by position: a tree's nodes take their place in its path, so
// that a path gives the bits that it would give as a sequence.
template <class From>
void dot_products(const float* q, const typename From::Code* keys, int dim, const Span& span, float* scores) {
  const int64_t block_codes = int64_t(dim) * 8;
  const int last = (span.plain + 7) / 8;
  int block = span.begin / 8;
  for (; block + 4 <= last; block += 4) key_blocks<From, 4>(q, keys + block * block_codes, dim, scores + 8 * block);
  for (; block < last; ++block) key_blocks<From, 1>(q, keys + block * block_codes, dim, scores + 8 * block);
  for (int l = span.plain; l < span.end; ++l) {
    float lanes[8];
    key_blocks<From, 1>(q, keys + span.slot(l) / 8 * block_codes, dim, lanes);
    scores[l] = lanes[span.slot(l) % 8];
  }
}

// y[d] = sum over positions of weight * value, for 8 * C channels.
template <class From, int C>
void weighted_values(const float* weights, const typename From::Code* values, int dim, const Span& span, float* y) {
  F8 acc[C];
  UNROLL for (int c = 0; c < C; ++c) acc[c] = splat(0.0f);
  for (int l = span.begin; l < span.end; ++l) {
    const F8 weight = splat(weights[l]);
    const auto* value = values + int64_t(span.slot(l)) * dim;
    UNROLL for (int c = 0; c < C; ++c) acc[c] = fma(weight, From::block(value + 8 * c), acc[c]);
  }
  UNROLL for (int c = 0; c < C; ++c) store(y + 8 * c, acc[c]);
}

// scores[l] *= scale of its slot, which an INT8 cache has.
inline void times_scales(float* scores, const float* scale, const Span& span) {
  for (int l = span.begin; l < span.end; ++l) scores[l] *= scale[span.slot(l)];
}

// tanh(y) is 1 - 2 / (e^(2 y) + 1), good to about 1e-7 of the cap.
void soft_cap(float* x, int n, float factor, float cap) {
  const F8 one = splat(1.0f), two = splat(2.0f), twice = splat(2.0f * factor / cap);
  const auto capped = [&](F8 v) { return splat(cap) * (one - two / (exp(v * twice) + one)); };
  int i = 0;
  for (; i + 8 <= n; i += 8) store(x + i, capped(load(x + i)));
  if (i == n) return;
  float tail[8] = {};
  std::memcpy(tail, x + i, sizeof(float) * static_cast<size_t>(n - i));
  store(tail, capped(load(tail)));
  std::memcpy(x + i, tail, sizeof(float) * static_cast<size_t>(n - i));
}

float exp_sum(const float* x, int n, float top) {
  F8 total = splat(0.0f);
  int i = 0;
  for (; i + 8 <= n; i += 8) total = total + exp(load(x + i) - splat(top));
  float rest = sum(total);
  for (; i < n; ++i) rest += std::exp(x[i] - top);
  return rest;
}

// Softmax in place, but for the division: returns what to divide by. Lanes outside of the span count for nothing.
float weigh(float* scores, const Span& span, float factor) {
  const int first = span.begin / 8 * 8, last = (span.end + 7) / 8 * 8;
  const auto clear = [&](float with) {
    for (int l = first; l < span.begin; ++l) scores[l] = with;
    for (int l = span.end; l < last; ++l) scores[l] = with;
  };
  clear(-1e30f);
  F8 most = splat(-3e38f);
  for (int l = first; l < last; l += 8) most = max(most, load(scores + l) * splat(factor));
  const F8 top = splat(largest(most));
  for (int l = first; l < last; l += 8) store(scores + l, exp(load(scores + l) * splat(factor) - top));
  clear(0.0f);
  F8 mass = splat(0.0f);
  for (int l = first; l < last; l += 8) mass = mass + load(scores + l);
  return sum(mass);
}

template <class From>
void attend_as(int kind, HeadCache c, const float* q, int dim, const Span& span, float scale, float cap, float* scores,
               float* y) {
  const auto* keys = static_cast<const typename From::Code*>(c.keys);
  const auto* values = static_cast<const typename From::Code*>(c.values);
  const bool int8 = kind == qspec::INT8_CACHE, fp8 = kind == qspec::FP8_CACHE;
  dot_products<From>(q, keys, dim, span, scores);
  if (int8) times_scales(scores, c.key_scale, span);
  if (fp8) scale *= *c.key_scale * 256.0f;
  if (cap > 0.0f) {
    soft_cap(scores + span.begin, span.end - span.begin, scale, cap);
    scale = 1.0f;
  }
  const float mass = weigh(scores, span, scale);
  if (int8) times_scales(scores, c.value_scale, span);
  int d = 0;
  for (; d + 64 <= dim; d += 64) weighted_values<From, 8>(scores, values + d, dim, span, y + d);
  for (; d + 32 <= dim; d += 32) weighted_values<From, 4>(scores, values + d, dim, span, y + d);
  for (; d < dim; d += 8) weighted_values<From, 1>(scores, values + d, dim, span, y + d);
  const F8 share = splat((fp8 ? *c.value_scale * 256.0f : 1.0f) / mass);
  for (d = 0; d < dim; d += 8) store(y + d, load(y + d) * share);
}

void attend(int kind, HeadCache c, const float* q, int dim, const Span& span, float scale, float cap, float* scores,
            float* y) {
  switch (kind) {
    case qspec::FLOAT_CACHE: return attend_as<FromF32>(kind, c, q, dim, span, scale, cap, scores, y);
    case qspec::INT8_CACHE: return attend_as<FromINT8>(kind, c, q, dim, span, scale, cap, scores, y);
    case qspec::FP8_CACHE: return attend_as<FromFP8>(kind, c, q, dim, span, scale, cap, scores, y);
  }
}

void move_position(int kind, HeadCache c, int dim, int from, int to) {
  const int64_t size = cache_bytes(kind), block = int64_t(dim) * 8 * size;
  char* keys = static_cast<char*>(c.keys);
  char* values = static_cast<char*>(c.values);
  for (int d = 0; d < dim; ++d)
    std::memcpy(keys + to / 8 * block + (d * 8 + to % 8) * size, keys + from / 8 * block + (d * 8 + from % 8) * size,
                static_cast<size_t>(size));
  std::memcpy(values + int64_t(to) * dim * size, values + int64_t(from) * dim * size, static_cast<size_t>(dim * size));
  if (kind != qspec::INT8_CACHE) return;
  c.key_scale[to] = c.key_scale[from];
  c.value_scale[to] = c.value_scale[from];
}

}  // namespace

namespace qspec {
namespace {
const Kernels TABLE = {QSPEC_NAME, embed,  norm,      quantize_int8, round_fp8, matmul,
                       gate,       rotate, store_key, store_value,   attend,    move_position,
                       soft_cap, exp_sum};
}
extern const Kernels* const QSPEC_TABLE;
const Kernels* const QSPEC_TABLE = &TABLE;
}  // namespace qspec
