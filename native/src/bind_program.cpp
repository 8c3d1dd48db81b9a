// Programs, as Python sees them. Everything is checked here or in the segments' makers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <utility>

#include "bind_program.h"
#include "packed.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace evensong {

namespace {

using Floats = Array<const float>;
using Bytes = Array<const std::uint8_t>;

// A packed weight in memory that it keeps.
struct Weight {
  PackedMatrix matrix;
  std::string isa;
  nb::object owner;
};

Weight make_weight(Bytes data, std::int64_t rows, std::int64_t cols, const std::string& dtype, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const DType type = dtype_named(dtype);
  check(rows > 0 && cols > 0 && rows < (std::int64_t{1} << 40) && cols < (std::int64_t{1} << 31), "a weight of no size");
  // Gated weights have the same size.
  check(data.size() == packed_bytes(kernels, rows, cols, type, false), "a packed weight has another size than its shape says");
  check(reinterpret_cast<std::uintptr_t>(data.data()) % 64 == 0, "a packed weight is not aligned to 64 bytes");
  return {{data.data(), type, rows, cols}, isa, nb::cast(data)};
}

const PackedMatrix& matrix_for(Program& program, const Weight& weight) {
  check(weight.isa == program.kernels().name, "a weight was packed for another instruction set");
  hold(program, weight.owner);
  return weight.matrix;
}

const float* floats(Program& program, const Floats& array, std::int64_t size, const char* what) {
  check(static_cast<std::int64_t>(array.size()) == size, what);
  hold(program, nb::cast(array));
  return array.data();
}

struct Cache {
  LayerCache layer;
  nb::object owner;
};

Cache make_cache(nb::ndarray<nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<2>> array, std::int32_t num_kv_heads,
                 std::int32_t head_dim, std::int32_t group, std::optional<std::int32_t> window) {
  const DType type = dtype_of(array, "a cache holds uint16 (bfloat16) or float32");
  check(num_kv_heads > 0 && head_dim > 0 && head_dim % 2 == 0 && head_dim <= 1024 &&
            static_cast<std::int64_t>(array.shape(1)) == std::int64_t{2} * num_kv_heads * head_dim,
        "a cache's rows hold the keys of all heads and then their values");
  check(!window || *window > 0, "a window sees at least one position");
  const LayerCache layer{array.data(), type, static_cast<std::int64_t>(array.shape(0)),
                         num_kv_heads, head_dim, group, window.value_or(0)};
  return {layer, nb::cast(array)};
}

void bind_segments(nb::class_<Program>& program) {
  program.def("embedding", [](Program& p, const Weight& table, float scale, int out, std::int64_t first_row) {
    p.append(make_embedding(p, matrix_for(p, table), scale, out, first_row));
  }, "table"_a, "scale"_a, "out"_a, "first_row"_a = 0);
  program.def("norm", [](Program& p, int x, const Floats& weight, float eps, int out, bool sampled_rows) {
    const float* scales = floats(p, weight, p.buffer(x).width, "a norm's weight has another width");
    p.append(make_norm(p, x, scales, eps, out, sampled_rows));
  }, "x"_a, "weight"_a, "eps"_a, "out"_a, "sampled_rows"_a = false);
  program.def("add_norm", [](Program& p, int x, int y, const Floats& weight, float eps) {
    p.append(make_add_norm(p, x, y, floats(p, weight, p.buffer(x).width, "a norm's weight has another width"), eps));
  }, "x"_a, "y"_a, "weight"_a, "eps"_a);
  program.def("linear", [](Program& p, int x, const Weight& weight, std::optional<Floats> bias, const std::string& epilogue,
                           int out, bool sampled_rows, std::int64_t first_column) {
    const std::int64_t padded = round_up(weight.matrix.rows, p.kernels().panel);
    const float* added = bias ? floats(p, *bias, padded, "a bias is padded to whole panels") : nullptr;
    p.append(make_linear(p, matrix_for(p, weight), added, x, out, epilogue_named(epilogue), sampled_rows, first_column));
  }, "x"_a, "weight"_a, "bias"_a.none(), "epilogue"_a, "out"_a, "sampled_rows"_a = false, "first_column"_a = 0);
  program.def("rope", [](Program& p, int qkv, const Cache& cache, std::int32_t num_heads, const Floats& cos,
                         const Floats& sin, std::optional<Floats> qk_norm, float eps, int query) {
    check(cos.ndim() == 2 && sin.ndim() == 2 && cos.shape(1) == sin.shape(1), "cos and sin are tables");
    check(static_cast<std::int64_t>(cos.shape(0)) >= p.limits().max_positions && cos.shape(0) == sin.shape(0),
          "cos and sin have a row for each position");
    RopeArgs args{};
    args.cos = floats(p, cos, static_cast<std::int64_t>(cos.size()), "");
    args.sin = floats(p, sin, static_cast<std::int64_t>(sin.size()), "");
    args.rotary_dim = 2 * static_cast<std::int32_t>(cos.shape(1));
    args.num_heads = num_heads;
    const std::int64_t normed = (std::int64_t{num_heads} + cache.layer.num_kv_heads) * cache.layer.head_dim;
    if (qk_norm) args.qk_norm = floats(p, *qk_norm, normed, "QK-norm has a weight for each head that is rotated");
    args.eps = eps;
    hold(p, cache.owner);
    p.append(make_rope(p, args, cache.layer, qkv, query));
  }, "qkv"_a, "cache"_a, "num_heads"_a, "cos"_a, "sin"_a, "qk_norm"_a.none(), "eps"_a, "query"_a);
  program.def("attention", [](Program& p, int query, const Cache& cache, std::int32_t num_heads, float scale,
                              float soft_cap, int out) {
    hold(p, cache.owner);
    p.append(make_attention(p, cache.layer, num_heads, scale, soft_cap, query, out));
  }, "query"_a, "cache"_a, "num_heads"_a, "scale"_a, "soft_cap"_a, "out"_a);
  program.def("convert", [](Program& p, int x, int out) { p.append(make_convert(p, x, out)); }, "x"_a, "out"_a);
  program.def("copy_sampled", [](Program& p, int x, int out) { p.append(make_copy_sampled(p, x, out)); }, "x"_a, "out"_a);
  program.def("sampling", [](Program& p, int logits) { p.append(make_sampling(p, logits)); }, "logits"_a);
  program.def("tap", [](Program& p, const std::string& name, int x, Array<std::uint8_t> target) {
    hold(p, nb::cast(target));
    p.append(make_tap(p, name, x, reinterpret_cast<char*>(target.data()), target.size()));
  }, "name"_a, "x"_a, "target"_a);
  program.def("callback", [](Program& p, const std::string& name, nb::callable call) {
    hold(p, call);
    nb::handle function = call;
    p.append(make_callback(name, [function](std::int64_t rows) {
      nb::gil_scoped_acquire gil;
      function(rows);
    }));
  }, "name"_a, "call"_a);
}

void bind_feed(nb::class_<Program>& program) {
  program.def("feed", [](Program& p, const Array<const std::int64_t>& slots, const Array<const std::int64_t>& token_ids) {
    check(slots.size() == token_ids.size(), "a token for each slot is needed");
    for (std::size_t i = 0; i < slots.size(); ++i) {
      check(slots.data()[i] >= 0 && slots.data()[i] < p.limits().num_feed_slots, "a feed slot does not exist");
      check(token_ids.data()[i] >= 0 && token_ids.data()[i] < p.limits().vocab_size, "a token id does not exist");
    }
    for (std::size_t i = 0; i < slots.size(); ++i) p.feed().set_token(slots.data()[i], token_ids.data()[i]);
  }, "slots"_a, "token_ids"_a, "Leaves tokens for steps that name these slots; `publish` says that they are there.");
  program.def("publish", [](Program& p, std::int64_t step_id) {
    check(step_id >= 0, "only a step of a plan publishes tokens");
    p.feed().publish(step_id);
  }, "step_id"_a, "Every token that steps up to this one sampled is in the feed table.");
  program.def_prop_ro("published", [](const Program& p) { return p.feed().published(); },
                      "The step up to which every sampled token is in the feed table; -1 before the first.");
}

// Rows of a buffer as an array that shares its memory: [rows, width]. Of a part of an exchange, the one that is written
// next.
nb::object view(nb::handle self, int index, std::int64_t rows, std::int64_t bank) {
  const Buffer& buffer = nb::cast<Program&>(self).buffer(index);
  check(rows >= 0 && rows <= buffer.rows, "a buffer has fewer rows");
  check(bank >= 0 && bank < buffer.banks, "a buffer has fewer banks");
  const auto shape0 = static_cast<std::size_t>(rows), shape1 = static_cast<std::size_t>(buffer.width);
  const auto strides = {buffer.stride, std::int64_t{1}};
  if (buffer.type == DType::f32)
    return nb::cast(nb::ndarray<float, nb::numpy>(buffer.bank(bank), {shape0, shape1}, self, strides));
  return nb::cast(nb::ndarray<std::uint16_t, nb::numpy>(buffer.bank(bank), {shape0, shape1}, self, strides));
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<Weight>(m, "Weight")
      .def("__init__", [](Weight* self, Bytes data, std::int64_t rows, std::int64_t cols, const std::string& dtype,
                          const std::string& isa) { new (self) Weight(make_weight(data, rows, cols, dtype, isa)); },
           "data"_a, "rows"_a, "cols"_a, "dtype"_a, "isa"_a)
      .def_prop_ro("rows", [](const Weight& w) { return w.matrix.rows; })
      .def_prop_ro("cols", [](const Weight& w) { return w.matrix.cols; });
  nb::class_<Cache>(m, "Cache").def(
      "__init__",
      [](Cache* self, nb::ndarray<nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<2>> array,
         std::int32_t num_kv_heads, std::int32_t head_dim, std::int32_t group, std::optional<std::int32_t> window) {
        new (self) Cache(make_cache(array, num_kv_heads, head_dim, group, window));
      },
      "array"_a, "num_kv_heads"_a, "head_dim"_a, "group"_a = 0, "window"_a = nb::none());
  nb::class_<Program> program(m, "Program");
  program.def("__init__", [](Program* self, const std::string& isa, std::int64_t max_rows, std::int64_t max_samples,
                             std::int64_t max_positions, std::int64_t num_blocks, std::int32_t block_size,
                             std::int32_t num_groups, std::int64_t num_feed_slots, std::int64_t vocab_size,
                             std::int64_t num_banks, std::optional<SharedBytes> feed) {
    const ProgramLimits limits{max_rows, max_samples, max_positions, num_blocks, block_size, num_groups,
                               num_feed_slots, vocab_size, num_banks};
    if (!feed) {
      new (self) Program(kernels_for(isa), limits);
      return;
    }
    new (self) Program(kernels_for(isa), limits, reinterpret_cast<char*>(feed->data()), feed->size());
    hold(*self, nb::cast(*feed));
  }, "isa"_a, "max_rows"_a, "max_samples"_a, "max_positions"_a, "num_blocks"_a, "block_size"_a, "num_groups"_a = 1,
     "num_feed_slots"_a = 0, "vocab_size"_a, "num_banks"_a = 1, "feed"_a.noconvert() = nb::none());
  program.def_prop_ro("num_segments", &Program::num_segments);
  program.def("segment_name", [](const Program& p, std::size_t index) {
    check(index < p.num_segments(), "no such segment");
    return std::string(p.segment(index).name());
  }, "index"_a);
  program.def("buffer", [](Program& p, std::int64_t width, const std::string& dtype, bool sampled_rows) {
    return p.add_buffer(width, dtype_named(dtype), sampled_rows);
  }, "width"_a, "dtype"_a, "sampled_rows"_a = false);
  program.def("view", &view, "buffer"_a, "rows"_a, "bank"_a = 0);
  bind_feed(program);
  bind_segments(program);
  bind_links(m, program);
  m.def("isa_traits", [](const std::string& isa) {
    const Kernels& kernels = kernels_for(isa);
    return nb::make_tuple(kernels.panel, kernels.pairs);
  }, "isa"_a);
}

}  // namespace evensong
