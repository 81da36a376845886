// What the model asks of an instruction set: a table of functions. Kernels work on one row or one block of weights
// each; which thread does what is the model's business.
//
// Letters: T rows (tokens), K inputs, N outputs, D head size, L positions. A *panel* is eight outputs.
#pragma once
#include <cstdint>
#include <vector>

namespace qspec {

enum WeightKind : int32_t { F32, BF16, F16, FP8_E4M3, INT8, INT4, INT8_DOT, INT4_DOT };
enum InputKind : int32_t { FLOAT_INPUT, INT8_INPUT, FP8_INPUT, INT8_GROUP_INPUT };
enum Activation : int32_t { SILU, GELU_TANH };
enum CacheKind : int32_t { FLOAT_CACHE, INT8_CACHE, FP8_CACHE };

// A weight [N, K] in panels. Codes [N/8][K][8]; INT4 [N/8][K/8][8] int32, nibble j of a word is input j of eight. Short
// panels and inputs are filled with zeros. Scales [N/8][groups][8] in float32, or in float16 as `half_scale`; both null:
// all 1. Bias [N/8][8] or null. input_scale 0: a scale per row, made from its largest.
//
// INT8_DOT [N/8][K/4][8][4], K filled up to a multiple of 8. It and INT4_DOT multiply integers: their inputs are
// INT8_INPUT (a scale per row) or INT8_GROUP_INPUT (one per row and group of the weight), which no other kind has. A
// group is all of K, or a multiple of 32.
// INT4_DOT [N/8][K/8][8][4] bytes, K a multiple of 32: byte j of a lane's word holds input j of eight in its low half
// and input 4 + j in its high half, as unsigned codes 0 to 15 (a signed code + 8). `zero` [N/8][groups][8] int8 is the
// signed code that stands for 0, -8 to 7; null: 0. Other kinds have no `zero`.
struct Matrix {
  int32_t kind, input, n, k, group;
  float input_scale;
  const void* codes;
  int64_t bytes;
  const float* scale;
  const float* bias;
  const uint16_t* half_scale;
  const int8_t* zero;

  int panels() const { return (n + 7) / 8; }
  int groups() const { return k / group; }
  bool scaled() const { return scale || half_scale; }
};

// T rows of inputs as a matrix reads them: floats [T][stride], or int8 codes [T][stride]. [T][groups()]: `scale`, one per
// group of the weight or the first for all, and `start`, what a group's sum of products begins with: it takes off what
// kernels add to codes of weights to have them unsigned. Strides: multiples of 64.
struct Rows {
  float* values;
  int8_t* codes;
  float* scale;
  int32_t* start;
  int64_t stride;
  int count;

  int64_t groups() const { return stride / 32; }
};

// One layer's keys and values of one KV head. Keys lie [L/8][D][8], so that eight positions are eight lanes; values
// [L][D]. Scales: INT8 has one per position, FP8 one in all.
struct HeadCache {
  void* keys;
  void* values;
  float* key_scale;
  float* value_scale;
};

// Positions [begin, end). Those up to `plain` lie where they are; later ones are nodes of a tree, in `slots`.
struct Span {
  int begin, plain, end;
  const int32_t* slots;

  int slot(int position) const { return position < plain ? position : slots[position - plain]; }
};

struct Kernels {
  const char* name;
  // A token's row of an F32, BF16 or F16 embedding times `factor`; stored by rows, or in panels (a tied head).
  void (*embed)(const Matrix& m, bool in_panels, int64_t token, float factor, float* y);
  // RMSNorm of a row; gains hold the architecture's offset already.
  void (*norm)(const float* x, const float* gain, float eps, int n, float* y);
  // Floats to codes, scales and starts of row t as an integer matrix reads them: round half to even.
  void (*quantize_int8)(const float* x, const Matrix& m, const Rows& rows, int t);
  // A row rounded to e4m3 under its own scale (or a given one), in place.
  void (*round_fp8)(float* x, int n, float fixed_scale);
  // Outputs of panels [first, last) for all rows: out[t][8 * (panel - first) + lane].
  void (*matmul)(const Matrix& w, const Rows& x, int first, int last, float* scratch, float* out, int64_t out_stride);
  // Panels gate, up, gate, up, … of one row: y[j] = act(gate[j]) * up[j].
  void (*gate)(int activation, const float* gate_up, int panels, float* y);
  // Rotate the first `rotary` dimensions of a head, its halves being pairs.
  void (*rotate)(float* x, const float* cos, const float* sin, int rotary);
  void (*store_key)(int kind, HeadCache cache, const float* x, int dim, int position);
  void (*store_value)(int kind, HeadCache cache, const float* x, int dim, int position);
  // Softmax attention of one query over what it sees; scores are soft-capped unless cap is 0. scores: room for
  // span.end + 16 floats.
  void (*attend)(int kind, HeadCache cache, const float* q, int dim, const Span& span, float scale, float cap,
                 float* scores, float* y);
  // Copy a position's key and value over another one's.
  void (*move_position)(int kind, HeadCache cache, int dim, int from, int to);
  // x becomes cap * tanh(factor * x / cap).
  void (*soft_cap)(float* x, int n, float factor, float cap);
  // Sum of e^(x - top): what a softmax divides by, `top` being the largest.
  float (*exp_sum)(const float* x, int n, float top);
};

// Null: not compiled here.
extern const Kernels* const portable_kernels;
extern const Kernels* const avx2_kernels;
extern const Kernels* const avx512_kernels;
extern const Kernels* const amx_kernels;

// Those that run here, the fastest first; one of them by its name, or with null the fastest. Null: there is none.
const std::vector<const Kernels*>& instruction_sets();
const Kernels* kernels_named(const char* name);
// Whether integer matmuls give the bits that plain C++ gives. A set that fails is not used.
bool agrees_with_portable(const Kernels& kernels);

}  // namespace qspec
