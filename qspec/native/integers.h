// Matmuls of integer inputs: rows to codes, and tiles of exact sums.
//
// Per group of inputs: y += float(sum) * scale of the input * scale of the weight, each step rounded by itself. So all
// instruction sets give the same bits, and so does ops/reference.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "quads.h"

namespace {

// ---- inputs ---------------------------------------------------------------------------------------------------------

// Codes of `n` floats, filled up with zeros to a multiple of 8: round half to even. Returns their sum.
int32_t int8_codes(const float* x, int n, float scale, int8_t* codes) {
  const F8 low = splat(-128.0f), high = splat(127.0f), s = splat(scale);
  I8 total = zero_i32();
  for (int i = 0; i < n; i += 8) {
    float tail[8] = {};
    if (i + 8 > n) std::memcpy(tail, x + i, sizeof(float) * static_cast<size_t>(n - i));
    const I8 q = round_even(max(min(load(i + 8 > n ? tail : x + i) / s, high), low));
    store_i8(codes + i, q);
    total = total + q;
  }
  return sum(total);
}

void quantize_int8(const float* x, const Matrix& m, const Rows& rows, int t) {
  const int32_t offset = m.kind == qspec::INT4_DOT ? 8 : SignedBytes::OFFSET;
  float* scale = rows.scale + t * rows.groups();
  const bool by_group = m.input == qspec::INT8_GROUP_INPUT;
  if (!by_group) *scale = scale_of(x, m.k, m.input_scale, 127.0f);
  for (int g = 0; g < m.groups(); ++g) {
    const float* part = x + g * m.group;
    if (by_group) scale[g] = scale_of(part, m.group, m.input_scale, 127.0f);
    int8_t* codes = rows.codes + t * rows.stride + g * m.group;
    rows.start[t * rows.groups() + g] = -offset * int8_codes(part, m.group, scale[by_group ? g : 0], codes);
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Bytes of weights that a tile reads, from the group at hand on; `ahead`: to those that the next tile reads.
struct Stream {
  const uint8_t* codes;
  int64_t panel_bytes, next, ahead;

  IntLanes quads(int p, int64_t at) const { return load_quads(codes + p * STRIP * panel_bytes + at, next); }
  Stream past(int64_t bytes) const { return {codes + bytes, panel_bytes, next, ahead}; }
  void fetch(int p, int64_t at) const {
    for (int s = 0; s < STRIP; ++s) prefetch(codes + (p * STRIP + s) * panel_bytes + at + ahead);
  }
};

// Codes of a tile's rows, from the group at hand on, and what its sums begin with.
struct Inputs {
  const int8_t* codes;
  int64_t stride;
  const int32_t* start;
  int64_t start_stride;

  const int8_t* at(int r, int64_t i) const { return codes + r * stride + i; }
  Inputs past(int64_t count) const { return {codes + count, stride, start, start_stride}; }
  IntLanes begin(int r) const { return splat_int(start[r * start_stride]); }
};

inline FloatLanes strip_scales(const Matrix& w, int64_t at, int64_t next) {
  return w.half_scale ? load_half_scales(w.half_scale + at, next) : load_scales(w.scale + at, next);
}

// One cache line of scales after the other, all in the open: GCC takes a loop of prefetches for an empty one.
template <int PANELS>
void fetch_scales(const Matrix& w, int64_t at) {
  if (w.half_scale) {
    UNROLL for (int p = 0; p < PANELS; p += 4) prefetch(w.half_scale + at + p * 8);
  } else {
    UNROLL for (int p = 0; p < PANELS; p += 2) prefetch(w.scale + at + p * 8);
  }
}

// Products with the codes that stand for 0, off the sums: a row's start is -8 times the sum of its inputs.
template <int P, int R>
void take_zeros(IntLanes (&acc)[P][R], const Matrix& w, int64_t at, int64_t next, const int32_t* start, int64_t stride) {
  UNROLL for (int p = 0; p < P; ++p) {
    const IntLanes zero = load_zeros(w.zero + at + int64_t(p * STRIP) * w.groups() * 8, next);
    UNROLL for (int r = 0; r < R; ++r) acc[p][r] = acc[p][r] + zero * splat_int(start[r * stride] / 8);
  }
}

template <class Bytes>
struct Int8Codes {
  static int64_t bytes(int inputs) { return int64_t(inputs + 7) / 8 * 64; }

  template <int P, int R>
  static void dot(IntLanes (&acc)[P][R], const Stream& from, const Inputs& x, int inputs) {
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int r = 0; r < R; ++r) acc[p][r] = x.begin(r);
    const int64_t end = bytes(inputs);
    for (int64_t at = 0; at < end; at += 32) {
      Bytes w[P];
      UNROLL for (int p = 0; p < P; ++p) {
        from.fetch(p, at);
        w[p] = Bytes(from.quads(p, at));
      }
      UNROLL for (int r = 0; r < R; ++r) {
        const auto input = Bytes::input(x.at(r, at / 8));
        UNROLL for (int p = 0; p < P; ++p) acc[p][r] = w[p].dot(acc[p][r], input);
      }
    }
  }
};

struct Int4Codes {
  static int64_t bytes(int inputs) { return int64_t(inputs) * 4; }

  template <int P, int R>
  static void dot(IntLanes (&acc)[P][R], const Stream& from, const Inputs& x, int inputs) {
    IntLanes sums[P][R];
    sum_words(sums, from, x);  // while these take the registers, no `acc` is alive
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int r = 0; r < R; ++r) acc[p][r] = widened(x.begin(r), sums[p][r]);
    for (int i = 32; i < inputs; i += 32) {
      sum_words(sums, from.past(bytes(i)), x.past(i));
      UNROLL for (int p = 0; p < P; ++p)
        UNROLL for (int r = 0; r < R; ++r) acc[p][r] = widened(acc[p][r], sums[p][r]);
    }
  }

 private:
  // Over 32 inputs.
  template <int P, int R>
  static void sum_words(IntLanes (&sums)[P][R], const Stream& from, const Inputs& x) {
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int r = 0; r < R; ++r) sums[p][r] = splat_int(0);
    for (int i = 0; i < 32; i += 8) {
      IntLanes low[P], high[P];
      UNROLL for (int p = 0; p < P; ++p) {
        from.fetch(p, bytes(i));
        const IntLanes both = from.quads(p, bytes(i));
        low[p] = low_halves(both);
        high[p] = high_halves(both);
      }
      UNROLL for (int r = 0; r < R; ++r) {
        const IntLanes first = splat_quad(x.at(r, i)), second = splat_quad(x.at(r, i + 4));
        UNROLL for (int p = 0; p < P; ++p) sums[p][r] = dot_halves(sums[p][r], low[p], first);
        UNROLL for (int p = 0; p < P; ++p) sums[p][r] = dot_halves(sums[p][r], high[p], second);
      }
    }
  }
};

