// Norms and rotary embedding: what happens to one row at a time.
//
// Elementwise parts are plain loops: each operation is rounded by itself (no contraction, see CMakeLists.txt), so code
// for vectors and for what is left of them agrees. Sums run over fixed lanes, the rest of a row padded with zeros.
#include "../cache_layout.h"
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
  convert(x, count, static_cast<bf16*>(out) + index);
}

// The first rotary_dim components of a head; component i is paired with i + rotary_dim / 2. Su et al., RoFormer, 2021.
void rotate(const RopeArgs& args, const float* head, std::int64_t position, float* out) {
  const int half = args.rotary_dim / 2;
  const float* cos = args.cos + position * half;
  const float* sin = args.sin + position * half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec first = load(head + i), second = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    out[i] = head[i] * cos[i] - head[half + i] * sin[i];
    out[half + i] = head[half + i] * cos[i] + head[i] * sin[i];
  }
  for (i = args.rotary_dim; i < args.head_dim; ++i) out[i] = head[i];
}

// Where a slot's keys and values go. Divisions are slow, so this is found once for all heads.
struct Place {
  std::int64_t first;   // element of the cache at which the keys of head 0 (grouped: of its group) begin
  std::int64_t stride;  // from there to the next head
  std::int64_t values;  // from a head's keys (grouped: its group's) to its values
  int token;            // of the group
  bool grouped, paired;
};

Place find_place(const RopeArgs& args, std::int64_t slot) {
  Place place = {};
  const std::int64_t dim = args.head_dim, row_width = 2 * args.num_kv_heads * dim;
  place.grouped = cache_is_grouped(args.block_size, args.head_dim);
  if (!place.grouped) {
    place.first = slot * row_width;
    place.stride = dim;
    place.values = args.num_kv_heads * dim;
    return place;
  }
#if defined(EV_AVX512_BF16)
  place.paired = args.cache_type == DType::bf16;
#endif
  const std::int64_t block = slot / args.block_size;
  const int in_block = static_cast<int>(slot - block * args.block_size);
  place.first = block * args.block_size * row_width +
                group_begin(args.block_size, args.head_dim, 0, in_block / kGroupTokens);
  place.stride = group_begin(args.block_size, args.head_dim, 1, 0);
  place.values = kGroupTokens * dim;
  place.token = in_block % kGroupTokens;
  return place;
}

// `count` elements, `stride` elements apart.
template <typename T>
void scatter(const T* x, int count, T* out, int stride) {
  for (int i = 0; i < count; ++i) out[i * stride] = x[i];
}

// Asks for the lines that a grouped slot's keys and values are spread over, to be written.
__attribute__((always_inline)) inline void prefetch_place(const RopeArgs& args, const Place& place) {
  if (!place.grouped) return;
  const std::int64_t element = args.cache_type == DType::f32 ? 4 : 2;
  const std::int64_t key_bytes = kGroupTokens * element * args.head_dim;
  const std::int64_t row_bytes = args.head_dim * element * (place.paired ? 2 : 1);
  const char* keys = static_cast<const char*>(args.cache) + place.first * element;
  for (int i = 0; i < args.num_kv_heads; ++i, keys += place.stride * element) {
    for (std::int64_t at = 0; at < key_bytes; at += 64) __builtin_prefetch(keys + at, 1, 3);
    const char* row = keys + key_bytes + place.token / (place.paired ? 2 : 1) * row_bytes;
    for (std::int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(row + at, 1, 3);
  }
}

void store_key(const RopeArgs& args, const Place& place, int kv_head, const float* key) {
  const int dim = args.head_dim;
  std::int64_t at = place.first + kv_head * place.stride;
  if (!place.grouped) return store_as(args.cache_type, args.cache, at, key, dim);
  at += key_element(place.paired, place.token, 0);
  if (args.cache_type == DType::f32) return scatter(key, dim, static_cast<float*>(args.cache) + at, kGroupTokens);
  alignas(64) bf16 narrow[kMaxHeadDim];
  convert(key, dim, narrow);
  bf16* out = static_cast<bf16*>(args.cache) + at;
  if (!place.paired) return scatter(narrow, dim, out, kGroupTokens);
  for (int d = 0; d < dim; d += 2) std::memcpy(out + d * kGroupTokens, narrow + d, 4);
}

void store_value(const RopeArgs& args, const Place& place, int kv_head, const float* value) {
  const int dim = args.head_dim;
  std::int64_t at = place.first + kv_head * place.stride + place.values;
  if (place.grouped) at += value_element(place.paired, dim, place.token, 0);
  if (!place.paired) return store_as(args.cache_type, args.cache, at, value, dim);
#if defined(EV_AVX512_BF16)
  // `out` is this token's half of the first word. The other halves belong to another token, whose row another thread
  // may be writing just now: they must not be read and written back.
  bf16* out = static_cast<bf16*>(args.cache) + at;
  for (int d = 0; d < dim; d += kLanes) {
    alignas(32) bf16 narrow[kLanes];
    store_bf16(narrow, load(value + d));
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(narrow)));
    _mm512_mask_storeu_epi16(out + 2 * d, 0x55555555u, words);
  }
#endif
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

void sum_rows(const float* const* parts, std::int32_t num_parts, std::int64_t size, bool adds, float* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Vec sum = load(parts[0] + i);
    for (int part = 1; part < num_parts; ++part) sum = sum + load(parts[part] + i);
    store(out + i, adds ? load(out + i) + sum : sum);
  }
  for (; i < size; ++i) {
    float sum = parts[0][i];
    for (int part = 1; part < num_parts; ++part) sum += parts[part][i];
    out[i] = adds ? out[i] + sum : sum;
  }
}

void rope(const RopeArgs& args, std::int64_t row, std::int64_t position, std::int64_t slot) {
  const int dim = args.head_dim;
  const Place place = find_place(args, slot);
  prefetch_place(args, place);
  const float* head = args.qkv + row * args.qkv_stride;
  alignas(64) float normed[kMaxHeadDim], rotated[kMaxHeadDim];
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
      store_key(args, place, i - args.num_heads, rotated);
  }
  for (int i = 0; i < args.num_kv_heads; ++i, head += dim) store_value(args, place, i, head);
}

void convert(const float* x, std::int64_t size, bf16* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_bf16(out + i, load(x + i));
  for (; i < size; ++i) out[i] = round_bf16(x[i]);
}

}  // namespace EV_ISA
}  // namespace evensong
