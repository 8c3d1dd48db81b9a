// Weights to panels and back.
#include "ops.h"

namespace evensong {
namespace EV_ISA {

namespace {

#if defined(EV_AVX512_BF16)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

std::int64_t padded(std::int64_t cols) { return (cols + 1) / 2 * 2; }

// Where input `col` of output `lane` stands in its panel, in elements.
inline std::int64_t place(std::int64_t col, std::int64_t lane, DType type) {
  if (kPairs && type == DType::bf16) return (col / 2 * kPanel + lane) * 2 + col % 2;
  return col * kPanel + lane;
}

// The source row of an output of the packed order, or -1 for padding.
inline std::int64_t source_row(std::int64_t rows, bool gated, std::int64_t panel, std::int64_t lane) {
  if (!gated) {
    const std::int64_t row = panel * kPanel + lane;
    return row < rows ? row : -1;
  }
  const std::int64_t row = panel * kLanes + lane % kLanes;
  return row < rows / 2 ? row + (lane < kLanes ? 0 : rows / 2) : -1;
}

template <class From, class To>
inline To convert(From x);
template <>
inline float convert(float x) {
  return x;
}
template <>
inline float convert(bf16 x) {
  return widen(x);
}
template <>
inline bf16 convert(float x) {
  return round_bf16(x);
}
template <>
inline bf16 convert(bf16 x) {
  return x;
}

template <class From, class To>
void pack_as(const From* source, std::int64_t rows, std::int64_t cols, bool gated, std::int64_t panel, DType type,
             To* out) {
  const From* lines[kPanel];
  for (int lane = 0; lane < kPanel; ++lane) {
    const std::int64_t row = source_row(rows, gated, panel, lane);
    lines[lane] = row < 0 ? nullptr : source + row * cols;
  }
  // Some columns of all rows at a time: what is read and what is written stay in the cache.
  constexpr std::int64_t kColumns = 64;
  for (std::int64_t first = 0; first < padded(cols); first += kColumns) {
    const std::int64_t last = first + kColumns < padded(cols) ? first + kColumns : padded(cols);
    for (std::int64_t lane = 0; lane < kPanel; ++lane)
      for (std::int64_t col = first; col < last; ++col)
        out[place(col, lane, type)] = lines[lane] != nullptr && col < cols ? convert<From, To>(lines[lane][col]) : To{};
  }
}

}  // namespace

void pack(const void* source, DType source_type, std::int64_t rows, std::int64_t cols, bool gated,
          std::int64_t panel_index, DType type, void* out) {
  const auto* wide = static_cast<const float*>(source);
  const auto* half = static_cast<const bf16*>(source);
  if (source_type == DType::f32 && type == DType::f32)
    pack_as(wide, rows, cols, gated, panel_index, type, static_cast<float*>(out));
  else if (source_type == DType::f32)
    pack_as(wide, rows, cols, gated, panel_index, type, static_cast<bf16*>(out));
  else if (type == DType::f32)
    pack_as(half, rows, cols, gated, panel_index, type, static_cast<float*>(out));
  else
    pack_as(half, rows, cols, gated, panel_index, type, static_cast<bf16*>(out));
}

void gather(const PackedMatrix& weight, std::int64_t row, float scale, float* out) {
  const std::int64_t start = row / kPanel * kPanel * padded(weight.cols);
  for (std::int64_t col = 0; col < weight.cols; ++col) {
    const std::int64_t at = start + place(col, row % kPanel, weight.type);
    const float x = weight.type == DType::f32 ? static_cast<const float*>(weight.data)[at]
                                              : widen(static_cast<const bf16*>(weight.data)[at]);
    out[col] = x * scale;
  }
}

}  // namespace EV_ISA
}  // namespace evensong