// The strips that a tile writes; a last one may have fewer panels than lanes.
inline void put_strip(const Tile& t, int p, int r, int panels, const FloatLanes& y) {
  float lanes[8 * STRIP];
  store_strip(lanes, y);
  for (int s = 0; s < panels; ++s) put(t, p * STRIP + s, r, load(lanes + 8 * s));
}

// P strips by R rows; `panels`: of the last strip. Not inlined: each gets all registers for itself.
template <class Codes, int P, int R>
__attribute__((noinline)) void integer_tile(const Tile& t, const uint8_t* codes, int64_t panel_bytes, int panels) {
  const Matrix& w = t.w;
  const int groups = w.groups();
  const bool by_group = w.input == qspec::INT8_GROUP_INPUT;
  const int8_t* x = t.x.codes + t.row * t.x.stride;
  const float* x_scale = t.x.scale + t.row * t.x.groups();
  const int32_t* x_start = t.x.start + t.row * t.x.groups();
  const int64_t second = panels == STRIP ? 1 : 0;  // a missing panel is the one before it, and is not written
  const int64_t next = second * panel_bytes, next_group = second * groups * 8;
  const int64_t w_scale = int64_t(t.panel) * groups * 8;
  const int64_t ahead = t.row == 0 ? P * STRIP * panel_bytes : 0;
  FloatLanes total[P][R];
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r) total[p][r] = splat_float(0.0f);
  for (int g = 0; g < groups; ++g) {
    IntLanes acc[P][R];
    const Stream from{codes + g * Codes::bytes(w.group), panel_bytes, next, ahead};
    Codes::dot(acc, from, Inputs{x + g * w.group, t.x.stride, x_start + g, t.x.groups()}, w.group);
    if (w.zero) take_zeros(acc, w, w_scale + int64_t(g) * 8, next_group, x_start + g, t.x.groups());
    if (ahead) fetch_scales<P * STRIP>(w, w_scale + int64_t(P * STRIP) * (groups + g) * 8);
    UNROLL for (int p = 0; p < P; ++p) {
      const FloatLanes scale = strip_scales(w, w_scale + (int64_t(p * STRIP) * groups + g) * 8, next_group);
      UNROLL for (int r = 0; r < R; ++r) {
        const FloatLanes input = splat_float(x_scale[r * t.x.groups() + (by_group ? g : 0)]);
        total[p][r] = total[p][r] + to_floats(acc[p][r]) * input * scale;
      }
    }
  }
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r) put_strip(t, p, r, panels, total[p][r]);
}

