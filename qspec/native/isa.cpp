// Which instruction sets there are: those that this CPU and its system have, and that multiply as plain C++ does.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qspec {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// The CPU must have tiles and int8 products, the system must save tiles, and this process must ask for them.
bool has_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned tile = 1u << 24, int8 = 1u << 25, saved = 3u << 17;
  constexpr long ask_permission = 0x1023, tile_data = 18;
  unsigned a, b, c, d, low, high;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (tile | int8)) != (tile | int8)) return false;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & saved) == saved && syscall(SYS_arch_prctl, ask_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

struct Candidate {
  const Kernels* kernels;
  bool (*present)();
};

// The fastest first.
const Candidate CANDIDATES[] = {
#if defined(__x86_64__)
    {amx_kernels, has_amx},
    {avx512_kernels, has_avx512},
    {avx2_kernels, has_avx2},
#endif
    {portable_kernels, always},
};

// Numbers from -1 to 1, the same each time.
struct Noise {
  uint32_t state = 1;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * (1.0f / 2147483648.0f);
  }
};

struct Case {
  int32_t kind, input, n, k, group, rows;
  float input_scale;
  bool half, zero;
};

const Case CASES[] = {
    {INT8_DOT, INT8_INPUT, 24, 75, 75, 19, 0.0f, false, false},
    {INT8_DOT, INT8_INPUT, 72, 192, 192, 33, 0.005f, false, false},
    {INT8_DOT, INT8_GROUP_INPUT, 40, 96, 32, 9, 0.0f, true, false},
    {INT8_DOT, INT8_INPUT, 8, 128, 64, 1, 0.0f, false, false},
    {INT4_DOT, INT8_INPUT, 24, 96, 32, 5, 0.0f, true, true},
    {INT4_DOT, INT8_GROUP_INPUT, 72, 128, 64, 14, 0.0f, true, false},
    {INT4_DOT, INT8_INPUT, 40, 128, 128, 2, 0.005f, false, true},
    {INT4_DOT, INT8_INPUT, 8, 64, 64, 1, 0.0f, false, false},
};

std::vector<float> outputs(const Kernels& run, const Case& c) {
  Noise noise;
  const size_t lanes = static_cast<size_t>(c.n), inputs = static_cast<size_t>(c.k + 7) / 8 * 8;
  const size_t rows = static_cast<size_t>(c.rows), groups = static_cast<size_t>(c.k / c.group);
  const size_t stride = static_cast<size_t>(c.k + 63) / 64 * 64;
  std::vector<int8_t> weights(lanes * inputs), zeros(lanes * groups), codes(rows * stride);
  std::vector<uint16_t> half_scales(lanes * groups);
  std::vector<float> scales(lanes * groups), x(rows * stride), scratch(stride * 16), out(rows * lanes);
  std::vector<float> row_scale(rows * stride / 32);
  std::vector<int32_t> start(rows * stride / 32);
  for (auto& w : weights) w = static_cast<int8_t>(noise() * 128.0f);
  for (auto& z : zeros) z = static_cast<int8_t>(noise() * 7.9f);
  for (auto& s : half_scales) s = static_cast<uint16_t>(0x2200 + static_cast<int>(noise() * 511.0f));
  for (auto& s : scales) s = 0.01f + 0.005f * noise();
  for (auto& value : x) value = noise();
  weights[0] = weights[1] = -128;
  x[0] = x[1] = -1.0f;
  const int64_t bytes = static_cast<int64_t>(weights.size());
  const Matrix w{c.kind,
                 c.input,
                 c.n,
                 c.k,
                 c.group,
                 c.input_scale,
                 weights.data(),
                 bytes,
                 c.half ? nullptr : scales.data(),
                 nullptr,
                 c.half ? half_scales.data() : nullptr,
                 c.zero ? zeros.data() : nullptr};
  const Rows in{nullptr, codes.data(), row_scale.data(), start.data(), static_cast<int64_t>(stride), c.rows};
  for (int t = 0; t < c.rows; ++t) run.quantize_int8(x.data() + static_cast<size_t>(t) * stride, w, in, t);
  run.matmul(w, in, 0, w.panels(), scratch.data(), out.data(), c.n);
  return out;
}

std::vector<const Kernels*> found() {
  std::vector<const Kernels*> list;
  for (const Candidate& c : CANDIDATES)
    if (c.kernels && c.present() && agrees_with_portable(*c.kernels)) list.push_back(c.kernels);
  return list;
}

}  // namespace

bool agrees_with_portable(const Kernels& kernels) {
  for (const Case& c : CASES)
    if (outputs(kernels, c) != outputs(*portable_kernels, c)) return false;
  return true;
}

const std::vector<const Kernels*>& instruction_sets() {
  static const std::vector<const Kernels*> list = found();
  return list;
}

const Kernels* kernels_named(const char* name) {
  for (const Kernels* kernels : instruction_sets())
    if (!name || std::strcmp(kernels->name, name) == 0) return kernels;
  return nullptr;
}

}  // namespace qspec
