// The arithmetic of one attention tile: the softmax between two matrix products, which attention_product.h has.
//
// Everything is kept in words of four bytes: a float, or (kPairs) two neighbouring bf16 elements of a chain.
//
// Each score is one chain over head_dim, each output one chain over the tile's keys, each lane of a sum one chain over
// the keys of that lane. Keys that a query does not see have weight zero and add exactly nothing to any of them, so how
// many of them are computed along does not matter.
#pragma once

#include "../cache_layout.h"
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

constexpr int kGroupVecs = kGroupTokens / kLanes;
constexpr int kTileGroups = kTileKeys / kGroupTokens;

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
