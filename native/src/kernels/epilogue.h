// What becomes of a tile's sums: bias, then the epilogue of LinearArgs. All of it works on one row at a time.
#pragma once

#include "vec.h"

namespace evensong {
namespace EV_ISA {

static inline std::int64_t at_most(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// One vector to columns `column`.. of a row, of which `count` exist.
static inline void store_columns(const LinearArgs& args, std::int64_t row, std::int64_t column, Vec v,
                                 std::int64_t count) {
  const std::int64_t at = row * args.out_stride + column;
  if (args.out_type == DType::f32) {
    float* out = static_cast<float*>(args.out) + at;
    if (count >= kLanes) return store(out, v);
    float lanes[kLanes];
    store(lanes, v);
    for (std::int64_t i = 0; i < count; ++i) out[i] = lanes[i];
  } else {
    bf16* out = static_cast<bf16*>(args.out) + at;
    if (count >= kLanes) return store_bf16(out, v);
    bf16 lanes[kLanes];
    store_bf16(lanes, v);
    for (std::int64_t i = 0; i < count; ++i) out[i] = lanes[i];
  }
}

static inline void add_columns(const LinearArgs& args, std::int64_t row, std::int64_t column, Vec v,
                               std::int64_t count) {
  float* out = static_cast<float*>(args.out) + row * args.out_stride + column;
  if (count >= kLanes) return store(out, load(out) + v);
  float lanes[kLanes];
  store(lanes, v);
  for (std::int64_t i = 0; i < count; ++i) out[i] += lanes[i];
}

// x / (1 + e^exponent); NaN where x is. With AVX-512 in fewer operations than by `exp`, to the same bits: a scale that
// rounds once does not need two halves, and what `exp` makes of NaN does not matter under a NaN.
static inline Vec over_one_plus_exp(Vec x, Vec exponent) {
#if EV_LANES == 16
  const Exponential e = exponential(exponent);
  return x / (set1(1.0f) + (Vec)_mm512_scalef_ps((__m512)e.p, (__m512)e.n));
#else
  return x / (set1(1.0f) + exp(exponent));
#endif
}

static inline Vec silu(Vec x) { return over_one_plus_exp(x, -x); }

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), written as x / (1 + e^(-2u)).
static inline Vec gelu_tanh(Vec x) {
  const Vec cubic = fma(set1(0.044715f) * x * x, x, x);
  return over_one_plus_exp(x, set1(-1.59576912160573f) * cubic);
}

// The largest of two vectors' first `count` > 0 lanes and its lowest index; NaN where one of them is.
static inline void best_of(Vec low, Vec high, std::int64_t count, float* best, std::int32_t* index) {
#if EV_LANES == 16
  const auto valid = static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1);
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  const __m512 a = _mm512_mask_blend_ps(static_cast<__mmask16>(valid), none, (__m512)low);
  const __m512 b = _mm512_mask_blend_ps(static_cast<__mmask16>(valid >> 16), none, (__m512)high);
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
  const __m512 wanted = _mm512_set1_ps(largest);
  const std::uint32_t equal =
      _mm512_cmp_ps_mask(a, wanted, _CMP_EQ_OQ) |
      (static_cast<std::uint32_t>(_mm512_cmp_ps_mask(b, wanted, _CMP_EQ_OQ)) << 16);
  const std::uint32_t nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) |
                            (static_cast<std::uint32_t>(_mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q)) << 16);
  *best = nan != 0 ? __builtin_nanf("") : largest;
  *index = __builtin_ctz(nan != 0 ? nan : equal);
#else
  float lanes[kPanel];
  store(lanes, low);
  store(lanes + kLanes, high);
  int found = 0;
  bool nan = lanes[0] != lanes[0];
  for (int i = 1; i < count; ++i) {
    nan |= lanes[i] != lanes[i];
    if (lanes[i] > lanes[found]) found = i;
  }
  *best = nan ? __builtin_nanf("") : lanes[found];
  *index = found;
#endif
}

