// Norms and rotary embedding: what happens to one row at a time.
//
// Elementwise parts are plain loops: each operation is rounded by itself (no contraction, see CMakeLists.txt), so code
// for vectors and for what is left of them agrees. Sums run over fixed lanes, the rest of a row padded with zeros.
#include "ops.h"

namespace evensong {
namespace EV_ISA {
namespace {

constexpr int kSums = 4;  // vectors summed side by side, to hide the latency of an add
constexpr int kMaxHeadDim = 256;

Vec load_some(const float* p, std::int64_t count) {
  float some[kLanes] = {};
  std::memcpy(some, p, static_cast<std::size_t>(count) * 4);
  return load(some);
}

// 1 / sqrt(mean(x^2) + eps)
float inverse_rms(const float* x, float eps, std::int64_t size) {
  Vec sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums * kLanes <= size; i += kSums * kLanes) {
    for (int j = 0; j < kSums; ++j) {
      const Vec v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (int j = 0; i < size; i += kLanes, ++j) {
    const Vec v = size - i < kLanes ? load_some(x + i, size - i) : load(x + i);
    sums[j] = fma(v, v, sums[j]);
  }
  const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
}

void store_as(DType type, void* out, std::int64_t index, const float* x, std::int64_t count) {
  if (type == DType::f32) {
    std::memcpy(static_cast<float*>(out) + index, x, static_cast<std::size_t>(count) * 4);
    return;
  }
  bf16* to = static_cast<bf16*>(out) + index;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_bf16(to + i, load(x + i));
  for (; i < count; ++i) to[i] = round_bf16(x[i]);
}

// The first rotary_dim components of a head; component i is paired with i + rotary_dim / 2. Su et al., RoFormer, 2021.
void rotate(const RopeArgs& args, const float* head, std::int64_t position, float* out) {
  const int half = args.rotary_dim / 2;
  const float* cos = args.cos + position * half;
  const float* sin = args.sin + position * half;
  for (int i = 0; i < half; ++i) out[i] = head[i] * cos[i] - head[half + i] * sin[i];
  for (int i = 0; i < half; ++i) out[half + i] = head[half + i] * cos[i] + head[i] * sin[i];
  for (int i = args.rotary_dim; i < args.head_dim; ++i) out[i] = head[i];
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, std::int64_t size, void* out, DType type) {
  const float scale = inverse_rms(x, eps, size);
  if (type == DType::f32) {
    float* to = static_cast<float*>(out);
    for (std::int64_t i = 0; i < size; ++i) to[i] = x[i] * scale * weight[i];
    return;
  }
  bf16* to = static_cast<bf16*>(out);
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_bf16(to + i, load(x + i) * set1(scale) * load(weight + i));
  for (; i < size; ++i) to[i] = round_bf16(x[i] * scale * weight[i]);
}

void add_rms_norm(float* x, const float* y, const float* weight, float eps, std::int64_t size) {
  const float scale = inverse_rms(y, eps, size);
  for (std::int64_t i = 0; i < size; ++i) x[i] += y[i] * scale * weight[i];
}

void rope(const RopeArgs& args, std::int64_t row, std::int64_t position, std::int64_t slot) {
  const std::int64_t dim = args.head_dim;
  const std::int64_t row_width = 2 * args.num_kv_heads * dim;
  const float* head = args.qkv + row * args.qkv_stride;
  float normed[kMaxHeadDim], rotated[kMaxHeadDim];
  for (int i = 0; i < args.num_heads + args.num_kv_heads; ++i, head += dim) {
    const float* from = head;
    if (args.qk_norm != nullptr) {
      rms_norm(head, args.qk_norm + i * dim, args.eps, dim, normed, DType::f32);
      from = normed;
    }
    rotate(args, from, position, rotated);
    if (i < args.num_heads)
      store_as(args.query_type, args.query, row * args.query_stride + i * dim, rotated, dim);
    else
      store_as(args.cache_type, args.cache, slot * row_width + (i - args.num_heads) * dim, rotated, dim);
  }
  store_as(args.cache_type, args.cache, slot * row_width + args.num_kv_heads * dim, head, args.num_kv_heads * dim);
}

void convert(const float* x, std::int64_t size, bf16* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_bf16(out + i, load(x + i));
  for (; i < size; ++i) out[i] = round_bf16(x[i]);
}

}  // namespace EV_ISA
}  // namespace evensong
