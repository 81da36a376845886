// INT8 matmuls of many rows in AMX tiles: 16 rows by 16 outputs, 64 inputs a step, four tiles of outputs at once.
#pragma once
#include "integers.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_STRIPS = 4, TILE_INPUTS = 64, FEWEST_ROWS = 8;

inline bool takes_tiles(const Matrix& w, const Rows& x) { return w.groups() == 1 && x.count >= FEWEST_ROWS; }

// Tiles 0 to 3: outputs, 4: inputs, 5: weights.
void configure_tiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 6; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 5 ? rows : 16);
  }
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC 12 takes only the first 8 bytes for read
  _tile_loadconfig(&config);
}

// Four strips of `count` panels as tiles of weights: [step][strip][16 quads][16 outputs][4], zeros where there is none.
void pack_tiles(const Matrix& w, int panel, int count, uint8_t* packed) {
  const int64_t panel_bytes = Int8Codes<SignedBytes>::bytes(w.k), quads = panel_bytes / 32;
  const auto* codes = static_cast<const uint8_t*>(w.codes) + panel * panel_bytes;
  const int64_t padded = (int64_t(w.k) + TILE_INPUTS - 1) / TILE_INPUTS * 16;
  for (int p = 0; p < 2 * TILE_STRIPS; ++p)
    for (int64_t quad = 0; quad < padded; ++quad) {
      uint8_t* to = packed + (quad / 16 * TILE_STRIPS + p / 2) * 1024 + quad % 16 * 64 + p % 2 * 32;
      if (p < count && quad < quads) std::memcpy(to, codes + p * panel_bytes + quad * 32, 32);
      else std::memset(to, 0, 32);
    }
}

void multiply_tiles(const int8_t* x, int64_t stride, int steps, const uint8_t* packed, int32_t (*sums)[256]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step, packed += 4096) {
    _tile_loadd(4, x + step * TILE_INPUTS, stride);
    _tile_loadd(5, packed, 64);
    _tile_dpbssd(0, 4, 5);
    _tile_loadd(5, packed + 1024, 64);
    _tile_dpbssd(1, 4, 5);
    _tile_loadd(5, packed + 2048, 64);
    _tile_dpbssd(2, 4, 5);
    _tile_loadd(5, packed + 3072, 64);
    _tile_dpbssd(3, 4, 5);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// Codes of the inputs reach to a multiple of 64, where weights are zeros. scratch: 64 bytes for each of those inputs.
void tile_matmul(const Matrix& w, const Rows& x, int first, int last, float* scratch, float* out, int64_t out_stride) {
  alignas(64) int32_t sums[TILE_STRIPS][256];
  auto* packed = reinterpret_cast<uint8_t*>(scratch);
  const int steps = (w.k + TILE_INPUTS - 1) / TILE_INPUTS;
  for (int panel = first; panel < last; panel += 2 * TILE_STRIPS) {
    const int count = last - panel < 2 * TILE_STRIPS ? last - panel : 2 * TILE_STRIPS;
    pack_tiles(w, panel, count, packed);
    for (int row = 0; row < x.count; row += TILE_ROWS) {
      const int rows = x.count - row < TILE_ROWS ? x.count - row : TILE_ROWS;
      if (row == 0 || rows < TILE_ROWS) configure_tiles(rows);
      multiply_tiles(x.codes + row * x.stride, x.stride, steps, packed, sums);
      const Tile t{w, panel, x, row, out + row * out_stride + (panel - first) * 8, out_stride};
      for (int r = 0; r < rows; ++r)
        for (int p = 0; p < count; ++p) {
          const F8 sum = to_float(load_i32(sums[p / 2] + r * 16 + p % 2 * 8));
          put(t, p, r, splat(0.0f) + sum * splat(x.scale[(row + r) * x.groups()]) * scale_at(w, panel + p, 0));
        }
    }
  }
  _tile_release();
}

}  // namespace
