// Vectors of floats for the instruction set of this build. Included by the kernels only.
//
// Everything here lies in the namespace of the build (EV_ISA): inline functions of two builds must never be taken for
// each other by the linker, or an old processor would run code that it does not know. For the same reason kernels use no
// templates or inline functions of the standard library.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../kernels.h"

// gcc 12 takes the undefined operand inside its own AVX-512 intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace evensong {
namespace EV_ISA {

#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
#define EV_LANES 16
#else
#define EV_LANES 8
#endif

constexpr int kLanes = EV_LANES;
// Two vectors of outputs: few enough for a row alone to be read at the speed of memory, enough for the registers.
constexpr int kPanel = 2 * kLanes;

using Vec = float __attribute__((vector_size(4 * EV_LANES)));
using IntVec = std::int32_t __attribute__((vector_size(4 * EV_LANES)));
using HalfVec = std::uint16_t __attribute__((vector_size(2 * EV_LANES)));

static inline Vec set1(float x) { return Vec{} + x; }
static inline IntVec set1i(std::int32_t x) { return IntVec{} + x; }

static inline IntVec lane_numbers() {
#if EV_LANES == 16
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

static inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

static inline IntVec bits(Vec v) { return reinterpret_cast<IntVec>(v); }
static inline Vec from_bits(IntVec v) { return reinterpret_cast<Vec>(v); }

// mask lanes are 0 or -1, as comparisons give them.
static inline Vec select(IntVec mask, Vec yes, Vec no) { return from_bits((bits(yes) & mask) | (bits(no) & ~mask)); }

// The second where either is NaN, or both are zero: as the instruction does, which gcc does not find by itself.
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
static inline Vec max(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline Vec min(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(EV_AVX2)
static inline Vec max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
static inline Vec min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
static inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
static inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }
#endif

// a * b + c, rounded once where the instruction set has it.
static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(EV_AVX2)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Rounded to the nearest whole number; |x| < 2^22.
static inline Vec round(Vec x) {
  const Vec magic = set1(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

static inline IntVec to_int(Vec x) { return __builtin_convertvector(x, IntVec); }
static inline Vec to_float(IntVec x) { return __builtin_convertvector(x, Vec); }

// Sum of all lanes in one fixed order: halves are added until one lane is left.
static inline float reduce_add(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

static inline Vec load_bf16(const bf16* p) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#elif defined(EV_AVX2)
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  return from_bits(__builtin_convertvector(half, IntVec) << 16);
#endif
}

static inline float widen(bf16 x) {
  const std::uint32_t wide = static_cast<std::uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}

// To the nearest, ties to even; a NaN stays one. The same bits in every build.
static inline bf16 round_bf16(float x) {
  std::uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((wide >> 16) | 0x40u);
  return static_cast<bf16>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

static inline void store_bf16(bf16* p, Vec v) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  const __m512i wide = _mm512_castps_si512((__m512)v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(wide, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, wide, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#else
  const IntVec wide = bits(v);
  const IntVec rounded = wide + ((wide >> 16) & 1) + 0x7fff;
  const IntVec nan = v != v;
  const IntVec chosen = ((wide | 0x400000) & nan) | (rounded & ~nan);
  HalfVec half = __builtin_convertvector((chosen >> 16) & 0xffff, HalfVec);
  std::memcpy(p, &half, sizeof half);
#endif
}

// e^x as p * 2^n, for x between -104 and 89, else for the nearer of the two. What becomes of NaN is left open.
struct Exponential {
  Vec p, n;
};

static inline Exponential exponential(Vec x) {
  const Vec clamped = min(max(x, set1(-104.0f)), set1(89.0f));
  const Vec n = round(clamped * set1(1.44269504088896341f));
  Vec r = fma(n, set1(-0.693145751953125f), clamped);
  r = fma(n, set1(-1.428606765330187e-6f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return {p, n};
}

// e^x, within 2 units in the last place; 0 below -104 (also for -inf), +inf above 88.7; NaN stays one.
static inline Vec exp(Vec x) {
  const Exponential e = exponential(x);
  // Halves of 2^n on both sides keep the scale a normal number where the result is denormal or close to overflow.
  const IntVec whole = to_int(e.n);
  const IntVec half = whole >> 1;
  const Vec scale_a = from_bits((half + 127) << 23);
  const Vec scale_b = from_bits((whole - half + 127) << 23);
  const Vec y = select(x < set1(-104.0f), Vec{}, e.p * scale_a * scale_b);
  return select(x != x, x, y);
}

// gcc takes a function that only prefetches for one without effect, and drops calls of it that it has not inlined early.
// So whatever wraps this must be always_inline too.
__attribute__((always_inline)) static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace EV_ISA
}  // namespace evensong
