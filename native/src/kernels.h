// What a build for one instruction set offers: a table of functions that compute *parts* of an op.
//
// The program (program.h) cuts an op into units and hands them to threads; no function here knows about threads. Every
// output element is computed by one fixed sequence of operations, whatever part it is computed in: that is the contract
// of docs/determinism.md, and tests/unit/kernels/cpu compares it with ==.
#pragma once

#include <cstdint>

#include "common.h"

namespace evensong {

// Memory of one thread that an op may use while it runs a unit.
struct Scratch {
  char* data;
  std::size_t size;
};

// A weight [rows = outputs, cols = inputs] in panels of `Kernels::panel` outputs. Layout of a panel:
//   bf16 where Kernels::pairs: [padded_cols / 2][panel][2]   two neighbouring inputs side by side
//   otherwise:                 [padded_cols][panel]
// padded_cols is `cols` rounded up to 2. Padding outputs and inputs are zero.
struct PackedMatrix {
  const void* data;
  DType type;
  std::int64_t rows;
  std::int64_t cols;
};

enum class Epilogue : std::uint8_t {
  store,      // out = y
  add,        // out += y; out is f32
  silu,       // out = silu(gate) * up: panels hold gate and up side by side, see Kernels::pack
  gelu_tanh,  // out = gelu(gate) * up, gelu by its tanh formula
  argmax,     // nothing but each row's largest y and its lowest index, per panel: see LinearArgs::best
};

// y = in W^T + bias. Rows of `in` are padded with zeros to padded_cols and more: at least 64 bytes beyond may be read.
struct LinearArgs {
  PackedMatrix weight;
  const float* bias;  // [rows rounded up to a panel], or nullptr; in the packed order of outputs
  const void* in;     // [num_rows, in_stride]; its type is bf16 if Kernels::pairs and the weight is bf16, else f32
  std::int64_t in_stride;
  void* out;  // [num_rows, out_stride]; for silu and gelu_tanh it has weight.rows / 2 columns
  std::int64_t out_stride;
  DType out_type;
  Epilogue epilogue;
  std::int64_t num_columns;  // argmax: outputs from here on pad the vocabulary and never win
  float* best;               // argmax: [num_rows, num_panels]; NaN if the panel has one
  std::int32_t* best_index;  // argmax: [num_rows, num_panels]
};

// Softmax attention of queries over their sequence's cached keys.
struct AttentionArgs {
  const void* query;  // [num_rows, num_heads * head_dim], bf16 or f32 as `compute`
  std::int64_t query_stride;
  void* out;  // as query
  std::int64_t out_stride;
  DType compute;      // bf16: products of bf16 pairs (only where Kernels::pairs and the cache is bf16); f32: all in f32
  const void* cache;  // blocks of block_size * 2 * num_kv_heads * head_dim elements: see cache_layout.h
  DType cache_type;
  std::int32_t num_heads, num_kv_heads, head_dim;
  std::int32_t block_size;
  std::int32_t window;  // positions that a query sees, its own included; 0: all up to its own
  float scale;
  float soft_cap;  // 0: none; else scores become cap * tanh(score / cap)
};

// Some queries of one sequence: rows first_row.. of the step, at positions first_position...
struct AttentionSpan {
  std::int64_t first_row;
  std::int32_t num_queries;
  std::int32_t first_position;
  const std::int32_t* blocks;  // the sequence's block table, from position 0
};

// Rotates queries and keys of one row, norms them before where asked, stores keys and values, and hands on queries.
struct RopeArgs {
  const float* qkv;  // [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]
  std::int64_t qkv_stride;
  const float* qk_norm;  // [num_heads + num_kv_heads, head_dim], or nullptr
  float eps;
  const float* cos;  // [positions, rotary_dim / 2]
  const float* sin;
  std::int32_t rotary_dim;
  std::int32_t num_heads, num_kv_heads, head_dim;
  void* query;  // [num_rows, num_heads * head_dim]
  std::int64_t query_stride;
  DType query_type;
  void* cache;
  DType cache_type;
  std::int32_t block_size;
};

// What one row asks of the sampler. Filters and noise are those of docs/sampling.md.
struct SampleParams {
  double temperature;  // below kGreedyBelow: the largest logit, the lowest id on a tie
  double top_p;        // 1: off
  double min_p;        // 0: off
  std::int64_t top_k;  // <= 0: off
  std::uint64_t seed;
  std::uint64_t position;  // index in prompt plus output of the token that is sampled
};

// Lower temperatures take the largest logit, as SamplingParams.greedy says.
constexpr double kGreedyBelow = 1e-9;

struct SampleResult {
  std::int64_t token;  // -1: a NaN or +inf stands in the row, or nothing but -inf
};

// Raw log-probabilities of a row.
struct LogprobArgs {
  const float* logits;
  std::int64_t count;  // logits
  std::int64_t token;  // whose rank is wanted
  std::int64_t num_best;
  std::int64_t* best_ids;  // [num_best], largest first, lowest id on a tie; -inf are left out
  double* best_values;     // their log-probabilities
};

struct LogprobResult {
  double shift;  // log-probability = logit - shift
  std::int64_t rank;
  std::int64_t num_best;  // that were found
};

struct Kernels {
  const char* name;
  std::int32_t panel;  // outputs in a panel
  bool pairs;          // bf16 products: bf16 weights are packed in pairs and multiplied with bf16 inputs

