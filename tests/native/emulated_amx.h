// AVX-512 by SIMDe, AMX tiles as plain loops: included in front of everything else.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

namespace {

inline __m512 emulated_floats(__m512i ints) {
  int32_t from[16];
  float to[16];
  std::memcpy(from, &ints, 64);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<float>(from[i]);
  __m512 floats;
  std::memcpy(&floats, to, 64);
  return floats;
}

struct EmulatedTiles {
  uint8_t config[64] = {};
  alignas(64) int32_t tiles[8][16][16] = {};

  int rows(int tile) const { return config[48 + tile]; }
  int bytes(int tile) const { return config[16 + 2 * tile]; }
};

inline EmulatedTiles& emulated() {
  static EmulatedTiles tiles;
  return tiles;
}

inline void emulated_config(const void* config) {
  emulated() = EmulatedTiles{};
  std::memcpy(emulated().config, config, 64);
}
inline void emulated_zero(int tile) { std::memset(emulated().tiles[tile], 0, sizeof(emulated().tiles[tile])); }
inline void emulated_load(int tile, const void* from, int64_t stride) {
  emulated_zero(tile);
  for (int row = 0; row < emulated().rows(tile); ++row)
    std::memcpy(emulated().tiles[tile][row], static_cast<const char*>(from) + row * stride, emulated().bytes(tile));
}
inline void emulated_store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < emulated().rows(tile); ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, emulated().tiles[tile][row], emulated().bytes(tile));
}
inline void emulated_dot(int out, int left, int right) {
  EmulatedTiles& e = emulated();
  for (int m = 0; m < e.rows(out); ++m)
    for (int k = 0; k < e.bytes(left) / 4; ++k)
      for (int n = 0; n < e.bytes(out) / 4; ++n)
        for (int j = 0; j < 4; ++j)
          e.tiles[out][m][n] += int32_t(reinterpret_cast<const int8_t*>(e.tiles[left][m])[4 * k + j]) *
                                reinterpret_cast<const int8_t*>(e.tiles[right][k])[4 * n + j];
}

}  // namespace

#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(ints) emulated_floats(ints)
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(config) emulated_config(config)
#define _tile_release() emulated() = EmulatedTiles{}
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbssd(out, left, right) emulated_dot(out, left, right)
