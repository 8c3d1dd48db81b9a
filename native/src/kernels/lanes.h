// Masks and 64-bit lanes beside the vectors of vec.h: what the sampler needs.
#pragma once

#include "vec.h"

// GCC's own header leaves lanes undefined where no mask asks for them, and GCC 12 warns of that.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace evensong {
namespace EV_ISA {

constexpr int kHalf = kLanes / 2;

using UintVec = std::uint32_t __attribute__((vector_size(4 * EV_LANES)));
// Half as many lanes of 64 bits.
using LongVec = std::uint64_t __attribute__((vector_size(4 * EV_LANES)));
using DoubleVec = double __attribute__((vector_size(4 * EV_LANES)));

#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
using Mask = __mmask16;
static inline Mask at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
static inline Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
static inline Mask unordered(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q); }
static inline std::uint32_t to_bits(Mask mask) { return mask; }
static inline Vec keep(Mask mask, Vec x) { return (Vec)_mm512_maskz_mov_ps(mask, (__m512)x); }
#else
using Mask = IntVec;
static inline Mask at_least(Vec a, Vec b) { return a >= b; }
static inline Mask equal(Vec a, Vec b) { return a == b; }
static inline Mask unordered(Vec a, Vec b) { return (a != a) | (b != b); }
static inline Vec keep(Mask mask, Vec x) { return from_bits(bits(x) & mask); }
#if defined(EV_AVX2)
static inline std::uint32_t to_bits(Mask mask) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)from_bits(mask)));
}
#else
static inline std::uint32_t to_bits(Mask mask) {
  std::uint32_t result = 0;
#if defined(__SSE2__)
  __m128 parts[kLanes / 4];
  std::memcpy(parts, &mask, sizeof mask);
  for (int i = 0; i < kLanes / 4; ++i) result |= static_cast<std::uint32_t>(_mm_movemask_ps(parts[i])) << (4 * i);
#else
  for (int i = 0; i < kLanes; ++i) result |= static_cast<std::uint32_t>(mask[i] & (1 << i));
#endif
  return result;
}
#endif
#endif

// Lanes whose bit is set, the lowest for the first.
static inline Mask lanes_of(std::uint32_t lane_bits) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return static_cast<Mask>(lane_bits);
#else
  return ((set1i(static_cast<std::int32_t>(lane_bits)) >> lane_numbers()) & 1) != 0;
#endif
}

// `x`, and -inf where the mask is not set.
static inline Vec or_never(Mask mask, Vec x) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return (Vec)_mm512_mask_blend_ps(mask, (__m512)set1(-__builtin_inff()), (__m512)x);
#else
  return select(mask, x, set1(-__builtin_inff()));
#endif
}

// Floats of a row from p on, of which `left` are there; the rest is -inf.
static inline Vec load_part(const float* p, std::int64_t left) {
  if (left >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < left ? p[i] : -__builtin_inff();
  return load(lanes);
}

// The first and the second half of the lanes as doubles.
struct Doubles {
  DoubleVec low, high;
};

static inline Doubles to_double(Vec v) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return {(DoubleVec)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)),
          (DoubleVec)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1))};
#elif defined(EV_AVX2)
  return {(DoubleVec)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
          (DoubleVec)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1))};
#else
  Doubles result;
  for (int i = 0; i < kHalf; ++i) {
    result.low[i] = static_cast<double>(v[i]);
    result.high[i] = static_cast<double>(v[i + kHalf]);
  }
  return result;
#endif
}

// Sum of all lanes in one fixed order: halves are added until one lane is left.
static inline double reduce_add(DoubleVec v) {
  double lanes[kHalf];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kHalf / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Whole numbers in the order of the floats they stand for; both zeros are 0.
static inline std::int32_t to_key(float x) {
  std::int32_t k;
  std::memcpy(&k, &x, 4);
  return k < 0 ? -(k & 0x7fffffff) : k;
}

static inline float from_key(std::int32_t key) {
  const std::uint32_t k =
      key < 0 ? 0x80000000u | (0u - static_cast<std::uint32_t>(key)) : static_cast<std::uint32_t>(key);
  float x;
  std::memcpy(&x, &k, 4);
  return x;
}

static inline IntVec to_key(Vec x) {
  const IntVec sign = bits(x) >> 31;
  return ((bits(x) & 0x7fffffff) ^ sign) - sign;
}

}  // namespace EV_ISA
}  // namespace evensong
