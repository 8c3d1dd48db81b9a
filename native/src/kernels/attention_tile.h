// The arithmetic of one attention tile: two matrix products with the softmax between them.
//
// Everything is kept in words of four bytes: a float, or (kPairs) two neighbouring bf16 elements of a chain. So one
// product serves scores (query words x key words) and outputs (weight words x value words) in both modes.
//
// Each score is one chain over head_dim, each output one chain over the tile's keys, each lane of a sum one chain over
// the keys of that lane. Keys that a query does not see have weight zero and add exactly nothing to any of them, so how
// many of them are computed along does not matter.
#pragma once

#include "vec.h"

namespace evensong {
namespace EV_ISA {

constexpr int kTileKeys = 128;
// Keys that are computed together: a vector of pairs in the widest build.
constexpr int kKeyStep = 32;
// Rows (queries x heads of the group) whose scores are alive at a time: two blocks of registers, within the L1 cache.
constexpr int kBlockRows = 12;
// The greatest lower bound of all scores: finite, so that it can be subtracted from itself.
constexpr float kLowest = -3.402823466e38f;
constexpr float kLog2E = 1.44269504088896341f;

#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
constexpr int kProductRows = 6;  // 6 x 4 sums, 4 operands and a broadcast: 29 of 32 registers
constexpr int kProductVecs = 4;
#elif defined(EV_AVX2)
constexpr int kProductRows = 6;  // 6 x 2 sums, 2 operands and a broadcast: 15 of 16 registers
constexpr int kProductVecs = 2;
#else
constexpr int kProductRows = 3;  // a vector is two registers here
constexpr int kProductVecs = 2;
#endif

// sum + word * words, in all lanes.
template <bool kPairs>
static inline Vec multiply_add(Vec sum, Vec word, Vec words) {
#if defined(EV_AVX512_BF16)
  if constexpr (kPairs) return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)word, (__m512bh)words);
#endif
  return fma(word, words, sum);
}

// All lanes are `word`, bit by bit (0 + word would not be).
static inline Vec broadcast(float word) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return (Vec)_mm512_set1_ps(word);
#elif defined(EV_AVX2)
  return (Vec)_mm256_set1_ps(word);
#else
  return Vec{word, word, word, word, word, word, word, word};
#endif
}

// The operands of a product: out[i][j] = factor[i] * out[i][j] + sum over k of left[i][k] * right[k][j], in order of k.
// Strides are in words.
struct Product {
  const float* left;
  std::int64_t left_stride;
  const float* right;
  std::int64_t right_stride;
  int depth;
  const float* factor;  // nullptr: `out` is not read and counts as zero
  float* out;
  std::int64_t out_stride;

  Product from_row(int row) const {
    Product p = *this;
    p.left += row * left_stride;
    p.out += row * out_stride;
    if (factor != nullptr) p.factor += row;
    return p;
  }
  Product from_column(int column) const {
    Product p = *this;
    p.right += column;
    p.out += column;
    return p;
  }
};

template <bool kPairs, int kRows, int kVecs>
static void product_block(const Product& p) {
  Vec sum[kRows][kVecs];
  const float* left = p.left;
  const float* right = p.right;
  const std::int64_t left_stride = p.left_stride, right_stride = p.right_stride, out_stride = p.out_stride;
  float* out = p.out;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sum[i][j] = Vec{};
  }
  if (p.factor != nullptr) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i, out += out_stride) {
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) sum[i][j] = load(out + j * kLanes) * broadcast(p.factor[i]);
    }
    out = p.out;
  }
  for (const float* end = left + p.depth; left < end; ++left, right += right_stride) {
    Vec operand[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) operand[j] = load(right + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec word = broadcast(left[i * left_stride]);
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) sum[i][j] = multiply_add<kPairs>(sum[i][j], word, operand[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i, out += out_stride) {
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) store(out + j * kLanes, sum[i][j]);
    __asm__ volatile("" : "+r"(out));  // one pointer that moves on: one for each row would not fit the registers
  }
}

template <bool kPairs, int kRows>
static inline void product_columns(const Product& p, int columns) {
  constexpr int kWide = kProductVecs * kLanes;
  int j = 0;
  for (; j + kWide <= columns; j += kWide) product_block<kPairs, kRows, kProductVecs>(p.from_column(j));
  if constexpr (kProductVecs > 2) {
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes) product_block<kPairs, kRows, 2>(p.from_column(j));
  }
  for (; j < columns; j += kLanes) product_block<kPairs, kRows, 1>(p.from_column(j));
}

