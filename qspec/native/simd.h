// Eight float lanes (F8) and eight int32 lanes (I8): AVX2 + FMA + F16C, or plain C++ for any other CPU.
//
// Kernels are written once against these few operations. Everything has internal linkage, so that each instruction set
// gets its own copies and the linker never mixes them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

// The exponent moves to float's field with 112 too little; subnormals and normals alike are mended by one product.
inline float half_to_float(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, rest = (h & 0x7FFFu) << 13;
  if ((h & 0x7C00u) == 0x7C00u) return float_of(sign | rest | 0x7F800000u);
  return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
}

#if defined(__AVX2__)

struct F8 { __m256 v; };
struct I8 { __m256i v; };

inline F8 splat(float x) { return {_mm256_set1_ps(x)}; }
inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F8 abs(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline I8 round_even(F8 a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F8 to_float(I8 a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline F8 power_of_two(I8 e) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.v, _mm256_set1_epi32(127)), 23))};
}
inline void store_i8(int8_t* p, I8 a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline F8 load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16))};
}
inline __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F8 load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_16_bytes(p))}; }
inline F8 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
// e4m3 bits moved into the fields of float16, whose exponent bias is 15 and not 7: value / 256, subnormals too.
inline F8 load_e4m3_256th(const uint8_t* p) {
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xBFFF))))};
}
inline I8 load_i32(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline F8 nibble(I8 a, int j) {
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a.v, 28 - 4 * j), 28))};
}
inline I8 zero_i32() { return {_mm256_setzero_si256()}; }
inline I8 operator+(I8 a, I8 b) { return {_mm256_add_epi32(a.v, b.v)}; }

#else

struct F8 { float v[8]; };
struct I8 { int32_t v[8]; };

#define LANES(expr) for (int i = 0; i < 8; ++i) r.v[i] = (expr)
inline F8 splat(float x) { F8 r; LANES(x); return r; }
inline F8 load(const float* p) { F8 r; LANES(p[i]); return r; }
inline void store(float* p, F8 a) { for (int i = 0; i < 8; ++i) p[i] = a.v[i]; }
inline F8 operator+(F8 a, F8 b) { F8 r; LANES(a.v[i] + b.v[i]); return r; }
inline F8 operator-(F8 a, F8 b) { F8 r; LANES(a.v[i] - b.v[i]); return r; }
inline F8 operator*(F8 a, F8 b) { F8 r; LANES(a.v[i] * b.v[i]); return r; }
inline F8 operator/(F8 a, F8 b) { F8 r; LANES(a.v[i] / b.v[i]); return r; }
inline F8 fma(F8 a, F8 b, F8 c) { F8 r; LANES(a.v[i] * b.v[i] + c.v[i]); return r; }
inline F8 min(F8 a, F8 b) { F8 r; LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); return r; }
inline F8 max(F8 a, F8 b) { F8 r; LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); return r; }
inline F8 abs(F8 a) { F8 r; LANES(std::fabs(a.v[i])); return r; }
inline I8 round_even(F8 a) { I8 r; LANES(static_cast<int32_t>(std::nearbyint(a.v[i]))); return r; }
inline F8 to_float(I8 a) { F8 r; LANES(static_cast<float>(a.v[i])); return r; }
inline F8 power_of_two(I8 e) { F8 r; LANES(float_of(static_cast<uint32_t>(e.v[i] + 127) << 23)); return r; }
inline void store_i8(int8_t* p, I8 a) { for (int i = 0; i < 8; ++i) p[i] = static_cast<int8_t>(a.v[i]); }
inline F8 load_bf16(const uint16_t* p) { F8 r; LANES(float_of(static_cast<uint32_t>(p[i]) << 16)); return r; }
inline F8 load_f16(const uint16_t* p) { F8 r; LANES(half_to_float(p[i])); return r; }
inline F8 load_i8(const int8_t* p) { F8 r; LANES(static_cast<float>(p[i])); return r; }
inline F8 load_e4m3_256th(const uint8_t* p) {
  F8 r;
  LANES(half_to_float(static_cast<uint16_t>((p[i] & 0x80u) << 8 | (p[i] & 0x7Fu) << 7)));
  return r;
}
inline I8 load_i32(const int32_t* p) { I8 r; LANES(p[i]); return r; }
inline int32_t nibble_at(int32_t a, int j) { return int32_t(uint32_t(a) << (28 - 4 * j)) >> 28; }
inline F8 nibble(I8 a, int j) { F8 r; LANES(static_cast<float>(nibble_at(a.v[i], j))); return r; }
inline I8 zero_i32() { return I8{}; }
inline I8 operator+(I8 a, I8 b) { I8 r; LANES(a.v[i] + b.v[i]); return r; }
#undef LANES

#endif

// Lanes are added in one fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
inline float sum(F8 a) {
  float v[8];
  store(v, a);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline int32_t sum(I8 a) {
  int32_t v[8], total = 0;
  std::memcpy(v, &a, sizeof(v));
  for (int32_t lane : v) total += lane;
  return total;
}
inline float largest(F8 a) {
  float v[8], m;
  store(v, a);
  m = v[0];
  for (int i = 1; i < 8; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// e^x to about 1e-7, relative: x = n ln 2 + r, a polynomial of degree 6 for e^r, times 2^n. Below -87 it stays e^-87.
inline F8 exp(F8 x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  I8 n = round_even(x * splat(1.44269504088896341f));
  F8 n_float = to_float(n);
  F8 r = fma(n_float, splat(-0.693359375f), x);
  r = fma(n_float, splat(2.12194440e-4f), r);
  F8 p = splat(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  return p * power_of_two(n);
}

}  // namespace
