// What the files of one build of the kernels offer to table.cpp.
#pragma once

#include "vec.h"

namespace evensong {
namespace EV_ISA {

// pack.cpp, linear.cpp
void pack(const void* source, DType source_type, std::int64_t rows, std::int64_t cols, bool gated,
          std::int64_t panel_index, DType type, void* out);
void gather(const PackedMatrix& weight, std::int64_t row, float scale, float* out);
void linear(const LinearArgs& args, std::int64_t first_panel, std::int64_t last_panel, std::int64_t begin,
            std::int64_t end, Scratch scratch);
double multiply(DType type, std::int64_t times);

// rows.cpp
void rms_norm(const float* x, const float* weight, float eps, std::int64_t size, void* out, DType type);
void add_rms_norm(float* x, const float* y, const float* weight, float eps, std::int64_t size);
void sum_rows(const float* const* parts, std::int32_t num_parts, std::int64_t size, bool adds, float* out);
void convert(const float* x, std::int64_t size, bf16* out);
void rope(const RopeArgs& args, std::int64_t row, std::int64_t position, std::int64_t slot);

// attention.cpp
constexpr int kSplitKeys = 1024;
constexpr int kQueryBlock = 32;
void attention(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, Scratch scratch);
void attention_split(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, std::int32_t split,
                     float* partial, Scratch scratch);
void merge_splits(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, std::int32_t num_splits,
                  const float* partials, Scratch scratch);
std::int64_t partial_size(const AttentionArgs& args);
std::size_t attention_scratch(const AttentionArgs& args, std::int32_t num_queries);

// sampling.cpp
SampleResult sample(const float* logits, std::int64_t count, const SampleParams& params, const std::uint32_t* mask,
                    Scratch scratch);
std::size_t sample_scratch(std::int64_t count);
LogprobResult logprobs(const LogprobArgs& args, Scratch scratch);
void random_words(std::uint64_t seed, std::uint64_t position, const std::int64_t* ids, std::int64_t count,
                  std::uint32_t* out);
void exp_row(const float* x, std::int64_t count, float* out);

// memory.cpp of this folder
std::uint64_t read(const void* data, std::size_t bytes);
std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed);

}  // namespace EV_ISA
}  // namespace evensong
