// Dot products of bytes, four inputs per lane and step (a *quad*): what the integer kernels are written in.
//
// A *strip* is as many panels as one vector holds: one, or two with AVX-512. Every sum is an exact int32.
#pragma once
#include "simd.h"

namespace {

#if defined(QSPEC_AVX512)

constexpr int STRIP = 2, MOST_ROWS = 8;  // panels of a vector; rows of a tile, by the number of registers
struct IntLanes { __m512i v; };
struct FloatLanes { __m512 v; };

inline __m512i both(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
inline __m256i bytes_at(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline IntLanes load_quads(const uint8_t* p, int64_t next) { return {both(bytes_at(p), bytes_at(p + next))}; }
inline FloatLanes load_scales(const float* p, int64_t next) {
  return {_mm512_castsi512_ps(both(bytes_at(p), bytes_at(p + next)))};
}
inline FloatLanes load_half_scales(const uint16_t* p, int64_t next) {
  return {_mm512_castsi512_ps(both(_mm256_castps_si256(load_f16(p).v), _mm256_castps_si256(load_f16(p + next).v)))};
}
inline IntLanes load_zeros(const int8_t* p, int64_t next) {
  const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {both(low, _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + next))))};
}
inline void store_strip(float* p, const FloatLanes& a) { _mm512_storeu_ps(p, a.v); }
inline IntLanes splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline FloatLanes splat_float(float x) { return {_mm512_set1_ps(x)}; }
inline IntLanes operator+(IntLanes a, IntLanes b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline IntLanes operator*(IntLanes a, IntLanes b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline FloatLanes operator*(FloatLanes a, FloatLanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline FloatLanes operator+(FloatLanes a, FloatLanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline FloatLanes to_floats(IntLanes a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline IntLanes splat_quad(const int8_t* p) { int32_t q; std::memcpy(&q, p, 4); return splat_int(q); }
inline IntLanes low_halves(IntLanes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline IntLanes high_halves(IntLanes a) { return low_halves({_mm512_srli_epi16(a.v, 4)}); }

// Sums of unsigned halves times signed inputs, and those added to int32 sums.
inline IntLanes dot_halves(IntLanes sums, IntLanes w, IntLanes x) { return {_mm512_dpbusd_epi32(sums.v, w.v, x.v)}; }
inline IntLanes widened(IntLanes acc, IntLanes sums) { return acc + sums; }

// Weights + 128 as unsigned bytes.
struct SignedBytes {
  IntLanes w;
  SignedBytes() = default;
  explicit SignedBytes(IntLanes codes) : w{_mm512_xor_si512(codes.v, _mm512_set1_epi8(-128))} {}
  static constexpr int32_t OFFSET = 128;
  static IntLanes input(const int8_t* x) { return splat_quad(x); }
  IntLanes dot(IntLanes acc, IntLanes x) const { return dot_halves(acc, w, x); }
};
using AnySignedBytes = SignedBytes;

#else

constexpr int STRIP = 1, MOST_ROWS = 4;
using IntLanes = I8;
using FloatLanes = F8;

inline FloatLanes load_scales(const float* p, int64_t) { return load(p); }
inline FloatLanes load_half_scales(const uint16_t* p, int64_t) { return load_f16(p); }
inline void store_strip(float* p, const FloatLanes& a) { store(p, a); }
inline FloatLanes splat_float(float x) { return splat(x); }
inline FloatLanes to_floats(IntLanes a) { return to_float(a); }

#if defined(__AVX2__)

// A value that is in a register from here on: GCC would load it once more for each use, and put off sums until the
// registers are full.
inline __m256i held(__m256i v) { __asm__("" : "+x"(v)); return v; }

inline IntLanes load_quads(const uint8_t* p, int64_t) {
  return {held(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline IntLanes load_zeros(const int8_t* p, int64_t) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline IntLanes operator*(IntLanes a, IntLanes b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline IntLanes splat_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline IntLanes splat_quad(const int8_t* p) { int32_t q; std::memcpy(&q, p, 4); return splat_int(q); }
inline IntLanes low_halves(IntLanes a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
inline IntLanes high_halves(IntLanes a) { return low_halves({_mm256_srli_epi16(a.v, 4)}); }

// Sums in int16: exact for 32 inputs, 16 * 15 * 128 being 30720.
inline IntLanes dot_halves(IntLanes sums, IntLanes w, IntLanes x) {
  return {held(_mm256_add_epi16(sums.v, _mm256_maddubs_epi16(w.v, x.v)))};
}
inline IntLanes widened(IntLanes acc, IntLanes sums) {
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(sums.v, _mm256_set1_epi16(1)))};
}

// |w| times x with the sign of w: pairs stay below 2 * 128 * 127 = 32512, in int16. Inputs must not be -128.
struct SignedBytes {
  IntLanes w, magnitude;
  SignedBytes() = default;
  explicit SignedBytes(IntLanes codes) : w(codes), magnitude{_mm256_abs_epi8(codes.v)} {}
  static constexpr int32_t OFFSET = 0;
  static IntLanes input(const int8_t* x) { return splat_quad(x); }
  IntLanes dot(IntLanes acc, IntLanes x) const {
    return widened(acc, {_mm256_maddubs_epi16(magnitude.v, _mm256_sign_epi8(x.v, w.v))});
  }
};

// Bytes widened to int16, even ones and odd ones: for all inputs.
struct AnySignedBytes {
  struct Halves { __m256i even, odd; };
  Halves w;
  static Halves halves(IntLanes a) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8), _mm256_srai_epi16(a.v, 8)};
  }
  AnySignedBytes() = default;
  explicit AnySignedBytes(IntLanes codes) : w(halves(codes)) {}
  static constexpr int32_t OFFSET = 0;
  static Halves input(const int8_t* x) { return halves(splat_quad(x)); }
  IntLanes dot(IntLanes acc, Halves x) const {
    const __m256i even = _mm256_madd_epi16(w.even, x.even), odd = _mm256_madd_epi16(w.odd, x.odd);
    return {_mm256_add_epi32(_mm256_add_epi32(acc.v, even), odd)};
  }
};

#else

#define LANES(expr) for (int i = 0; i < 8; ++i) r.v[i] = (expr)
inline IntLanes load_quads(const uint8_t* p, int64_t) { IntLanes r; std::memcpy(r.v, p, 32); return r; }
inline IntLanes load_zeros(const int8_t* p, int64_t) { IntLanes r; LANES(p[i]); return r; }
inline IntLanes operator*(IntLanes a, IntLanes b) { IntLanes r; LANES(a.v[i] * b.v[i]); return r; }
inline IntLanes splat_int(int32_t x) { IntLanes r; LANES(x); return r; }
inline IntLanes splat_quad(const int8_t* p) { int32_t q; std::memcpy(&q, p, 4); return splat_int(q); }
inline IntLanes low_halves(IntLanes a) { IntLanes r; LANES(a.v[i] & 0x0F0F0F0F); return r; }
inline IntLanes high_halves(IntLanes a) { IntLanes r; LANES((a.v[i] >> 4) & 0x0F0F0F0F); return r; }
inline int32_t byte_at(int32_t a, int j) { return static_cast<int8_t>(uint32_t(a) >> 8 * j); }
inline int32_t dot_bytes(int32_t a, int32_t b) {
  return byte_at(a, 0) * byte_at(b, 0) + byte_at(a, 1) * byte_at(b, 1) + byte_at(a, 2) * byte_at(b, 2) +
         byte_at(a, 3) * byte_at(b, 3);
}
inline IntLanes dot_halves(IntLanes sums, IntLanes w, IntLanes x) {
  IntLanes r;
  LANES(sums.v[i] + dot_bytes(w.v[i], x.v[i]));
  return r;
}
inline IntLanes widened(IntLanes acc, IntLanes sums) { return acc + sums; }
#undef LANES

struct SignedBytes {
  IntLanes w;
  SignedBytes() = default;
  explicit SignedBytes(IntLanes codes) : w(codes) {}
  static constexpr int32_t OFFSET = 0;
  static IntLanes input(const int8_t* x) { return splat_quad(x); }
  IntLanes dot(IntLanes acc, IntLanes x) const { return dot_halves(acc, w, x); }
};
using AnySignedBytes = SignedBytes;

#endif
#endif

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
