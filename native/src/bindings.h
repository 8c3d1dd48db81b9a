// What the files of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"

namespace evensong {

void bind_linear(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_program(nanobind::module_& m);

// C-contiguous arrays on the CPU. bfloat16 travels as its bits in uint16: NumPy has no such type.
template <typename T, typename... Options>
using Array = nanobind::ndarray<T, nanobind::numpy, nanobind::c_contig, nanobind::device::cpu, Options...>;

}  // namespace evensong