static inline void find_best(const LinearArgs& args, std::int64_t panel, std::int64_t row, Vec low, Vec high) {
  const std::int64_t num_panels = (args.weight.rows + kPanel - 1) / kPanel;
  const std::int64_t first = panel * kPanel;
  const std::int64_t count = at_most(at_most(args.num_columns, args.weight.rows) - first, kPanel);
  float best = -__builtin_inff();
  std::int32_t index = 0;
  if (count > 0) best_of(low, high, count, &best, &index);
  args.best[row * num_panels + panel] = best;
  args.best_index[row * num_panels + panel] = static_cast<std::int32_t>(first) + index;
}

template <Epilogue kind>
static inline void finish_rows(const LinearArgs& args, std::int64_t panel, std::int64_t begin, std::int64_t rows,
                               const float* sums) {
  const bool gated = kind == Epilogue::silu || kind == Epilogue::gelu_tanh;
  const std::int64_t first = panel * (gated ? kLanes : kPanel);
  const std::int64_t count = (gated ? args.weight.rows / 2 : args.weight.rows) - first;
  Vec bias[2] = {};
  if (args.bias != nullptr)
    for (int j = 0; j < 2; ++j) bias[j] = load(args.bias + panel * kPanel + j * kLanes);
  for (std::int64_t row = begin; row < begin + rows; ++row, sums += kPanel) {
    Vec low = load(sums), high = load(sums + kLanes);
    // Not + 0 where there is no bias: -0 would become 0.
    if (args.bias != nullptr) low = low + bias[0], high = high + bias[1];
    if (kind == Epilogue::store) {
      store_columns(args, row, first, low, count);
      store_columns(args, row, first + kLanes, high, count - kLanes);
    } else if (kind == Epilogue::add) {
      add_columns(args, row, first, low, count);
      add_columns(args, row, first + kLanes, high, count - kLanes);
    } else if (kind == Epilogue::silu) {
      store_columns(args, row, first, silu(low) * high, count);
    } else if (kind == Epilogue::gelu_tanh) {
      store_columns(args, row, first, gelu_tanh(low) * high, count);
    } else {
      find_best(args, panel, row, low, high);
    }
  }
}

// Whether a panel's sums can go to the outputs as they are, or be added there: whole vectors of floats without a bias.
static inline bool sums_are_outputs(const LinearArgs& args, std::int64_t panel) {
  const bool plain = args.epilogue == Epilogue::store || args.epilogue == Epilogue::add;
  return plain && args.out_type == DType::f32 && args.bias == nullptr && (panel + 1) * kPanel <= args.weight.rows;
}

// Asks for the cache lines that `finish` will write, long enough before it does.
__attribute__((always_inline)) static inline void fetch_outputs(const LinearArgs& args, std::int64_t panel,
                                                                std::int64_t begin, std::int64_t rows) {
  if (args.epilogue == Epilogue::argmax) return;
  const bool gated = args.epilogue == Epilogue::silu || args.epilogue == Epilogue::gelu_tanh;
  const std::int64_t item = args.out_type == DType::f32 ? 4 : 2;
  const std::int64_t bytes = (gated ? kLanes : kPanel) * item, row_bytes = args.out_stride * item;
  char* out = static_cast<char*>(args.out) + begin * row_bytes + panel * bytes;
  for (std::int64_t row = 0; row < rows; ++row, out += row_bytes) {
    __builtin_prefetch(out, 1, 3);
    if (bytes > 64) __builtin_prefetch(out + 64, 1, 3);
  }
}

// Rows begin.. of a panel's outputs from their sums, [rows, kPanel].
static inline void finish(const LinearArgs& args, std::int64_t panel, std::int64_t begin, std::int64_t rows,
                          const float* sums) {
  switch (args.epilogue) {
    case Epilogue::store: return finish_rows<Epilogue::store>(args, panel, begin, rows, sums);
    case Epilogue::add: return finish_rows<Epilogue::add>(args, panel, begin, rows, sums);
    case Epilogue::silu: return finish_rows<Epilogue::silu>(args, panel, begin, rows, sums);
    case Epilogue::gelu_tanh: return finish_rows<Epilogue::gelu_tanh>(args, panel, begin, rows, sums);
    case Epilogue::argmax: return finish_rows<Epilogue::argmax>(args, panel, begin, rows, sums);
  }
}

}  // namespace EV_ISA
}  // namespace evensong
