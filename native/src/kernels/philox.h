// Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) over a stretch of token ids.
//
// Key: the seed. Counter: (token id / 4, position, purpose, 0); the word of a token is that of its id mod 4.
#pragma once

#include "lanes.h"

namespace evensong {
namespace EV_ISA {

// Tokens whose words are made at once: a counter in each lane of 64 bits, four words from each.
constexpr int kChunk = 2 * kLanes;

// Products of the low 32 bits of the lanes; b has nothing above them.
static inline LongVec multiply(LongVec a, LongVec b) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  return (LongVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(EV_AVX2)
  return (LongVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  __m128i left[kLanes / 4], right[kLanes / 4];
  std::memcpy(left, &a, sizeof a);
  std::memcpy(right, &b, sizeof b);
  for (int i = 0; i < kLanes / 4; ++i) left[i] = _mm_mul_epu32(left[i], right[i]);
  std::memcpy(&a, left, sizeof a);
  return a;
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Lanes of a and b in turn: a0 b0 a1 b1 ...
static inline void interleave(LongVec a, LongVec b, UintVec* first, UintVec* second) {
#if defined(EV_AVX512) || defined(EV_AVX512_BF16)
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  *first = (UintVec)_mm512_permutex2var_epi64((__m512i)a, low, (__m512i)b);
  *second = (UintVec)_mm512_permutex2var_epi64((__m512i)a, high, (__m512i)b);
#elif defined(EV_AVX2)
  const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
  *first = (UintVec)_mm256_permute2x128_si256(even, odd, 0x20);
  *second = (UintVec)_mm256_permute2x128_si256(even, odd, 0x31);
#else
  LongVec both[2];
  for (int i = 0; i < kHalf; ++i) {
    both[2 * i / kHalf][2 * i % kHalf] = a[i];
    both[2 * i / kHalf][2 * i % kHalf + 1] = b[i];
  }
  *first = reinterpret_cast<UintVec>(both[0]);
  *second = reinterpret_cast<UintVec>(both[1]);
#endif
}

// The words of tokens first_token .. first_token + kChunk - 1; first_token is a multiple of kChunk.
static inline void random_chunk(std::uint64_t seed, std::uint64_t position, std::int64_t first_token,
                                UintVec words[2]) {
  LongVec c0;
  for (int i = 0; i < kHalf; ++i) c0[i] = static_cast<std::uint64_t>(i);
  c0 += static_cast<std::uint64_t>(first_token) / 4;
  LongVec c1 = LongVec{} + position, c2 = LongVec{}, c3 = LongVec{};
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  // What stands above the low 32 bits of a lane never matters: products leave it out, and so does the end.
  for (int round = 0; round < 10; ++round) {
    const LongVec product0 = multiply(c0, LongVec{} + 0xd2511f53u);
    const LongVec product1 = multiply(c2, LongVec{} + 0xcd9e8d57u);
    c0 = (product1 >> 32) ^ c1 ^ (LongVec{} + k0);
    c2 = (product0 >> 32) ^ c3 ^ (LongVec{} + k1);
    c1 = product1;
    c3 = product0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  const LongVec low = LongVec{} + 0xffffffffu;
  interleave((c0 & low) | (c1 << 32), (c2 & low) | (c3 << 32), &words[0], &words[1]);
}

}  // namespace EV_ISA
}  // namespace evensong
