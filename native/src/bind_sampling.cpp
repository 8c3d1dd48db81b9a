// sample, draw, logprobs, random_words and exp: rows are checked here, and the kernels trust what they are given.
#include <cmath>

#include "bindings.h"

namespace nb = nanobind;

namespace evensong {

namespace {

// A weight of 2^40 for each token of a row must fit 63 bits (kernels/select.h).
constexpr std::int64_t kMostTokens = std::int64_t{1} << 22;

using Input = nb::ndarray<nb::ro, nb::device::cpu>;

template <typename T>
const T* data_of(const Input& array, std::size_t dims, const char* what) {
  check(array.dtype() == nb::dtype<T>() && array.ndim() == dims, what);
  std::int64_t stride = 1;
  for (std::size_t d = dims; d-- > 0;) {
    check(array.shape(d) <= 1 || array.stride(d) == stride, what);
    stride *= static_cast<std::int64_t>(array.shape(d));
  }
  return static_cast<const T*>(array.data());
}

// Any int64 or uint64 as 64 bits.
std::uint64_t seed_of(const nb::object& value) {
  const nb::object index = nb::steal<nb::object>(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow == 0) return static_cast<std::uint64_t>(number);
  const unsigned long long large = PyLong_AsUnsignedLongLong(index.ptr());
  const bool fits = PyErr_Occurred() == nullptr;
  PyErr_Clear();
  check(fits, "a seed has at most 64 bits");
  return large;
}

void check_params(const SampleParams& params, std::int64_t position) {
  check(std::isfinite(params.temperature) && params.temperature >= 0.0, "temperature is finite and at least 0");
  check(params.top_p > 0.0 && params.top_p <= 1.0, "top_p is over 0 and at most 1");
  check(params.min_p >= 0.0 && params.min_p <= 1.0, "min_p is between 0 and 1");
  check(position >= 0 && position < std::int64_t{1} << 32, "position is at least 0 and below 2^32");
}

// One thread's memory; it grows and stays.
Scratch scratch_of(std::size_t size) {
  thread_local Memory memory;
  if (memory.size() < size) memory = Memory(size);
  return {memory.data(), memory.size()};
}

nb::object sample_rows(const Input& logits, const std::vector<double>& temperature, const std::vector<double>& top_p,
                       const std::vector<double>& min_p, const std::vector<std::int64_t>& top_k,
                       const std::vector<nb::object>& seed, const std::vector<std::int64_t>& position,
                       std::int64_t count, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const float* data = data_of<float>(logits, 2, "logits are a C-contiguous float32 array [rows, columns]");
  const std::size_t rows = logits.shape(0), columns = logits.shape(1);
  check(count > 0 && static_cast<std::size_t>(count) <= columns && count <= kMostTokens,
        "count is over 0 and at most the columns, and 2^22");
  check(temperature.size() == rows && top_p.size() == rows && min_p.size() == rows && top_k.size() == rows &&
            seed.size() == rows && position.size() == rows,
        "every setting has one value for each row");
  std::vector<SampleParams> params(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    params[i] = {temperature[i], top_p[i], min_p[i],
                 top_k[i],       seed_of(seed[i]), static_cast<std::uint64_t>(position[i])};
    check_params(params[i], position[i]);
  }
  std::vector<std::int64_t> tokens(rows);
  {
    nb::gil_scoped_release release;
    const Scratch scratch = scratch_of(kernels.sample_scratch(count));
    for (std::size_t i = 0; i < rows; ++i)
      tokens[i] = kernels.sample(data + i * columns, count, params[i], nullptr, scratch).token;
  }
  return nb::cast(make_array(std::move(tokens), {rows}));
}

std::int64_t draw(const Input& logits, double temperature, double top_p, double min_p, std::int64_t top_k,
                  const nb::object& seed, std::int64_t position, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const float* data = data_of<float>(logits, 1, "logits are a contiguous float32 array [count]");
  const std::int64_t count = static_cast<std::int64_t>(logits.shape(0));
  check(count > 0 && count <= kMostTokens, "a row has at least one logit and at most 2^22");
  const SampleParams params{temperature, top_p, min_p, top_k, seed_of(seed), static_cast<std::uint64_t>(position)};
  check_params(params, position);
  nb::gil_scoped_release release;
  return kernels.sample(data, count, params, nullptr, scratch_of(kernels.sample_scratch(count))).token;
}

nb::tuple logprobs(const Input& row, std::int64_t token, std::int64_t num_best, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const float* data = data_of<float>(row, 1, "logits are a contiguous float32 array [count]");
  const std::int64_t count = static_cast<std::int64_t>(row.shape(0));
  check(count > 0 && count <= kMostTokens, "a row has at least one logit and at most 2^22");
  check(token >= 0 && token < count, "the token is not one of the row");
  check(num_best >= 0, "num_best is negative");
  num_best = num_best < count ? num_best : count;
  const std::size_t size = static_cast<std::size_t>(num_best);
  std::vector<std::int64_t> ids(size);
  std::vector<double> values(size);
  LogprobResult result{};
  {
    nb::gil_scoped_release release;
    const Scratch scratch = scratch_of(kernels.sample_scratch(count));
    result = kernels.logprobs({data, count, token, num_best, ids.data(), values.data()}, scratch);
  }
  const std::size_t found = static_cast<std::size_t>(result.num_best);
  return nb::make_tuple(result.shift, result.rank, make_array(std::move(ids), {found}),
                        make_array(std::move(values), {found}));
}

nb::object random_words(const nb::object& seed, std::int64_t position, const Input& token_ids, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const std::int64_t* ids = data_of<std::int64_t>(token_ids, 1, "token ids are a contiguous int64 array");
  const std::size_t count = token_ids.shape(0);
  check(position >= 0 && position < std::int64_t{1} << 32, "position is at least 0 and below 2^32");
  for (std::size_t i = 0; i < count; ++i)
    check(ids[i] >= 0 && ids[i] < std::int64_t{1} << 31, "token ids are at least 0 and below 2^31");
  std::vector<std::uint32_t> words(count);
  const std::uint64_t key = seed_of(seed);
  {
    nb::gil_scoped_release release;
    kernels.random_words(key, static_cast<std::uint64_t>(position), ids, static_cast<std::int64_t>(count), words.data());
  }
  return nb::cast(make_array(std::move(words), {count}));
}

nb::object exp_of(const Input& values, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const float* data = data_of<float>(values, 1, "values are a contiguous float32 array [n]");
  const std::size_t count = values.shape(0);
  std::vector<float> result(count);
  {
    nb::gil_scoped_release release;
    kernels.exp(data, static_cast<std::int64_t>(count), result.data());
  }
  return nb::cast(make_array(std::move(result), {count}));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample", &sample_rows, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"),
        nb::arg("top_k"), nb::arg("seed"), nb::arg("position"), nb::arg("count"), nb::arg("isa"),
        "A token of each row of `logits` [rows, columns], of the first `count` ids; -1 where a row is not finite. The\n"
        "settings are sequences with one value for each row. Raises ValueError for what is out of range.");
  m.def("draw", &draw, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("top_k"),
        nb::arg("seed"), nb::arg("position"), nb::arg("isa"), "As `sample`, for one row [count].");
  m.def("logprobs", &logprobs, nb::arg("row"), nb::arg("token"), nb::arg("num_best"), nb::arg("isa"),
        "(shift, rank, ids, values): a log-probability is a logit less `shift`, which is NaN where the row is not\n"
        "finite; rank of `token`, from 1; the best ids, at most `num_best`, and their log-probabilities.");
  m.def("random_words", &random_words, nb::arg("seed"), nb::arg("position"), nb::arg("token_ids"), nb::arg("isa"),
        "The sampler's 32-bit words [n] of token ids [n] at a position.");
  m.def("exp", &exp_of, nb::arg("values"), nb::arg("isa"), "e to the power of each of `values` [n], float32.");
}

}  // namespace evensong
