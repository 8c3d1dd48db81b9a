// The linear kernels one by one, for tests and benchmarks, and packing. Sizes and types are checked here.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>

#include "bindings.h"
#include "packed.h"

namespace nb = nanobind;

namespace evensong {

namespace {

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
constexpr std::size_t kScratchBytes = 64 << 10;
constexpr std::int64_t kInputPadding = 64;

bool is_gated(Epilogue epilogue) { return epilogue == Epilogue::silu || epilogue == Epilogue::gelu_tanh; }

std::int64_t size_at(const Input& array, std::size_t axis) { return static_cast<std::int64_t>(array.shape(axis)); }

void check_sizes(std::int64_t rows, std::int64_t cols, bool gated) {
  check(rows > 0 && cols > 0 && rows < kMaxSize && cols < kMaxSize, "rows and cols must be positive and below 2^31");
  check(!gated || rows % 2 == 0, "a gated weight stacks gate and up: its rows must be even");
}

// Checks first <= last <= count, where a negative `last` stands for `count`.
std::int64_t range_end(std::int64_t first, std::int64_t last, std::int64_t count, const char* what) {
  const std::int64_t end = last < 0 ? count : last;
  check(first >= 0 && first <= end && end <= count, what);
  return end;
}

void pack_into(const Input& weight, const std::string& isa, const std::string& dtype, bool gated, const Output& out,
               std::int64_t first_panel, std::int64_t last_panel) {
  const Kernels& kernels = kernels_for(isa);
  const DType type = dtype_named(dtype);
  check(weight.ndim() == 2, "weight must be [rows, cols]");
  const DType source = dtype_of(weight, "weight must be float32, or uint16 with the bits of bfloat16");
  const std::int64_t rows = size_at(weight, 0), cols = size_at(weight, 1);
  check_sizes(rows, cols, gated);
  const std::int64_t end = range_end(first_panel, last_panel, num_panels(kernels, rows, gated), "no such panels");
  const std::size_t stride = panel_bytes(kernels, cols, type);
  check(out.nbytes() == static_cast<std::size_t>(end - first_panel) * stride, "out has not the size of these panels");
  char* data = static_cast<char*>(out.data());
  check(reinterpret_cast<std::uintptr_t>(data) % 4 == 0, "out must be aligned to 4 bytes");
  nb::gil_scoped_release release;
  for (std::int64_t panel = first_panel; panel < end; ++panel, data += stride)
    kernels.pack(weight.data(), source, rows, cols, gated, panel, type, data);
}

std::size_t packed_size(std::int64_t rows, std::int64_t cols, const std::string& isa, const std::string& dtype,
                        bool gated) {
  check_sizes(rows, cols, gated);
  return packed_bytes(kernels_for(isa), rows, cols, dtype_named(dtype), gated);
}

Result<std::uint8_t> pack(const Input& weight, const std::string& isa, const std::string& dtype, bool gated) {
  check(weight.ndim() == 2, "weight must be [rows, cols]");
  auto out = make_array<std::uint8_t>({packed_size(size_at(weight, 0), size_at(weight, 1), isa, dtype, gated)});
  pack_into(weight, isa, dtype, gated, Output(out), 0, -1);
  return out;
}

Result<float> pack_bias(const Input& bias, const std::string& isa, bool gated) {
  check(bias.ndim() == 1 && bias.dtype() == nb::dtype<float>(), "bias must be float32 [rows]");
  check_sizes(size_at(bias, 0), 1, gated);
  auto order = packed_bias(kernels_for(isa), static_cast<const float*>(bias.data()), size_at(bias, 0), gated);
  const std::size_t size = order.size();
  return make_array(std::move(order), {size});
}

PackedMatrix matrix_of(const Kernels& kernels, const Input& packed, std::int64_t rows, std::int64_t cols, DType type,
                       bool gated) {
  check_sizes(rows, cols, gated);
  check(packed.nbytes() == packed_bytes(kernels, rows, cols, type, gated), "packed has not the size of this weight");
  return {packed.data(), type, rows, cols};
}

Result<float> gather(const Input& packed, std::int64_t rows, std::int64_t cols, const std::string& isa,
                     const std::string& dtype, const Input& token_ids, float scale) {
  const Kernels& kernels = kernels_for(isa);
  const PackedMatrix weight = matrix_of(kernels, packed, rows, cols, dtype_named(dtype), false);
  check(token_ids.ndim() == 1 && token_ids.dtype() == nb::dtype<std::int64_t>(),
        "token_ids must be int64 [num_tokens]");
  const auto* ids = static_cast<const std::int64_t*>(token_ids.data());
  const std::size_t count = token_ids.shape(0);
  for (std::size_t i = 0; i < count; ++i) check(ids[i] >= 0 && ids[i] < rows, "a token id is out of range");
  auto out = make_array<float>({count, static_cast<std::size_t>(cols)});
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < count; ++i)
    kernels.gather(weight, ids[i], scale, out.data() + i * static_cast<std::size_t>(cols));
  return out;
}

float widened(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

std::uint16_t rounded(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// x [num_rows, cols] as the kernels want it: in their type, padded with zeros, then with NaN that must never be seen.
struct Inputs {
  Memory memory;
  std::int64_t stride;

  Inputs(const Input& x, DType type) : stride(round_up(size_at(x, 1), 2) + kInputPadding) {
    const DType source = dtype_of(x, "x must be float32, or uint16 with the bits of bfloat16");
    const std::int64_t rows = size_at(x, 0), cols = size_at(x, 1);
    memory = Memory(static_cast<std::size_t>(rows * stride + 1) * size_of(type));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t col = 0; col < stride; ++col) {
        float value = col < round_up(cols, 2) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        const std::int64_t from = row * cols + col, to = row * stride + col;
        if (col < cols)
          value = source == DType::f32 ? static_cast<const float*>(x.data())[from]
                                       : widened(static_cast<const std::uint16_t*>(x.data())[from]);
        if (type == DType::f32)
          reinterpret_cast<float*>(memory.data())[to] = value;
        else
          reinterpret_cast<std::uint16_t*>(memory.data())[to] = rounded(value);
      }
    }
  }
};

DType input_type(const Kernels& kernels, DType weight) {
  return kernels.pairs && weight == DType::bf16 ? DType::bf16 : DType::f32;
}

nb::object linear(const Input& packed, std::int64_t rows, std::int64_t cols, const std::string& isa,
                  const std::string& dtype, const Input& x, const std::optional<Input>& bias,
                  const std::string& epilogue, const std::string& out_dtype, const std::optional<Output>& out,
                  std::int64_t first_panel, std::int64_t last_panel, std::int64_t first_row, std::int64_t last_row,
                  std::int64_t num_columns) {
  const Kernels& kernels = kernels_for(isa);
  LinearArgs args{};
  args.epilogue = epilogue_named(epilogue);
  const bool gated = is_gated(args.epilogue), argmax = args.epilogue == Epilogue::argmax;
  args.weight = matrix_of(kernels, packed, rows, cols, dtype_named(dtype), gated);
  check(x.ndim() == 2 && size_at(x, 1) == cols, "x must be [num_rows, cols]");
  const std::int64_t panels = num_panels(kernels, rows, gated);
  last_panel = range_end(first_panel, last_panel, panels, "no such panels");
  last_row = range_end(first_row, last_row, size_at(x, 0), "no such rows");
  args.num_columns = num_columns < 0 ? rows : num_columns;
  check(args.num_columns <= rows, "num_columns must not exceed rows");
  std::vector<float> packed_order;
  if (bias) {
    check(bias->ndim() == 1 && bias->dtype() == nb::dtype<float>() && size_at(*bias, 0) == rows,
          "bias must be float32 [rows]");
    packed_order = packed_bias(kernels, static_cast<const float*>(bias->data()), rows, gated);
    args.bias = packed_order.data();
  }
  const Inputs inputs(x, input_type(kernels, args.weight.type));
  args.in = inputs.memory.data();
  args.in_stride = inputs.stride;
  const Memory scratch(kScratchBytes);
  const auto run = [&] {
    nb::gil_scoped_release release;
    kernels.linear(args, first_panel, last_panel, first_row, last_row, {scratch.data(), scratch.size()});
  };
  const std::size_t num_rows = x.shape(0);
  if (argmax) {
    check(!out, "argmax has no out");
    auto best = make_array<float>({num_rows, static_cast<std::size_t>(panels)});
    auto index = make_array<std::int32_t>({num_rows, static_cast<std::size_t>(panels)});
    args.best = best.data();
    args.best_index = index.data();
    run();
    return nb::make_tuple(best, index);
  }
  args.out_type = dtype_named(out_dtype);
  check(args.epilogue != Epilogue::add || (out && args.out_type == DType::f32), "add needs an out, in float32");
  const auto width = static_cast<std::size_t>(gated ? rows / 2 : rows);
  const auto run_into = [&](auto array) {
    args.out = array.data();
    args.out_stride = static_cast<std::int64_t>(array.shape(1));
    run();
    return nb::cast(array);
  };
  if (!out) {
    if (args.out_type == DType::f32) return run_into(make_array<float>({num_rows, width}));
    return run_into(make_array<std::uint16_t>({num_rows, width}));
  }
  check(out->ndim() == 2 && out->shape(0) == num_rows && out->shape(1) >= width, "out must be [num_rows, >= outputs]");
  check(dtype_of(*out, "out must be float32 or uint16") == args.out_type, "out has not the type of out_dtype");
  return run_into(*out);
}

std::uint64_t checksum(const Input& data, std::uint64_t seed, const std::optional<std::string>& isa) {
  int count = 0;
  const Kernels& kernels = kernels_for(isa ? *isa : supported_isas(&count)[0]);
  nb::gil_scoped_release release;
  return kernels.checksum(data.data(), data.nbytes(), seed);
}

std::uint64_t read_bytes(const Input& data, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  nb::gil_scoped_release release;
  return kernels.read(data.data(), data.nbytes());
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double measure_gemm_peak(const std::string& isa, const std::string& dtype, double limit) {
  const Kernels& kernels = kernels_for(isa);
  const DType type = dtype_named(dtype);
  check(limit > 0 && limit < 60, "seconds must be positive and below 60");
  nb::gil_scoped_release release;
  double best = 0;
  for (const double begin = seconds(); seconds() - begin < limit;) {
    const double start = seconds();
    const double operations = kernels.multiply(type, 2000);
    best = std::max(best, operations / (seconds() - start));
  }
  return best;
}

using Product = std::tuple<Input, std::int64_t, std::int64_t, std::string>;  // packed, rows, cols, epilogue

// All products in turn, `repeats` times over, for one of `num_parts` shares of the panels.
void run_linears(const std::vector<Product>& products, const std::string& isa, const std::string& dtype,
                 std::int64_t num_rows, std::int64_t part, std::int64_t num_parts, std::int64_t repeats) {
  const Kernels& kernels = kernels_for(isa);
  const DType type = dtype_named(dtype), in_type = input_type(kernels, type);
  check(num_rows > 0 && num_rows <= 65536 && num_parts > 0 && part >= 0 && part < num_parts, "bad part of the rows");
  std::vector<LinearArgs> all;
  std::int64_t most_rows = 0, most_cols = 0, most_panels = 0;
  for (const auto& [packed, rows, cols, epilogue] : products) {
    LinearArgs args{};
    args.epilogue = epilogue_named(epilogue);
    args.weight = matrix_of(kernels, packed, rows, cols, type, is_gated(args.epilogue));
    args.in_stride = round_up(cols, 2) + 32;
    args.out_type = is_gated(args.epilogue) ? in_type : DType::f32;
    args.out_stride = is_gated(args.epilogue) ? rows / 2 : rows;
    args.num_columns = rows;
    if (args.epilogue != Epilogue::argmax) most_rows = std::max(most_rows, rows);
    most_cols = std::max(most_cols, args.in_stride);
    most_panels = std::max(most_panels, num_panels(kernels, rows, is_gated(args.epilogue)));
    all.push_back(args);
  }
  const auto floats = [&](std::int64_t width) { return Memory(static_cast<std::size_t>(num_rows * width + 64) * 4); };
  const Memory in = floats(most_cols), out = floats(most_rows), best = floats(most_panels), index = floats(most_panels);
  const Memory scratch(kScratchBytes);
  nb::gil_scoped_release release;
  for (std::int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (LinearArgs& args : all) {
      args.in = in.data();
      args.out = out.data();
      args.best = reinterpret_cast<float*>(best.data());
      args.best_index = reinterpret_cast<std::int32_t*>(index.data());
      const std::int64_t panels = num_panels(kernels, args.weight.rows, is_gated(args.epilogue));
      kernels.linear(args, panels * part / num_parts, panels * (part + 1) / num_parts, 0, num_rows,
                     {scratch.data(), scratch.size()});
    }
  }
}

}  // namespace

void bind_linear(nb::module_& m) {
  using nb::arg;
  m.def("packed_size", packed_size, arg("rows"), arg("cols"), arg("isa"), arg("dtype"), arg("gated") = false,
        "Bytes of a packed weight [rows, cols].");
  m.def("pack", pack, arg("weight"), arg("isa"), arg("dtype"), arg("gated") = false,
        "A weight [rows, cols] (float32, or uint16 with the bits of bfloat16) in panels, as bytes.");
  m.def("pack_into", pack_into, arg("weight"), arg("isa"), arg("dtype"), arg("gated"), arg("out").noconvert(),
        arg("first_panel") = 0, arg("last_panel") = -1,
        "Packs panels first_panel..last_panel (-1: all) of a weight into `out`, which has just their size.");
  m.def("pack_bias", pack_bias, arg("bias"), arg("isa"), arg("gated") = false,
        "A bias [rows], float32, in the order of the packed weight's outputs, padded with zeros to whole panels.");
  m.def("gather", gather, arg("packed"), arg("rows"), arg("cols"), arg("isa"), arg("dtype"), arg("token_ids"),
        arg("scale") = 1.0f, "Rows of a packed weight times scale: float32 [num_tokens, cols].");
  m.def("linear", linear, arg("packed"), arg("rows"), arg("cols"), arg("isa"), arg("dtype"), arg("x"),
        arg("bias") = nb::none(), arg("epilogue") = "store", arg("out_dtype") = "float32",
        arg("out").noconvert() = nb::none(), arg("first_panel") = 0, arg("last_panel") = -1, arg("first_row") = 0,
        arg("last_row") = -1, arg("num_columns") = -1,
        "x W^T + bias and its epilogue for some panels and rows; argmax gives (best, index), [num_rows, num_panels].");
  m.def("checksum", checksum, arg("array"), arg("seed") = 0, arg("isa") = nb::none(),
        "64 bits that change with every bit of the array; the same for every instruction set.");
  m.def("read_bytes", read_bytes, arg("array"), arg("isa"), "Reads the array once: a measure of memory's speed.");
  m.def("measure_gemm_peak", measure_gemm_peak, arg("isa"), arg("dtype"), arg("seconds") = 0.2,
        "FLOP/s of one thread in the inner loop of `linear` on what the first-level cache holds.");
  m.def("run_linears", run_linears, arg("products"), arg("isa"), arg("dtype"), arg("num_rows"), arg("part") = 0,
        arg("num_parts") = 1, arg("repeats") = 1,
        "Runs (packed, rows, cols, epilogue) products on zeros: for benchmarks. Releases the GIL.");
}

}  // namespace evensong
