// The two matrix products of an attention tile: scores = queries x keys, outputs = weights x values.
//
// Keys and values come as groups of 16 tokens, each at an address of its own: in the cache, or packed in scratch. In
// words (see attention_tile.h) a group's keys are [depth][16] and its values [16, or 8 pairs][padded head_dim].
//
// While a product runs it may ask for the groups of the next tile, which lie as its own do: line by line, so that memory
// works as steadily as the arithmetic.
#pragma once

#include "attention_tile.h"

namespace evensong {
namespace EV_ISA {

#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
constexpr int kProductRows = 6;  // 6 x 4 sums, 4 operands and a broadcast: 29 of 32 registers
constexpr int kProductVecs = 4;
constexpr int kFewRows = 3;  // 3 x 8 sums, 3 broadcasts: with fewer sums each would wait for its last addition
#elif defined(EV_AVX2)
constexpr int kProductRows = 6;  // 6 x 2 sums, 2 operands and a broadcast: 15 of 16 registers
constexpr int kProductVecs = 2;
constexpr int kFewRows = 0;
#else
constexpr int kProductRows = 3;  // a vector is two registers here
constexpr int kProductVecs = 2;
constexpr int kFewRows = 0;
#endif

// out[i][j] = [factor[i] * out[i][j]] + sum of left[i][k] * right[k][j], in order of k. Strides are in words.
struct Product {
  const float* left;
  std::int64_t left_stride;
  const float* const* right;  // groups
  const float* const* ahead;  // groups of the next tile, or nullptr
  float* out;
  std::int64_t out_stride;
  int depth;            // scores: words of a key
  int row_words;        // outputs: words of a row of values
  const float* factor;  // outputs
};

template <bool kAhead>
__attribute__((always_inline)) static inline void ask_for(const float* words) {
  if constexpr (kAhead) prefetch(words);
}

// A vector that stays in its register: gcc would rather load it again for each row, and loads are what is short.
__attribute__((always_inline)) static inline Vec load_once(const float* p) {
  Vec v = load(p);
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  __asm__("" : "+v"(v));
#elif defined(EV_AVX2)
  __asm__("" : "+x"(v));
#endif
  return v;
}

// Scores of kGroups groups of keys.
template <bool kPairs, int kRows, int kGroups, bool kAhead>
static void score_block(const Product& p, int group) {
  constexpr int kVecs = kGroups * kGroupVecs;
  Vec sum[kRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) sum[i][j] = Vec{};
  }
  const float* keys[kGroups];
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) keys[g] = p.right[group + g];
  const float* const* ahead = kAhead ? p.ahead + group : nullptr;
  const float* line = kAhead ? *ahead : nullptr;
  const float* left = p.left;
  const std::int64_t left_stride = p.left_stride;
  const std::int64_t end = std::int64_t{p.depth} * kGroupTokens;
  for (std::int64_t at = 0; at < end; at += kGroupTokens, ++left) {
    if constexpr (kRows <= kFewRows) {
      Vec word[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) word[i] = broadcast(left[i * left_stride]);
#pragma GCC unroll 16
      for (int j = 0; j < kVecs; ++j) {
        const Vec operand = load_once(keys[j / kGroupVecs] + at + j % kGroupVecs * kLanes);
        if (j % kGroupVecs == 0) ask_for<kAhead>(line + j / kGroupVecs * 16);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) sum[i][j] = multiply_add<kPairs>(sum[i][j], word[i], operand);
      }
    } else {
      Vec operand[kVecs];
#pragma GCC unroll 16
      for (int j = 0; j < kVecs; ++j) {
        operand[j] = load_once(keys[j / kGroupVecs] + at + j % kGroupVecs * kLanes);
        if (j % kGroupVecs == 0) ask_for<kAhead>(line + j / kGroupVecs * 16);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vec word = broadcast(left[i * left_stride]);
#pragma GCC unroll 16
        for (int j = 0; j < kVecs; ++j) sum[i][j] = multiply_add<kPairs>(sum[i][j], word, operand[j]);
      }
    }
    if constexpr (kAhead) {
      line += kGroups * 16;
      if (line == *ahead + end) line = *++ahead;
    }
  }
  float* out = p.out + group * kGroupTokens;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i, out += p.out_stride) {
#pragma GCC unroll 16
    for (int j = 0; j < kVecs; ++j) store(out + j * kLanes, sum[i][j]);
    __asm__ volatile("" : "+r"(out));  // one pointer that moves on: one for each row would not fit the registers
  }
}

