// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>

#include "kernels.h"

namespace evensong {

void bind_linear(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_engine(nanobind::module_& m);

// C-contiguous arrays on the CPU. bfloat16 travels as its bits in uint16: NumPy has no such type.
template <typename T, typename... Options>
using Array = nanobind::ndarray<T, nanobind::numpy, nanobind::c_contig, nanobind::device::cpu, Options...>;

inline DType dtype_named(const std::string& name) {
  check(name == "float32" || name == "bfloat16", "dtype must be 'float32' or 'bfloat16'");
  return name == "float32" ? DType::f32 : DType::bf16;
}

// float32, or bfloat16 as its bits in uint16.
template <typename A>
DType dtype_of(const A& array, const char* what) {
  const bool wide = array.dtype() == nanobind::dtype<float>();
  check(wide || array.dtype() == nanobind::dtype<std::uint16_t>(), what);
  return wide ? DType::f32 : DType::bf16;
}

inline Epilogue epilogue_named(const std::string& name) {
  if (name == "store") return Epilogue::store;
  if (name == "add") return Epilogue::add;
  if (name == "silu") return Epilogue::silu;
  if (name == "gelu_tanh") return Epilogue::gelu_tanh;
  check(name == "argmax", "epilogue must be 'store', 'add', 'silu', 'gelu_tanh' or 'argmax'");
  return Epilogue::argmax;
}

template <typename T>
using Result = nanobind::ndarray<nanobind::numpy, T>;

// `data`, which `owner` keeps.
template <typename T, typename Owner>
Result<T> owned_array(std::unique_ptr<Owner> owner, T* data, std::initializer_list<std::size_t> shape) {
  nanobind::capsule capsule(owner.get(), [](void* p) noexcept { delete static_cast<Owner*>(p); });
  owner.release();
  return Result<T>(data, shape, capsule);
}

// The first values of a vector.
template <typename T>
Result<T> make_array(std::vector<T> values, std::initializer_list<std::size_t> shape) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  T* data = kept->data();
  return owned_array(std::move(kept), data, shape);
}

// Zeros, in whole pages of their own.
template <typename T>
Result<T> make_array(std::initializer_list<std::size_t> shape) {
  std::size_t count = 1;
  for (std::size_t size : shape) count *= size;
  auto memory = std::make_unique<Memory>(std::max<std::size_t>(count * sizeof(T), 1));
  auto* data = reinterpret_cast<T*>(memory->data());
  return owned_array(std::move(memory), data, shape);
}

}  // namespace evensong
