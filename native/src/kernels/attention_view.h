// What a call of attention works on, and how it comes to the keys and values of a tile: in place where the cache holds
// them as the products take them, else packed into scratch.
#pragma once

#include "attention_pack.h"
#include "ops.h"

namespace evensong {
namespace EV_ISA {
namespace {

constexpr int kPadRows = 16;  // per-row arrays may be read this far beyond the last row of a block

// What a call works on, and where its scratch lies. `rows` = queries x heads of the group, query by query.
struct Work {
  const AttentionArgs* args;
  const AttentionSpan* span;
  std::int32_t kv_head;
  int group, rows, head_dim, padded_dim, depth;
  int value_words;      // of a group's values
  bool grouped;         // blocks of the cache are: see cache_layout.h
  bool in_place;        // and hold words as the products take them
  float factor;         // from a (capped) score to its exponent of 2
  float* query;         // [rows, depth] words
  float* keys;          // groups, where they cannot be read in place: see attention_product.h
  float* values;
  float* scores;        // [kBlockRows, kTileKeys]
  float* weights;       // [kBlockRows, kTileKeys] words
  float* highest;       // [rows] of the split: the running maximum, in exponents of 2
  float* sums;          // [rows, kLanes]
  float* accumulators;  // [rows, padded_dim]
  float* totals;        // [rows, partial_size]: of the splits so far
  std::uintptr_t end;
};

float* take(std::uintptr_t* at, std::int64_t floats) {
  float* place = reinterpret_cast<float*>(*at);
  *at += static_cast<std::uintptr_t>((4 * floats + 63) / 64 * 64);
  return place;
}

Work make_work(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, char* memory) {
  Work w = {};
  w.args = &args;
  w.span = &span;
  w.kv_head = kv_head;
  w.group = args.num_heads / args.num_kv_heads;
  w.rows = span.num_queries * w.group;
  w.head_dim = args.head_dim;
  w.padded_dim = (args.head_dim + kLanes - 1) / kLanes * kLanes;
  w.depth = args.compute == DType::bf16 ? args.head_dim / 2 : args.head_dim;
  w.value_words = kGroupTokens / (args.compute == DType::bf16 ? 2 : 1) * w.padded_dim;
  w.grouped = cache_is_grouped(args.block_size, args.head_dim);
  w.in_place = w.grouped && args.compute == args.cache_type;
  w.factor = args.soft_cap > 0.0f ? kLog2E : args.scale * kLog2E;
  std::uintptr_t at = (reinterpret_cast<std::uintptr_t>(memory) + 63) / 64 * 64;
  w.query = take(&at, std::int64_t{w.rows} * w.depth);
  w.keys = take(&at, std::int64_t{kTileKeys} * w.depth);
  w.values = take(&at, std::int64_t{kTileKeys} * w.padded_dim);
  w.scores = take(&at, kBlockRows * kTileKeys);
  w.weights = take(&at, kBlockRows * kTileKeys);
  w.highest = take(&at, w.rows + kPadRows);
  w.sums = take(&at, std::int64_t{w.rows} * kLanes);
  w.accumulators = take(&at, std::int64_t{w.rows} * w.padded_dim);
  w.totals = take(&at, w.rows * partial_size(args));
  w.end = at;
  return w;
}

int visible_end(const Work& w, int query) { return w.span->first_position + query + 1; }

int visible_begin(const Work& w, int query) {
  const int begin = visible_end(w, query) - w.args->window;
  return w.args->window > 0 && begin > 0 ? begin : 0;
}

int clamp_to_tile(int key) { return key < 0 ? 0 : key > kTileKeys ? kTileKeys : key; }

void load_queries(const Work& w) {
  const std::size_t word = w.args->compute == DType::bf16 ? 2 : 4;
  for (int row = 0; row < w.rows; ++row) {
    const std::int64_t at = (w.span->first_row + row / w.group) * w.args->query_stride +
                            std::int64_t{w.kv_head * w.group + row % w.group} * w.head_dim;
    std::memcpy(w.query + std::int64_t{row} * w.depth, static_cast<const char*>(w.args->query) + at * word,
                word * w.head_dim);
  }
}

// Where the groups of a tile lie, in words as the products take them. Those that no query sees point anywhere. One more
// is read, though nothing at its address, by what prefetches.
struct TileView {
  const float* keys[kTileGroups];
  const float* values[kTileGroups + 1] = {};
};

// Rows of positions begin..end of the tile that starts at `tile`, and zeros around them up to whole steps.
void locate_rows(const Work& w, int tile, int begin, int end, TileRows* rows) {
  const AttentionArgs& args = *w.args;
  const char* zeros = reinterpret_cast<const char*>(kZeros);
  for (int i = begin; i % kKeyStep != 0; --i) rows->keys[i - 1] = rows->values[i - 1] = zeros;
  for (int i = end; i % kKeyStep != 0; ++i) rows->keys[i] = rows->values[i] = zeros;
  const std::int64_t element = args.cache_type == DType::f32 ? 4 : 2;
  const std::int64_t head = w.head_dim * element, to_values = args.num_kv_heads * head, stride = 2 * to_values;
  const char* cache = static_cast<const char*>(args.cache) + w.kv_head * head;
  for (int position = tile + begin; position < tile + end;) {
    const int block = position / args.block_size, offset = position % args.block_size;
    int count = args.block_size - offset;
    if (count > tile + end - position) count = tile + end - position;
    const char* at = cache + (std::int64_t{w.span->blocks[block]} * args.block_size + offset) * stride;
    for (int i = position - tile; i < position - tile + count; ++i, at += stride) {
      rows->keys[i] = at;
      rows->values[i] = at + to_values;
    }
    position += count;
  }
}

// Packs keys begin..end of a tile from rows; with `values_only` the keys are packed already.
template <bool kPairs>
void pack_rows(const Work& w, int tile, int begin, int end, bool values_only) {
  TileRows rows;
  locate_rows(w, tile, begin, end, &rows);
  begin = begin / kKeyStep * kKeyStep;
  end = (end + kKeyStep - 1) / kKeyStep * kKeyStep;
  const bool widen = !kPairs && w.args->cache_type == DType::bf16;
  if (widen) {
    if (!values_only) pack_keys<true>(rows.keys, begin, end, w.depth, w.keys);
    pack_values<kPairs, true>(rows.values, begin, end, w.head_dim, w.padded_dim, w.values);
  } else {
    if (!values_only) pack_keys<false>(rows.keys, begin, end, w.depth, w.keys);
    pack_values<kPairs, false>(rows.values, begin, end, w.head_dim, w.padded_dim, w.values);
  }
}

// Addresses in the cache of the groups that hold positions begin..end of a tile, for grouped blocks.
void locate_groups(const Work& w, int kv_head, int tile, int begin, int end, const char** groups) {
  const AttentionArgs& args = *w.args;
  const std::int64_t element = args.cache_type == DType::f32 ? 4 : 2;
  const std::int64_t block_bytes = std::int64_t{args.block_size} * 2 * args.num_kv_heads * w.head_dim * element;
  int group = begin / kGroupTokens;
  const int per_block = args.block_size / kGroupTokens, first = tile / kGroupTokens + group;
  int block = first / per_block, in_block = first % per_block;
  for (; group * kGroupTokens < end; ++group) {
    groups[group] = static_cast<const char*>(args.cache) + w.span->blocks[block] * block_bytes +
                    group_begin(args.block_size, w.head_dim, kv_head, in_block) * element;
    if (++in_block == per_block) {
      in_block = 0;
      ++block;
    }
  }
}

// Keys begin..end of a tile whose groups are given; with `values_only` the keys in `view` are those already.
template <bool kPairs>
void view_groups(const Work& w, const char* const* groups, int begin, int end, bool values_only, TileView* view) {
  const std::int64_t to_values = std::int64_t{kGroupTokens} * w.head_dim * (w.args->cache_type == DType::f32 ? 4 : 2);
  const int first = begin / kGroupTokens, last = (end + kGroupTokens - 1) / kGroupTokens;
  for (int g = first; g < last; ++g) {
    int from = begin - g * kGroupTokens, to = end - g * kGroupTokens;
    if (from < 0) from = 0;
    if (to > kGroupTokens) to = kGroupTokens;
    float* keys = w.keys + std::int64_t{g} * kGroupTokens * w.depth;
    float* values = w.values + std::int64_t{g} * w.value_words;
    const char* cached = groups[g] + to_values;
    if (w.in_place) {
      view->keys[g] = reinterpret_cast<const float*>(groups[g]);
      view->values[g] = values;
      if (from == 0 && to == kGroupTokens)
        view->values[g] = reinterpret_cast<const float*>(cached);
      else
        copy_values<kPairs>(reinterpret_cast<const float*>(cached), w.head_dim, from, to, values);
    } else {
      if (!values_only) widen_keys(groups[g], w.head_dim, keys);
      widen_values(cached, w.head_dim, from, to, values);
      view->keys[g] = keys;
      view->values[g] = values;
    }
  }
  // Scores are computed for whole steps, and masked.
  if (values_only) return;
  if (first % 2 != 0) view->keys[first - 1] = view->keys[first];
  if (last % 2 != 0) view->keys[last] = view->keys[last - 1];
}

// Makes keys begin..end of a tile readable; `groups` are its groups where blocks are grouped.
template <bool kPairs>
void view_tile(const Work& w, const char* const* groups, int tile, int begin, int end, bool values_only,
               TileView* view) {
  if (w.grouped) return view_groups<kPairs>(w, groups, begin, end, values_only, view);
  pack_rows<kPairs>(w, tile, begin, end, values_only);
  for (int g = 0; g < kTileGroups; ++g) {
    view->keys[g] = w.keys + std::int64_t{g} * kGroupTokens * w.depth;
    view->values[g] = w.values + std::int64_t{g} * w.value_words;
  }
}

// What to read after keys up to `last` of the tile before `tile`: the next tile's keys up to `limit` or, after the last,
// the next kv head's first ones, which the same thread is likely to be handed next. False where nothing is known.
bool look_ahead(const Work& w, int tile, int limit, const char** groups, const float** ahead) {
  if (!w.in_place) {
    if (w.grouped && tile < limit) locate_groups(w, w.kv_head, tile, 0, clamp_to_tile(limit - tile), groups);
    return false;
  }
  int begin = 0, end = clamp_to_tile(limit - tile), kv_head = w.kv_head;
  const char* next[kTileGroups];
  if (end > 0) {
    locate_groups(w, kv_head, tile, begin, end, groups);
    std::memcpy(next, groups, sizeof next);
  } else {
    if (++kv_head == w.args->num_kv_heads) return false;
    begin = visible_begin(w, 0);
    tile = begin / kTileKeys * kTileKeys;
    begin -= tile;
    end = clamp_to_tile(visible_end(w, w.span->num_queries - 1) - tile);
    locate_groups(w, kv_head, tile, begin, end, next);
  }
  const int first = begin / kGroupTokens, last = (end - 1) / kGroupTokens;
  for (int g = 0; g < kTileGroups; ++g) {
    const char* group = next[g < first ? first : g < last ? g : last];
    ahead[g] = reinterpret_cast<const float*>(group);
  }
  return true;
}

}  // namespace
}  // namespace EV_ISA
}  // namespace evensong