// R rows by `count` panels, in as many accumulators as registers hold.
template <class Codes, int R>
void strips(Tile t, const uint8_t* codes, int64_t panel_bytes, int count) {
  const auto advance = [&](int p) { t.panel += p, t.out += p * 8, codes += p * panel_bytes, count -= p; };
  if constexpr (R == 1)
    for (; count >= 4 * STRIP; advance(4 * STRIP)) integer_tile<Codes, 4, R>(t, codes, panel_bytes, STRIP);
  for (; count >= 2 * STRIP; advance(2 * STRIP)) integer_tile<Codes, 2, R>(t, codes, panel_bytes, STRIP);
  for (; count >= STRIP; advance(STRIP)) integer_tile<Codes, 1, R>(t, codes, panel_bytes, STRIP);
  if (count) integer_tile<Codes, 1, R>(t, codes, panel_bytes, count);
}

// Panels [first, last) by all rows: a few panels stay in the cache while the rows pass.
template <class Codes>
void integer_matmul(const Matrix& w, const Rows& x, int first, int last, float* out, int64_t out_stride) {
  const int64_t panel_bytes = Codes::bytes(w.k);
  const int at_once = x.count == 1 ? 4 * STRIP : 2 * STRIP;
  for (int panel = first; panel < last; panel += at_once) {
    const int count = last - panel < at_once ? last - panel : at_once;
    const auto* codes = static_cast<const uint8_t*>(w.codes) + panel * panel_bytes;
    Tile t{w, panel, x, 0, out + (panel - first) * 8, out_stride};
    const auto rows = [&](auto size, int least) {  // so many at once, while `least` are left
      constexpr int R = decltype(size)::value;
      for (; x.count - t.row >= least; t.row += R, t.out += R * out_stride)
        strips<Codes, R>(t, codes, panel_bytes, count);
    };
    if constexpr (MOST_ROWS >= 8) rows(std::integral_constant<int, 8>{}, 8);
    rows(std::integral_constant<int, 4>{}, 7);
    rows(std::integral_constant<int, 6>{}, 6);  // faster than four and two
    rows(std::integral_constant<int, 5>{}, 5);
    rows(std::integral_constant<int, 4>{}, 4);
    rows(std::integral_constant<int, 3>{}, 3);
    rows(std::integral_constant<int, 2>{}, 2);
    rows(std::integral_constant<int, 1>{}, 1);
  }
}

}  // namespace
