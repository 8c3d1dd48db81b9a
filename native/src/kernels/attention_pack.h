// Packing of the keys and values of an attention tile into groups that the products of attention_product.h read, where
// the cache holds rows (cache_layout.h says when), words of another kind, or values that a query must not see.
#pragma once

#include "attention_product.h"

namespace evensong {
namespace EV_ISA {

constexpr int kMaxHeadDim = 256;

// Where the keys and values of a tile lie.
struct TileRows {
  const char* keys[kTileKeys];
  const char* values[kTileKeys];
};

alignas(64) static const float kZeros[kMaxHeadDim] = {};

// Words first.. of a row, `count` of them if that is less than a vector; the rest is zero. kWiden: bf16 to floats.
template <bool kWiden>
static inline Vec load_words(const char* row, int first, int count) {
  if constexpr (kWiden) {
    const bf16* at = reinterpret_cast<const bf16*>(row) + first;
    if (count >= kLanes) return load_bf16(at);
    bf16 some[kLanes] = {};
    std::memcpy(some, at, static_cast<std::size_t>(count) * 2);
    return load_bf16(some);
  }
  const char* at = row + 4 * first;
  Vec v;
  if (count >= kLanes) {
    std::memcpy(&v, at, sizeof v);
    return v;
  }
  float some[kLanes] = {};
  std::memcpy(some, at, static_cast<std::size_t>(count) * 4);
  return load(some);
}

// Row i, column j becomes row j, column i.
static inline void transpose(Vec* rows) {
#if EV_LANES == 16
  __m512i t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i a = (__m512i)rows[2 * i], b = (__m512i)rows[2 * i + 1];
    t[2 * i] = _mm512_unpacklo_epi32(a, b);
    t[2 * i + 1] = _mm512_unpackhi_epi32(a, b);
  }
  // u[4g + c]: quarter q holds column 4q + c of rows 4g..4g+3.
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) {
    u[g] = _mm512_unpacklo_epi64(t[g], t[g + 2]);
    u[g + 1] = _mm512_unpackhi_epi64(t[g], t[g + 2]);
    u[g + 2] = _mm512_unpacklo_epi64(t[g + 1], t[g + 3]);
    u[g + 3] = _mm512_unpackhi_epi64(t[g + 1], t[g + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_a = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88);
    const __m512i odd_a = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
    const __m512i even_b = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
    const __m512i odd_b = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
    rows[c] = (Vec)_mm512_shuffle_i32x4(even_a, even_b, 0x88);
    rows[4 + c] = (Vec)_mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
    rows[8 + c] = (Vec)_mm512_shuffle_i32x4(even_a, even_b, 0xdd);
    rows[12 + c] = (Vec)_mm512_shuffle_i32x4(odd_a, odd_b, 0xdd);
  }
#else
  Vec t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  // u[4g + c]: half h holds column 4h + c of rows 4g..4g+3.
  for (int g = 0; g < 8; g += 4) {
    u[g] = __builtin_shufflevector(t[g], t[g + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    u[g + 1] = __builtin_shufflevector(t[g], t[g + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    u[g + 2] = __builtin_shufflevector(t[g + 1], t[g + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    u[g + 3] = __builtin_shufflevector(t[g + 1], t[g + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int c = 0; c < 4; ++c) {
    rows[c] = __builtin_shufflevector(u[c], u[4 + c], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[4 + c] = __builtin_shufflevector(u[c], u[4 + c], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#endif
}

// Keys begin..end, multiples of kLanes, of `depth` words each.
template <bool kWiden>
static void pack_keys(const char* const* rows, int begin, int end, int depth, float* groups) {
  for (int key = begin; key < end; key += kLanes) {
    float* out = groups + key / kGroupTokens * kGroupTokens * depth + key % kGroupTokens;
    int first = 0;
    for (; first + kLanes <= depth; first += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load_words<kWiden>(rows[key + i], first, kLanes);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (first + i) * kGroupTokens, block[i]);
    }
    if (first < depth) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load_words<kWiden>(rows[key + i], first, depth - first);
      transpose(block);
      for (int i = 0; first + i < depth; ++i) store(out + (first + i) * kGroupTokens, block[i]);
    }
  }
}

// A word holds component d of a pair of keys.
static inline Vec pair_values(Vec even, Vec odd) {
  // Widened, a component is in the upper half of its lane: right for the second key of the pair.
  using Unsigned = std::uint32_t __attribute__((vector_size(4 * EV_LANES)));
  const Unsigned low = reinterpret_cast<Unsigned>(even) >> 16;
  return from_bits(bits(odd) | reinterpret_cast<IntVec>(low));
}

// Components d.. of a pair of keys; returns how many of them are done, as many as whole vectors of bf16 hold.
static inline int pair_whole_vectors(const char* even, const char* odd, int head_dim, float* out) {
  int d = 0;
#if defined(EV_AVX512_BF16)
  // Elements 0, 32, 1, 33, .. of both rows side by side: a word n has 32 + n above n.
  const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(32)), 16));
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (; d + 32 <= head_dim; d += 32) {
    const __m512i a = _mm512_loadu_si512(even + 2 * d), b = _mm512_loadu_si512(odd + 2 * d);
    store(out + d, (Vec)_mm512_permutex2var_epi16(a, low, b));
    store(out + d + 16, (Vec)_mm512_permutex2var_epi16(a, high, b));
  }
#else
  (void)even, (void)odd, (void)head_dim, (void)out;
#endif
  return d;
}

// Values of keys begin..end, even numbers, `padded` words a row.
template <bool kPairs, bool kWiden>
static void pack_values(const char* const* rows, int begin, int end, int head_dim, int padded, float* out) {
  constexpr int kStep = kPairs ? 2 : 1;
  out += (begin / kStep) * padded;
  for (int key = begin; key < end; key += kStep, out += padded) {
    int d = 0;
    if constexpr (kPairs) {
      d = pair_whole_vectors(rows[key], rows[key + 1], head_dim, out);
      for (; d < head_dim; d += kLanes)
        store(out + d, pair_values(load_words<true>(rows[key], d, head_dim - d),
                                   load_words<true>(rows[key + 1], d, head_dim - d)));
    } else {
      for (; d + kLanes <= head_dim; d += kLanes) store(out + d, load_words<kWiden>(rows[key], d, kLanes));
      if (d < head_dim) store(out + d, load_words<kWiden>(rows[key], d, head_dim - d));
    }
  }
}

// What a cache of bf16 holds in a vector of words or, where it is not paired, of single elements.
#if defined(EV_AVX512_BF16)
constexpr bool kCachePairs = true;
#else
constexpr bool kCachePairs = false;
#endif

// A group's keys, from bf16 in the cache to [head_dim][16] floats.
static void widen_keys(const char* group, int head_dim, float* out) {
  if constexpr (kCachePairs) {
    for (int d = 0; d < head_dim; d += 2, group += 4 * kGroupTokens, out += 2 * kGroupTokens) {
      const IntVec pairs = bits(load(reinterpret_cast<const float*>(group)));
      store(out, from_bits(pairs << 16));
      store(out + kGroupTokens, from_bits(pairs & set1i(-0x10000)));
    }
  } else {
    const bf16* from = reinterpret_cast<const bf16*>(group);
    for (int i = 0; i < head_dim * kGroupTokens; i += kLanes) store(out + i, load_bf16(from + i));
  }
}

// A group's values, from bf16 in the cache to [16][head_dim] floats: those of tokens begin..end, else zeros.
static void widen_values(const char* group, int head_dim, int begin, int end, float* out) {
  const bf16* from = reinterpret_cast<const bf16*>(group);
  std::memset(out, 0, sizeof(float) * begin * head_dim);
  std::memset(out + end * head_dim, 0, sizeof(float) * (kGroupTokens - end) * head_dim);
  for (int token = begin; token < end; ++token) {
    float* to = out + token * head_dim;
    if constexpr (kCachePairs) {
      const float* pairs = reinterpret_cast<const float*>(from) + token / 2 * head_dim;
      for (int d = 0; d < head_dim; d += kLanes) {
        const IntVec pair = bits(load(pairs + d));
        store(to + d, from_bits(token % 2 == 0 ? pair << 16 : pair & set1i(-0x10000)));
      }
    } else {
      for (int d = 0; d < head_dim; d += kLanes) store(to + d, load_bf16(from + token * head_dim + d));
    }
  }
}

// A group's values as they are: those of tokens begin..end, else zeros.
template <bool kPairs>
static void copy_values(const float* group, int head_dim, int begin, int end, float* out) {
  constexpr int kStep = kPairs ? 2 : 1;
  for (int token = 0; token < kGroupTokens; token += kStep, group += head_dim, out += head_dim) {
    std::int32_t mask = token >= begin && token < end ? -1 : 0;
    if constexpr (kPairs) {
      const bool second = token + 1 >= begin && token + 1 < end;
      mask = (mask & 0xffff) | (second ? -0x10000 : 0);
    }
    for (int d = 0; d < head_dim; d += kLanes) store(out + d, from_bits(bits(load(group + d)) & set1i(mask)));
  }
}

// Whether no element of `count` words (a multiple of kLanes) is infinite or NaN.
template <bool kPairs>
static bool all_finite(const float* words, std::int64_t count) {
  const IntVec exponent = set1i(0x7f800000);
  IntVec found = {};
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const IntVec word = bits(load(words + i));
    found |= (word & exponent) == exponent;
    if constexpr (kPairs) found |= ((word << 16) & exponent) == exponent;
  }
  std::int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= found[i];
  return any == 0;
}

}  // namespace EV_ISA
}  // namespace evensong