  // Packs outputs panel * p .. of a row-major source (f32, or bf16 bits) [rows, cols] into one panel at `out`. With
  // `gated`, `source` stacks gate and up, [2 * n, cols], and a panel holds panel / 2 of each, so that an output and what
  // gates it meet in one panel; rounded to `type` on the way.
  void (*pack)(const void* source, DType source_type, std::int64_t rows, std::int64_t cols, bool gated,
               std::int64_t panel_index, DType type, void* out);
  // Output row `row` of the matrix times `scale` as f32: an embedding from the packed form. `out` has cols elements.
  void (*gather)(const PackedMatrix& weight, std::int64_t row, float scale, float* out);
  // Rows begin..end of the outputs of panels first..last.
  void (*linear)(const LinearArgs& args, std::int64_t first_panel, std::int64_t last_panel, std::int64_t begin,
                 std::int64_t end, Scratch scratch);

  // x / sqrt(mean(x^2) + eps) * weight of one row of `size` floats, to `type`; out may be x where type is f32.
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t size, void* out, DType type);
  // x += rms_norm(y)
  void (*add_rms_norm)(float* x, const float* y, const float* weight, float eps, std::int64_t size);
  // out = parts[0] + parts[1] + ... in this order, `size` floats; with `adds`, out += that sum.
  void (*sum_rows)(const float* const* parts, std::int32_t num_parts, std::int64_t size, bool adds, float* out);
  // A row of `size` floats rounded to bfloat16.
  void (*convert)(const float* x, std::int64_t size, bf16* out);
  // One row at `position`, whose keys and values go to `slot`: token slot % block_size of block slot / block_size.
  void (*rope)(const RopeArgs& args, std::int64_t row, std::int64_t position, std::int64_t slot);

  // All keys of a span for one kv head, complete results.
  void (*attention)(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, Scratch scratch);
  // Keys of one split only (positions split * split_keys ..): a partial result, `partial_size(args)` floats for each
  // query and head of the group, that `merge_splits` makes whole. The same bits as `attention`.
  void (*attention_split)(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head,
                          std::int32_t split, float* partial, Scratch scratch);
  void (*merge_splits)(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head,
                       std::int32_t num_splits, const float* partials, Scratch scratch);
  std::int32_t split_keys;  // keys of a split; a multiple of the tile
  std::int64_t (*partial_size)(const AttentionArgs& args);
  std::size_t (*attention_scratch)(const AttentionArgs& args, std::int32_t num_queries);
  std::int32_t query_block;  // queries of a prompt that are best handed in together

  // `mask`: a bit for each id that may be drawn, the lowest first, in words that reach to `count`; nullptr: any may.
  SampleResult (*sample)(const float* logits, std::int64_t count, const SampleParams& params, const std::uint32_t* mask,
                         Scratch scratch);
  std::size_t (*sample_scratch)(std::int64_t count);
  LogprobResult (*logprobs)(const LogprobArgs& args, Scratch scratch);
  // The sampler's 32-bit words of these token ids.
  void (*random_words)(std::uint64_t seed, std::uint64_t position, const std::int64_t* ids, std::int64_t count,
                       std::uint32_t* out);
  void (*exp)(const float* x, std::int64_t count, float* out);  // out may be x

  // Reads `bytes` at `data` once, as fast as it can: the sum keeps the compiler honest. For benchmarks.
  std::uint64_t (*read)(const void* data, std::size_t bytes);
  // A checksum whose value does not depend on the instruction set, at the speed of memory.
  std::uint64_t (*checksum)(const void* data, std::size_t bytes, std::uint64_t seed);
  // The inner loop of `linear` for weights of `type`, `times` times on what the first-level cache holds: how many
  // floating-point operations that were. For benchmarks.
  double (*multiply)(DType type, std::int64_t times);
};

// The table of an instruction set: "portable", "avx2", "avx512", "avx512_bf16". Raises std::invalid_argument for an
// unknown name, or one that this processor or build does not have.
const Kernels& kernels_for(const std::string& name);
// Names that run here, best first.
const char* const* supported_isas(int* count);

}  // namespace evensong
