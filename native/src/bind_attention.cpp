// Direct access to the kernels of attention.cpp and rows.cpp, for tests and benchmarks. Checks everything that a kernel
// takes for granted.
#include <optional>
#include <tuple>

#include "bindings.h"
#include "cache_layout.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

namespace nb = nanobind;

namespace evensong {
namespace {

using Floats = Array<const float, nb::ndim<2>>;
using Weights = Array<const float, nb::ndim<1>>;
using Any = Array<nb::ro>;
using Integers = Array<const std::int64_t, nb::ndim<1>>;
using Blocks = Array<const std::int32_t, nb::ndim<1>>;
// first row, number of queries, first position, block table
using Span = std::tuple<std::int64_t, std::int32_t, std::int32_t, Blocks>;

constexpr std::int32_t kMaxHeadDim = 256;

std::size_t at(std::int64_t value) { return static_cast<std::size_t>(value); }

// A new NumPy array [rows, columns] of `type`, and where its elements lie.
nb::object new_array(std::int64_t rows, std::int64_t columns, DType type, void** data) {
  const auto keep = [data](auto array) {
    *data = array.data();
    return nb::cast(array);
  };
  if (type == DType::f32) return keep(make_array<float>({at(rows), at(columns)}));
  return keep(make_array<std::uint16_t>({at(rows), at(columns)}));
}

std::int64_t extent(const Floats& array, std::size_t axis) { return static_cast<std::int64_t>(array.shape(axis)); }

nb::object rms_norm(const Floats& x, const Weights& weight, float eps, const std::string& isa,
                    const std::string& dtype) {
  const Kernels& kernels = kernels_for(isa);
  const DType type = dtype_named(dtype);
  const std::int64_t rows = extent(x, 0), size = extent(x, 1);
  check(size > 0 && weight.shape(0) == x.shape(1), "weight must have as many elements as a row");
  void* out = nullptr;
  nb::object result = new_array(rows, size, type, &out);
  nb::gil_scoped_release release;
  for (std::int64_t row = 0; row < rows; ++row)
    kernels.rms_norm(x.data() + row * size, weight.data(), eps, size,
                     static_cast<char*>(out) + at(row * size) * size_of(type), type);
  return result;
}

nb::object add_rms_norm(const Floats& x, const Floats& y, const Weights& weight, float eps, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const std::int64_t rows = extent(x, 0), size = extent(x, 1);
  check(size > 0 && extent(y, 0) == rows && extent(y, 1) == size, "x and y must have the same shape");
  check(weight.shape(0) == x.shape(1), "weight must have as many elements as a row");
  void* out = nullptr;
  nb::object result = new_array(rows, size, DType::f32, &out);
  nb::gil_scoped_release release;
  std::copy(x.data(), x.data() + rows * size, static_cast<float*>(out));
  for (std::int64_t row = 0; row < rows; ++row)
    kernels.add_rms_norm(static_cast<float*>(out) + row * size, y.data() + row * size, weight.data(), eps, size);
  return result;
}

void check_heads(std::int32_t num_heads, std::int32_t num_kv_heads, std::int32_t head_dim) {
  check(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 && num_heads <= 65536,
        "num_heads must be a multiple of num_kv_heads");
  check(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % 2 == 0, "head_dim must be even and at most 256");
}

template <typename A>
std::int64_t check_cache(const A& cache, std::int32_t num_kv_heads, std::int32_t head_dim) {
  check(cache.ndim() == 2 && cache.shape(1) == at(2) * at(num_kv_heads) * at(head_dim),
        "cache must be [num_slots, 2 * num_kv_heads * head_dim]");
  return static_cast<std::int64_t>(cache.shape(0));
}

nb::object rope(const Floats& qkv, const Integers& positions, const Integers& slots, const Floats& cos,
                const Floats& sin, const Array<nb::numpy>& cache, std::int32_t num_heads, std::int32_t num_kv_heads,
                std::int32_t head_dim, std::int32_t block_size, const std::string& isa, const std::string& query_dtype,
                const std::optional<Floats>& qk_norm, float eps) {
  const Kernels& kernels = kernels_for(isa);
  check_heads(num_heads, num_kv_heads, head_dim);
  const std::int64_t rows = extent(qkv, 0), num_slots = check_cache(cache, num_kv_heads, head_dim);
  check(block_size > 0 && num_slots % block_size == 0, "the cache must hold whole blocks");
  check(extent(qkv, 1) == (num_heads + 2 * num_kv_heads) * std::int64_t{head_dim}, "qkv must hold all heads");
  check(positions.shape(0) == qkv.shape(0) && slots.shape(0) == qkv.shape(0), "every row needs a position and a slot");
  check(extent(sin, 0) == extent(cos, 0) && extent(sin, 1) == extent(cos, 1), "cos and sin must have the same shape");
  check(2 * extent(cos, 1) <= head_dim, "rotary_dim must be at most head_dim");
  if (qk_norm)
    check(extent(*qk_norm, 0) == num_heads + num_kv_heads && extent(*qk_norm, 1) == head_dim,
          "qk_norm must be [num_heads + num_kv_heads, head_dim]");
  for (std::int64_t row = 0; row < rows; ++row) {
    check(positions.data()[row] >= 0 && positions.data()[row] < extent(cos, 0), "a position has no cos and sin");
    check(slots.data()[row] >= 0 && slots.data()[row] < num_slots, "a slot is outside the cache");
  }
  RopeArgs args = {};
  args.qkv = qkv.data();
  args.qkv_stride = extent(qkv, 1);
  args.qk_norm = qk_norm ? qk_norm->data() : nullptr;
  args.eps = eps;
  args.cos = cos.data();
  args.sin = sin.data();
  args.rotary_dim = static_cast<std::int32_t>(2 * extent(cos, 1));
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.query_stride = std::int64_t{num_heads} * head_dim;
  args.query_type = dtype_named(query_dtype);
  args.cache = cache.data();
  args.cache_type = dtype_of(cache, "cache must be float32, or bfloat16 as uint16");
  args.block_size = block_size;
  nb::object result = new_array(rows, args.query_stride, args.query_type, &args.query);
  nb::gil_scoped_release release;
  for (std::int64_t row = 0; row < rows; ++row) kernels.rope(args, row, positions.data()[row], slots.data()[row]);
  return result;
}

// The element of its block at which each component of each token lies, [block_size, 2 * num_kv_heads * head_dim]: keys
// of all heads, then their values.
nb::object cache_places(std::int32_t block_size, std::int32_t num_kv_heads, std::int32_t head_dim,
                        const std::string& isa, const std::string& dtype) {
  check_heads(num_kv_heads, num_kv_heads, head_dim);
  check(block_size > 0, "block_size must be positive");
  const bool pairs = kernels_for(isa).pairs && dtype_named(dtype) == DType::bf16;
  const std::int32_t half = num_kv_heads * head_dim;
  auto places = make_array<std::int64_t>({at(block_size), at(2 * half)});
  std::int64_t* place = places.data();
  for (std::int32_t token = 0; token < block_size; ++token) {
    for (std::int32_t i = 0; i < 2 * half; ++i, ++place) {
      *place = std::int64_t{token} * 2 * half + i;
      if (!cache_is_grouped(block_size, head_dim)) continue;
      const std::int32_t head = i % half / head_dim, d = i % head_dim, in_group = token % kGroupTokens;
      *place = group_begin(block_size, head_dim, head, token / kGroupTokens) +
               (i < half ? key_element(pairs, in_group, d)
                         : kGroupTokens * head_dim + value_element(pairs, head_dim, in_group, d));
    }
  }
  return nb::cast(places);
}

// Blocks that the span's queries see must lie in the cache as a whole; the table's other entries may be anything.
AttentionSpan checked_span(const Span& span, const AttentionArgs& args, std::int64_t num_rows, std::int64_t num_slots) {
  const auto& [first_row, num_queries, first_position, blocks] = span;
  check(num_queries > 0 && first_row >= 0 && first_row + num_queries <= num_rows, "a span's rows must be query rows");
  check(first_position >= 0 && first_position <= (1 << 30) && num_queries <= (1 << 20), "a span's positions are wrong");
  const std::int64_t last = std::int64_t{first_position} + num_queries - 1;
  check(last / args.block_size < static_cast<std::int64_t>(blocks.shape(0)), "a span's block table is too short");
  const std::int32_t first_key =
      args.window > 0 && args.window <= first_position ? first_position - args.window + 1 : 0;
  for (std::int64_t block = first_key / args.block_size; block <= last / args.block_size; ++block) {
    const std::int64_t id = blocks.data()[block];
    check(id >= 0 && (id + 1) * args.block_size <= num_slots, "a block is outside the cache");
  }
  return {first_row, num_queries, first_position, blocks.data()};
}

void run_span(const Kernels& kernels, const AttentionArgs& args, const AttentionSpan& span, bool splits,
              Scratch scratch) {
  const std::int32_t num_splits = (span.first_position + span.num_queries - 1) / kernels.split_keys + 1;
  const std::int64_t size =
      kernels.partial_size(args) * span.num_queries * (args.num_heads / args.num_kv_heads);
  const Memory partials(splits ? at(size * num_splits) * 4 : 0);
  float* partial = reinterpret_cast<float*>(partials.data());
  for (std::int32_t head = 0; head < args.num_kv_heads; ++head) {
    if (!splits) {
      kernels.attention(args, span, head, scratch);
      continue;
    }
    for (std::int32_t split = num_splits - 1; split >= 0; --split)
      kernels.attention_split(args, span, head, split, partial + split * size, scratch);
    kernels.merge_splits(args, span, head, num_splits, partial, scratch);
  }
}

nb::object attention(const Any& query, const Any& cache, const std::vector<Span>& spans, std::int32_t num_heads,
                     std::int32_t num_kv_heads, std::int32_t head_dim, std::int32_t block_size, float scale,
                     const std::string& isa, std::int32_t window, float soft_cap, bool splits) {
  const Kernels& kernels = kernels_for(isa);
  check_heads(num_heads, num_kv_heads, head_dim);
  check(block_size > 0, "block_size must be positive");
  check(scale > 0.0f && soft_cap >= 0.0f && window >= 0, "scale must be positive, soft_cap and window not negative");
  const std::int64_t num_slots = check_cache(cache, num_kv_heads, head_dim);
  AttentionArgs args = {};
  args.compute = dtype_of(query, "query must be float32, or bfloat16 as uint16");
  args.cache_type = dtype_of(cache, "cache must be float32, or bfloat16 as uint16");
  check(args.compute == DType::f32 || (kernels.pairs && args.cache_type == DType::bf16),
        "bfloat16 queries need an instruction set with bfloat16 products and a bfloat16 cache");
  args.query_stride = args.out_stride = std::int64_t{num_heads} * head_dim;
  check(query.ndim() == 2 && query.shape(1) == at(args.query_stride), "query must be [num_rows, num_heads * head_dim]");
  args.query = query.data();
  args.cache = cache.data();
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.block_size = block_size;
  args.window = window;
  args.scale = scale;
  args.soft_cap = soft_cap;
  const auto num_rows = static_cast<std::int64_t>(query.shape(0));
  std::vector<AttentionSpan> checked;
  std::int32_t most = 1;
  for (const Span& span : spans) {
    checked.push_back(checked_span(span, args, num_rows, num_slots));
    most = std::max(most, checked.back().num_queries);
  }
  nb::object result = new_array(num_rows, args.out_stride, args.compute, &args.out);
  nb::gil_scoped_release release;
  const Memory memory(kernels.attention_scratch(args, most));
  for (const AttentionSpan& span : checked) run_span(kernels, args, span, splits, {memory.data(), memory.size()});
  return result;
}

}  // namespace

void bind_attention(nb::module_& m) {
  using namespace nb::literals;
  m.def("rms_norm", rms_norm, "x"_a, "weight"_a, "eps"_a, "isa"_a, "dtype"_a);
  m.def("add_rms_norm", add_rms_norm, "x"_a, "y"_a, "weight"_a, "eps"_a, "isa"_a);
  m.def("rope", rope, "qkv"_a, "positions"_a, "slots"_a, "cos"_a, "sin"_a, "cache"_a, "num_heads"_a, "num_kv_heads"_a,
        "head_dim"_a, "block_size"_a, "isa"_a, "query_dtype"_a, "qk_norm"_a.none() = nb::none(), "eps"_a = 0.0f);
  m.def("cache_places", cache_places, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "isa"_a, "dtype"_a);
  m.def("attention", attention, "query"_a, "cache"_a, "spans"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
        "block_size"_a, "scale"_a, "isa"_a, "window"_a = 0, "soft_cap"_a = 0.0f, "splits"_a = false);
}

}  // namespace evensong