// The whole product; `columns` is a multiple of kLanes.
template <bool kPairs>
static void product(const Product& whole, int rows, int columns) {
  for (int done = 0; done < rows;) {
    const int left = rows - done;
    // Two halves rather than a full block and a small rest.
    int count = left;
    if (left > kProductRows) count = left < 2 * kProductRows ? (left + 1) / 2 : kProductRows;
    const Product p = whole.from_row(done);
    switch (count) {
      case 1:
        product_columns<kPairs, 1>(p, columns);
        break;
      case 2:
        product_columns<kPairs, 2>(p, columns);
        break;
      case 3:
        product_columns<kPairs, 3>(p, columns);
        break;
      default:
        if constexpr (kProductRows > 3) {
          if (count == 4) product_columns<kPairs, 4>(p, columns);
          if (count == 5) product_columns<kPairs, 5>(p, columns);
          if (count == 6) product_columns<kPairs, 6>(p, columns);
        }
    }
    done += count;
  }
}

// 2^x for x <= 0 or just above; 0 below -200 (also for -inf), NaN stays one. kRough: good to 3e-6, for bf16 weights;
// else to 3e-9 before rounding. 2^0 is 1. The polynomials are minimax fits on [-1/2, 1/2] with p(0) = 1.
template <bool kRough>
static inline Vec exp2(Vec x) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  x = (Vec)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // the second operand where one is NaN
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = max(set1(-200.0f), x);
  const Vec n = round(x);
#endif
  const Vec r = x - n;
  Vec p;
  if constexpr (kRough) {
    p = fma(set1(9.5828530846e-3f), r, set1(5.5906424612e-2f));
    p = fma(p, r, set1(2.4024098610e-1f));
    p = fma(p, r, set1(6.9312419342e-1f));
  } else {
    p = fma(set1(1.5353361936e-4f), r, set1(1.3398874406e-3f));
    p = fma(p, r, set1(9.6184373575e-3f));
    p = fma(p, r, set1(5.5503324712e-2f));
    p = fma(p, r, set1(2.4022647914e-1f));
    p = fma(p, r, set1(6.9314720286e-1f));
  }
  p = fma(p, r, set1(1.0f));
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // No denormal results here: they would be zero in a product of pairs, and are far below any sum that holds a 1.
  return select(x < set1(-126.0f), Vec{}, p * from_bits((to_int(n) + 127) << 23));
#endif
}

// cap * tanh(x / cap) for x = score * scale: 1 - 2 / (1 + e^2x) from -1 to 1, also where e^2x is 0 or inf.
static inline Vec cap_scores(Vec score, float scale, float cap) {
  const Vec twice = score * broadcast(2.0f * scale / cap);
  return broadcast(cap) * (set1(1.0f) - set1(2.0f) / (set1(1.0f) + exp(twice)));
}

static inline float largest(Vec v) {
#if EV_LANES == 16
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
  return v[0];
}

// As reduce_add of vec.h, in the same order, without a way through memory.
static inline float sum_of_lanes(Vec v) {
#if EV_LANES == 16
  v = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#else
  v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
#endif
  return v[0] + v[1];
}

static inline IntVec lane_numbers() {
#if EV_LANES == 16
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

// Keys begin..end of a row's scores that its query sees become capped scores, the others -inf.
static inline void mask_scores(float* scores, int begin, int end, int visible_begin, int visible_end) {
  const Vec nothing = set1(-__builtin_inff());
  for (int j = begin; j < end; j += kLanes) {
    const IntVec key = lane_numbers() + j;
    const IntVec visible = (key >= visible_begin) & (key < visible_end);
    store(scores + j, select(visible, load(scores + j), nothing));
  }
}

static inline float highest_score(const float* scores, int begin, int end) {
  Vec a = load(scores + begin), b = load(scores + begin + kLanes);
  for (int j = begin + 2 * kLanes; j < end; j += 2 * kLanes) {
    a = max(a, load(scores + j));
    b = max(b, load(scores + j + kLanes));
  }
  return largest(max(a, b));
}

// Weights 2^(factor * score - highest) of keys begin..end, in words as the product takes them, from `scores` to
// `weights` (which may be the same where words are floats); their sum, as rounded, is added to `sum` lane by lane.
template <bool kPairs>
static inline Vec weigh(const float* scores, float factor, float highest, Vec sum, float* weights, int begin, int end) {
  const Vec scale = broadcast(factor), shift = broadcast(-highest);
#if defined(EV_AVX512_BF16)
  if constexpr (kPairs) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int j = begin; j < end; j += 2 * kLanes) {
      const Vec low = exp2<true>(fma(load(scores + j), scale, shift));
      const Vec high = exp2<true>(fma(load(scores + j + kLanes), scale, shift));
      const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      sum = (Vec)_mm512_dpbf16_ps((__m512)sum, pairs, ones);
      store(weights + j / 2, (Vec)pairs);
    }
    return sum;
  }
#endif
  for (int j = begin; j < end; j += kLanes) {
    const Vec weight = exp2<false>(fma(load(scores + j), scale, shift));
    sum = sum + weight;
    store(weights + j, weight);
  }
  return sum;
}

}  // namespace EV_ISA
}  // namespace evensong
