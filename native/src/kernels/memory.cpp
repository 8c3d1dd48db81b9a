// Passes over memory at its own speed.
#include "ops.h"

namespace evensong {
namespace EV_ISA {

namespace {

constexpr int kChains = 8;
constexpr std::size_t kChunk = 64;
constexpr std::size_t kAhead = 4096;

// Constants of xxHash64 (Y. Collet): odd, with bits well spread.
constexpr std::uint64_t kPrimeA = 0x9e3779b185ebca87u;
constexpr std::uint64_t kPrimeB = 0xc2b2ae3d27d4eb4fu;

// One to one in `state` for a given word and the other way round: a difference in either never gets lost. The product
// spreads bits upwards only, so the upper half then goes into the lower.
inline std::uint64_t mix(std::uint64_t state, std::uint64_t word) {
  std::uint64_t product = (state ^ word) * kPrimeA;
  // Keeps the compiler from using vectors: those of avx2 multiply 64 bits at a quarter of the speed.
  __asm__("" : "+r"(product));
  return product ^ (product >> 32);
}

inline void mix_chunk(std::uint64_t* state, const char* data) {
  std::uint64_t words[kChains];
  std::memcpy(words, data, kChunk);
  for (int i = 0; i < kChains; ++i) state[i] = mix(state[i], words[i]);
}

}  // namespace

std::uint64_t read(const void* data, std::size_t bytes) {
  using Words = std::uint64_t __attribute__((vector_size(4 * EV_LANES)));
  constexpr std::size_t kVectors = 8;
  constexpr std::size_t kStride = kVectors * sizeof(Words);
  const char* p = static_cast<const char*>(data);
  Words sums[kVectors] = {};
  std::size_t at = 0;
  for (; at + kStride <= bytes; at += kStride) {
    for (std::size_t line = 0; line < kStride; line += 64) prefetch(p + at + kAhead + line);
    for (std::size_t i = 0; i < kVectors; ++i) {
      Words words;
      std::memcpy(&words, p + at + i * sizeof words, sizeof words);
      sums[i] += words;
    }
  }
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < kVectors; ++i)
    for (std::size_t j = 0; j < sizeof(Words) / 8; ++j) total += sums[i][j];
  for (; at < bytes; ++at) total += static_cast<unsigned char>(p[at]);
  return total;
}

// Eight chains of words, joined in order; the last chunk is filled with zeros, and the length tells it from real ones.
std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed) {
  const char* p = static_cast<const char*>(data);
  std::uint64_t state[kChains];
  for (int i = 0; i < kChains; ++i) state[i] = mix(seed + static_cast<std::uint64_t>(i) * kPrimeB, kPrimeB);
  std::size_t at = 0;
  for (; at + kChunk <= bytes; at += kChunk) {
    prefetch(p + at + kAhead);
    mix_chunk(state, p + at);
  }
  if (at < bytes) {
    char last[kChunk] = {};
    std::memcpy(last, p + at, bytes - at);
    mix_chunk(state, last);
  }
  std::uint64_t total = mix(seed, bytes);
  for (int i = 0; i < kChains; ++i) total = mix(total, state[i]);
  total = (total ^ (total >> 32)) * kPrimeB;
  return total ^ (total >> 29);
}

}  // namespace EV_ISA
}  // namespace evensong
