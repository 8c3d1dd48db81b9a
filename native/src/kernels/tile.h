// The micro-kernel of `linear`: a tile of R rows x one panel (two vectors) of outputs, over a range of K.
//
// Every accumulator is one chain over K in order: acc = fma(x[k], w[k], acc) from k = 0 up. R, the split of K and the
// place of a row in its tile change which chains run side by side, never what a chain computes.
#pragma once

#include "vec.h"

namespace evensong {
namespace EV_ISA {

// Part of a row of accumulators that one register holds. The portable build's Vec takes two, which the compiler would
// keep in memory.
#if defined(EV_PORTABLE)
constexpr int kPartLanes = 4;
using Part = float __attribute__((vector_size(16)));
static inline Part load_part(const float* p) {
  Part v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline Part widen_part(const bf16* p) {
  std::uint16_t __attribute__((vector_size(8))) half;
  std::memcpy(&half, p, sizeof half);
  using Wide = std::uint32_t __attribute__((vector_size(16)));
  return reinterpret_cast<Part>(__builtin_convertvector(half, Wide) << 16);
}
static inline Part multiply_add(Part x, Part w, Part sum) { return x * w + sum; }
#else
constexpr int kPartLanes = kLanes;
using Part = Vec;
static inline Part load_part(const float* p) { return load(p); }
static inline Part widen_part(const bf16* p) { return load_bf16(p); }
static inline Part multiply_add(Part x, Part w, Part sum) { return fma(x, w, sum); }
#endif
static inline void store_part(float* p, Part v) { std::memcpy(p, &v, sizeof v); }
constexpr int kParts = kPanel / kPartLanes;

// How products are formed. A step takes kInputs neighbouring inputs and kBytes of a panel.
#if defined(EV_AVX512_BF16)
struct PairProducts {  // bf16 x bf16, two inputs a step
  using In = bf16;
  using Weight = __m512bh;
  static constexpr int kInputs = 2;
  static constexpr int kBytes = 4 * kPanel;
  static Weight load(const char* p) { return (Weight)_mm512_loadu_si512(p); }
  static Weight broadcast(const In* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return (Weight)_mm512_set1_epi32(pair);
  }
  static Part add(Weight x, Weight w, Part sum) { return (Part)_mm512_dpbf16_ps((__m512)sum, x, w); }
};
#endif

struct WidenedProducts {  // f32 x bf16 widened
  using In = float;
  using Weight = Part;
  static constexpr int kInputs = 1;
  static constexpr int kBytes = 2 * kPanel;
  static Weight load(const char* p) { return widen_part(reinterpret_cast<const bf16*>(p)); }
  static Weight broadcast(const In* p) { return Part{} + *p; }
  static Part add(Weight x, Weight w, Part sum) { return multiply_add(x, w, sum); }
};

struct FloatProducts {  // f32 x f32
  using In = float;
  using Weight = Part;
  static constexpr int kInputs = 1;
  static constexpr int kBytes = 4 * kPanel;
  static Weight load(const char* p) { return load_part(reinterpret_cast<const float*>(p)); }
  static Weight broadcast(const In* p) { return Part{} + *p; }
  static Part add(Weight x, Weight w, Part sum) { return multiply_add(x, w, sum); }
};

// Rows of the largest tile: as many accumulators as the registers hold beside two weights and an input.
#if EV_LANES == 16
constexpr int kTileRows = 12;
#elif defined(EV_AVX2)
constexpr int kTileRows = 6;
#elif defined(__x86_64__)
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = 4;
#endif

struct Tile {
  const char* weight;
  const void* in;
  std::int64_t in_stride;
  std::int64_t steps;  // > 0
  float* sums;  // [R, kPanel]
  bool fresh;   // sums start at 0, else from what is there
  // Where they end, rows `out_stride` apart: `sums`, or the outputs themselves.
  float* out;
  std::int64_t out_stride;
  bool adds;  // to what is in `out`
  // What later tiles will read, fetched a little at every step so that memory is busy all the time.
  const char* ahead;
  std::int64_t ahead_bytes;  // of each step
  // The next tile's inputs, likewise.
  const char* next_in;
  std::int64_t next_in_bytes;
};

enum class Fetch {
  stream,  // a lone tile: `ahead` at the pace of its own weights
  share,   // a part of `ahead`, and inputs
  inputs,
};

template <class Products, int R, Fetch kFetch>
__attribute__((noinline)) void run_tile(const Tile& tile) {
  using In = typename Products::In;
  // No zeros by a branch: the compiler would keep the sums in memory until the loop begins.
  alignas(64) static const float zeros[kPanel] = {};
  const float* from = tile.fresh ? zeros : tile.sums;
  const std::int64_t from_stride = tile.fresh ? 0 : kPanel;
  Part sums[R][kParts];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kParts; ++j) sums[r][j] = load_part(from + r * from_stride + j * kPartLanes);
  const char* weight = tile.weight;
  const char* ahead = tile.ahead;
  const char* next_in = tile.next_in;
  // One pointer for three rows: with one for each, the compiler runs out of registers.
  constexpr int kGroups = (R + 2) / 3;
  const In* in[kGroups];
  const std::int64_t stride = tile.in_stride;
  for (int g = 0; g < kGroups; ++g) in[g] = static_cast<const In*>(tile.in) + 3 * g * stride;
  std::int64_t steps = tile.steps;
  do {
    typename Products::Weight w[kParts];
    for (int j = 0; j < kParts; ++j) w[j] = Products::load(weight + j * (Products::kBytes / kParts));
    weight += Products::kBytes;
    if constexpr (kFetch != Fetch::inputs) {
      constexpr int kLines = kFetch == Fetch::stream && Products::kBytes > 64 ? Products::kBytes / 64 : 1;
      for (int line = 0; line < kLines; ++line) __builtin_prefetch(ahead + 64 * line, 0, 3);
      ahead += tile.ahead_bytes;
    }
    if constexpr (kFetch != Fetch::stream) {
      __builtin_prefetch(next_in, 0, 3);
      next_in += tile.next_in_bytes;
    }
    for (int r = 0; r < R; ++r) {
      const auto x = Products::broadcast(in[r / 3] + (r % 3) * stride);
      for (int j = 0; j < kParts; ++j) sums[r][j] = Products::add(x, w[j], sums[r][j]);
    }
    for (int g = 0; g < kGroups; ++g) in[g] += Products::kInputs;
  } while (--steps > 0);
  float* out = tile.out;
  const std::int64_t out_stride = tile.out_stride;
  if (tile.adds) {
    for (int r = 0; r < R; ++r, out += out_stride)
      for (int j = 0; j < kParts; ++j) store_part(out + j * kPartLanes, load_part(out + j * kPartLanes) + sums[r][j]);
  } else {
    for (int r = 0; r < R; ++r, out += out_stride)
      for (int j = 0; j < kParts; ++j) store_part(out + j * kPartLanes, sums[r][j]);
  }
}

using RunTile = void (*)(const Tile&);

// The micro-kernel of 1 <= rows <= kTileRows.
template <class Products, Fetch kFetch, int R = kTileRows>
RunTile tile_of(std::int64_t rows) {
  if constexpr (R == 1) {
    (void)rows;
    return run_tile<Products, 1, kFetch>;
  } else {
    return rows == R ? run_tile<Products, R, kFetch> : tile_of<Products, kFetch, R - 1>(rows);
  }
}

}  // namespace EV_ISA
}  // namespace evensong
