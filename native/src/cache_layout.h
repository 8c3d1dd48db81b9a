// Where the keys and values of a token lie inside a block of the cache. `rope` writes there, `attention` reads it.
//
// A block is block_size rows of 2 * num_kv_heads * head_dim elements of memory. Where block_size and head_dim are
// multiples of 16 it is arranged as the products of attention want it, so that they read it in place: by kv head, then
// by group of 16 tokens, and in each group first the keys and then the values,
//   pairs:      keys [head_dim / 2][16 tokens][2],  values [8 pairs of tokens][head_dim][2]
//   otherwise:  keys [head_dim][16 tokens],         values [16 tokens][head_dim]
// `pairs` is Kernels::pairs with a bfloat16 cache. Other blocks hold a row for each token: the keys of all heads, then
// their values.
#pragma once

#include <cstdint>

namespace evensong {

constexpr int kGroupTokens = 16;

// Functions are static: builds for several instruction sets include this (see kernels/vec.h).
static inline bool cache_is_grouped(std::int32_t block_size, std::int32_t head_dim) {
  return block_size % kGroupTokens == 0 && head_dim % kGroupTokens == 0;
}

// Elements from the start of a grouped block to the keys of a group; its values are kGroupTokens * head_dim further.
static inline std::int64_t group_begin(std::int32_t block_size, std::int32_t head_dim, std::int32_t kv_head,
                                       std::int32_t group) {
  return (std::int64_t{kv_head} * (block_size / kGroupTokens) + group) * 2 * kGroupTokens * head_dim;
}

// Component d of a token's key, from the start of its group.
static inline std::int64_t key_element(bool pairs, std::int32_t token, std::int32_t d) {
  return pairs ? (d / 2 * kGroupTokens + token) * 2 + d % 2 : d * kGroupTokens + token;
}

// Component d of a token's value, from the start of the group's values.
static inline std::int64_t value_element(bool pairs, std::int32_t head_dim, std::int32_t token, std::int32_t d) {
  return pairs ? (token / 2 * head_dim + d) * 2 + token % 2 : token * head_dim + d;
}

}  // namespace evensong