// Groups begin..end, an even number of them.
template <bool kPairs, int kRows, bool kAhead>
static void score_groups(const Product& p, int begin, int end) {
  int group = begin;
  if constexpr (kRows <= kFewRows) {
    for (; group + 8 <= end; group += 8) score_block<kPairs, kRows, 8, kAhead>(p, group);
  }
  constexpr int kGroups = kProductVecs / kGroupVecs;
  for (; group + kGroups <= end; group += kGroups) score_block<kPairs, kRows, kGroups, kAhead>(p, group);
  if constexpr (kGroups > 2) {
    if (group < end) score_block<kPairs, kRows, 2, kAhead>(p, group);
  }
}

// Outputs of columns column.. (kVecs vectors) from groups begin..end; weights of group 0 are at `left`.
template <bool kPairs, int kRows, int kVecs, bool kAhead>
static void output_block(const Product& p, int begin, int end, int column) {
  constexpr int kSteps = kGroupTokens / (kPairs ? 2 : 1);
  Vec sum[kRows][kVecs];
  float* out = p.out + column;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i, out += p.out_stride) {
    const Vec factor = broadcast(p.factor[i]);
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sum[i][j] = load(out + j * kLanes) * factor;
  }
  const std::int64_t left_stride = p.left_stride, row_words = p.row_words;
  const float* left = p.left + begin * kSteps;
  for (int group = begin; group < end; ++group) {
    const float* values = p.right[group] + column;
    const std::int64_t to_ahead = kAhead ? p.ahead[group] + column - values : 0;
    for (const float* last = left + kSteps; left < last; ++left, values += row_words) {
      Vec operand[kVecs];
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) {
        operand[j] = load_once(values + j * kLanes);
        if (j * kLanes % 16 == 0) ask_for<kAhead>(values + to_ahead + j * kLanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vec word = broadcast(left[i * left_stride]);
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sum[i][j] = multiply_add<kPairs>(sum[i][j], word, operand[j]);
      }
    }
  }
  out = p.out + column;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i, out += p.out_stride) {
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) store(out + j * kLanes, sum[i][j]);
    __asm__ volatile("" : "+r"(out));
  }
}

template <bool kPairs, int kRows, bool kAhead>
static void output_columns(const Product& p, int begin, int end) {
  constexpr int kWide = kProductVecs * kLanes;
  int column = 0;
  for (; column + kWide <= p.row_words; column += kWide)
    output_block<kPairs, kRows, kProductVecs, kAhead>(p, begin, end, column);
  if constexpr (kProductVecs > 2) {
    for (; column + 2 * kLanes <= p.row_words; column += 2 * kLanes)
      output_block<kPairs, kRows, 2, kAhead>(p, begin, end, column);
  }
  for (; column < p.row_words; column += kLanes) output_block<kPairs, kRows, 1, kAhead>(p, begin, end, column);
}

template <bool kPairs, bool kOutputs, int kRows>
static void product_rows(const Product& p, int begin, int end) {
  if constexpr (kOutputs) {
    if (p.ahead != nullptr)
      output_columns<kPairs, kRows, true>(p, begin, end);
    else
      output_columns<kPairs, kRows, false>(p, begin, end);
  } else {
    if (p.ahead != nullptr)
      score_groups<kPairs, kRows, true>(p, begin, end);
    else
      score_groups<kPairs, kRows, false>(p, begin, end);
  }
}

// The whole product of `rows` rows with groups begin..end: of keys, or (kOutputs) of values.
template <bool kPairs, bool kOutputs>
static void product(Product p, int rows, int begin, int end) {
  for (int done = 0; done < rows;) {
    const int left = rows - done;
    // Two halves rather than a full block and a small rest.
    int count = left;
    if (left > kProductRows) count = left < 2 * kProductRows ? (left + 1) / 2 : kProductRows;
    switch (count) {
      case 1:
        product_rows<kPairs, kOutputs, 1>(p, begin, end);
        break;
      case 2:
        product_rows<kPairs, kOutputs, 2>(p, begin, end);
        break;
      case 3:
        product_rows<kPairs, kOutputs, 3>(p, begin, end);
        break;
      default:
        if constexpr (kProductRows > 3) {
          if (count == 4) product_rows<kPairs, kOutputs, 4>(p, begin, end);
          if (count == 5) product_rows<kPairs, kOutputs, 5>(p, begin, end);
          if (count == 6) product_rows<kPairs, kOutputs, 6>(p, begin, end);
        }
    }
    done += count;
    p.left += count * p.left_stride;
    p.out += count * p.out_stride;
    if (kOutputs) p.factor += count;
    p.ahead = nullptr;  // the first rows have asked for it
  }
}

}  // namespace EV_ISA
}  // namespace evensong
