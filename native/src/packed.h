// Sizes of packed weights, and biases in their order. What `Kernels::pack` lays out, seen from outside.
#pragma once

#include <vector>

#include "kernels.h"

namespace evensong {

// Panels of a weight of `rows` outputs; with `gated`, rows / 2 gates and as many ups share them.
inline std::int64_t num_panels(const Kernels& kernels, std::int64_t rows, bool gated) {
  const std::int64_t width = gated ? kernels.panel / 2 : kernels.panel;
  return ((gated ? rows / 2 : rows) + width - 1) / width;
}

inline std::size_t panel_bytes(const Kernels& kernels, std::int64_t cols, DType type) {
  return static_cast<std::size_t>(round_up(cols, 2)) * static_cast<std::size_t>(kernels.panel) * size_of(type);
}

inline std::size_t packed_bytes(const Kernels& kernels, std::int64_t rows, std::int64_t cols, DType type, bool gated) {
  return static_cast<std::size_t>(num_panels(kernels, rows, gated)) * panel_bytes(kernels, cols, type);
}

// A bias [rows] in the order of the packed outputs, padded with zeros to whole panels.
inline std::vector<float> packed_bias(const Kernels& kernels, const float* bias, std::int64_t rows, bool gated) {
  const std::int64_t panels = num_panels(kernels, rows, gated), width = kernels.panel;
  std::vector<float> out(static_cast<std::size_t>(panels * width));
  for (std::int64_t at = 0; at < panels * width; ++at) {
    std::int64_t row = at;
    if (gated) {
      const std::int64_t lane = at % width, unit = at / width * (width / 2) + lane % (width / 2);
      row = unit >= rows / 2 ? rows : lane < width / 2 ? unit : unit + rows / 2;
    }
    if (row < rows) out[static_cast<std::size_t>(at)] = bias[row];
  }
  return out;
}

}  // namespace evensong
