// Attention of a span's queries over the paged cache, one kv head and its group of query heads at a time.
//
// A query reduces over tiles of kTileKeys keys, anchored at position 0 of its sequence, with a running maximum, sum and
// accumulator (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention,
// 2022). Every kSplitKeys positions the partial result is closed and merged into the total, in order: splits that are
// computed elsewhere and merged later give the same bits.
#include "attention_pack.h"
#include "ops.h"

namespace evensong {
namespace EV_ISA {
namespace {

static_assert(kSplitKeys % kTileKeys == 0 && kTileKeys % kKeyStep == 0);
static_assert(kKeyStep % (2 * kLanes) == 0 && kKeyStep % (2 * kGroupTokens) == 0);
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

// One row's result for some of its keys: accumulator [padded_dim], then maximum and sum.
struct Partial {
  float* values;
  int padded_dim;
  float& highest() const { return values[padded_dim]; }
  float& sum() const { return values[padded_dim + 1]; }
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

// Caps and masks the block's scores where needed, and finds each row's maximum.
void finish_scores(const Work& w, int first_row, int rows, int tile, int begin, int end, float* tops) {
  const AttentionArgs& args = *w.args;
  for (int i = 0; i < rows; ++i) {
    float* scores = w.scores + i * kTileKeys;
    const int query = (first_row + i) / w.group;
    if (args.soft_cap > 0.0f) {
      for (int j = begin; j < end; j += kLanes)
        store(scores + j, cap_scores(load(scores + j), args.scale, args.soft_cap));
    }
    const int from = clamp_to_tile(visible_begin(w, query) - tile), to = clamp_to_tile(visible_end(w, query) - tile);
    if (from > begin || to < end) mask_scores(scores, begin, end, from, to);
    tops[i] = highest_score(scores, begin, end) * w.factor;
  }
}

// Rows first_row.. (at most kBlockRows) take in the tile that starts at position `tile`; `ahead` may be nullptr.
template <bool kPairs>
void attend_rows(const Work& w, const TileView& view, const float* const* ahead, int first_row, int rows, int tile) {
  const int first_query = first_row / w.group, last_query = (first_row + rows - 1) / w.group;
  const int from = clamp_to_tile(visible_begin(w, first_query) - tile);
  const int to = clamp_to_tile(visible_end(w, last_query) - tile);
  const int begin = from / kKeyStep * kKeyStep, end = (to + kKeyStep - 1) / kKeyStep * kKeyStep;
  if (from >= to) return;
  Product scores = {};
  scores.left = w.query + std::int64_t{first_row} * w.depth;
  scores.left_stride = scores.depth = w.depth;
  scores.right = view.keys;
  scores.ahead = first_row == 0 && w.in_place ? view.values : nullptr;
  scores.out = w.scores;
  scores.out_stride = kTileKeys;
  product<kPairs, false>(scores, rows, begin / kGroupTokens, end / kGroupTokens);
  alignas(64) float tops[kPadRows], factors[kPadRows];
  for (int i = 0; i < kPadRows; ++i) tops[i] = kLowest;
  finish_scores(w, first_row, rows, tile, begin, end, tops);
  for (int i = 0; i < kPadRows; i += kLanes) {
    float* highest = w.highest + first_row + i;
    const Vec before = load(highest), now = max(before, load(tops + i));
    store(factors + i, exp2<false>(before - now));
    store(tops + i, now);
    store(highest, now);  // beyond the block it is what it was
  }
  for (int i = 0; i < rows; ++i) {
    float* sum = w.sums + std::int64_t{first_row + i} * kLanes;
    const Vec kept = load(sum) * broadcast(factors[i]);
    store(sum, weigh<kPairs>(w.scores + i * kTileKeys, w.factor, tops[i], kept, w.weights + i * kTileKeys, begin, end));
  }
  Product outputs = {};
  outputs.left = w.weights;
  outputs.left_stride = kTileKeys;
  outputs.right = view.values;
  outputs.ahead = ahead;
  outputs.out = w.accumulators + std::int64_t{first_row} * w.padded_dim;
  outputs.out_stride = outputs.row_words = w.padded_dim;
  outputs.factor = factors;
  product<kPairs, true>(outputs, rows, from / kGroupTokens, (to + kGroupTokens - 1) / kGroupTokens);
}

template <bool kPairs>
void attend_all_rows(const Work& w, const TileView& view, const float* const* ahead, int first_row, int rows, int tile) {
  for (int done = 0; done < rows; done += kBlockRows, ahead = nullptr)
    attend_rows<kPairs>(w, view, ahead, first_row + done, rows - done < kBlockRows ? rows - done : kBlockRows, tile);
}

// A weight of zero does not hide a value that is infinite or NaN, so each query is given its visible values only.
template <bool kPairs>
void attend_one_by_one(const Work& w, const char* const* groups, TileView* view, int tile, int from, int to) {
  for (int query = 0; query < w.span->num_queries; ++query) {
    int begin = visible_begin(w, query) - tile, end = visible_end(w, query) - tile;
    if (begin < from) begin = from;
    if (end > to) end = to;
    if (begin >= end) continue;
    view_tile<kPairs>(w, groups, tile, begin, end, true, view);
    attend_all_rows<kPairs>(w, *view, nullptr, query * w.group, w.group, tile);
  }
}

// All queries take in keys from..to of a tile.
template <bool kPairs>
void attend_tile(const Work& w, const char* const* groups, const float* const* ahead, int tile, int from, int to) {
  TileView view;
  view_tile<kPairs>(w, groups, tile, from, to, false, &view);
  bool finite = true;
  if (visible_end(w, 0) < tile + to || visible_begin(w, w.span->num_queries - 1) > tile + from) {
    for (int g = from / kGroupTokens; finite && g * kGroupTokens < to; ++g)
      finite = all_finite<kPairs>(view.values[g], w.value_words);
  }
  if (finite)
    attend_all_rows<kPairs>(w, view, ahead, 0, w.rows, tile);
  else
    attend_one_by_one<kPairs>(w, groups, &view, tile, from, to);
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

// The keys of one split; leaves highest, sums and accumulators. Positions up to `limit` may be prefetched.
template <bool kPairs>
void run_split(const Work& w, int split, int limit) {
  for (int i = 0; i < w.rows + kPadRows; ++i) w.highest[i] = kLowest;
  std::memset(w.sums, 0, sizeof(float) * w.rows * kLanes);
  std::memset(w.accumulators, 0, sizeof(float) * w.rows * w.padded_dim);
  const int first_key = visible_begin(w, 0), last_key = visible_end(w, w.span->num_queries - 1);
  const int begin = first_key > split * kSplitKeys ? first_key : split * kSplitKeys;
  const int end = last_key < (split + 1) * kSplitKeys ? last_key : (split + 1) * kSplitKeys;
  if (begin >= end) return;
  const char* both[2][kTileGroups];
  const float* ahead[kTileGroups + 1] = {};
  int tile = begin / kTileKeys * kTileKeys;
  if (w.grouped) locate_groups(w, w.kv_head, tile, begin - tile, clamp_to_tile(end - tile), both[0]);
  for (int current = 0; tile < end; tile += kTileKeys, current ^= 1) {
    const bool known = look_ahead(w, tile + kTileKeys, limit, both[current ^ 1], ahead);
    attend_tile<kPairs>(w, both[current], known ? ahead : nullptr, tile, clamp_to_tile(begin - tile),
                        clamp_to_tile(end - tile));
  }
}

void run_split(const Work& w, int split, int limit) {
#if defined(EV_AVX512_BF16)
  if (w.args->compute == DType::bf16) return run_split<true>(w, split, limit);
#endif
  run_split<false>(w, split, limit);
}

Partial row_of(float* partials, int row, int padded_dim) {
  return {partials + std::int64_t{row} * (padded_dim + 2), padded_dim};
}

void clear(const Partial& total) {
  std::memset(total.values, 0, sizeof(float) * total.padded_dim);
  total.highest() = kLowest;
  total.sum() = 0.0f;
}

// total += a later part. One that has seen nothing changes nothing.
void merge(const Partial& total, const float* values, float highest, float sum) {
  float pair[kLanes] = {total.highest(), highest};
  const float now = total.highest() > highest ? total.highest() : highest;
  store(pair, exp2<false>(load(pair) - broadcast(now)));
  total.highest() = now;
  total.sum() = total.sum() * pair[0] + sum * pair[1];
  const Vec before = broadcast(pair[0]), later = broadcast(pair[1]);
  for (int d = 0; d < total.padded_dim; d += kLanes)
    store(total.values + d, load(total.values + d) * before + load(values + d) * later);
}

// Divides and rounds a row's total.
void finish(const Work& w, int row, const float* values, float sum) {
  const bool narrow = w.args->compute == DType::bf16;
  const std::int64_t at = (w.span->first_row + row / w.group) * w.args->out_stride +
                          std::int64_t{w.kv_head * w.group + row % w.group} * w.head_dim;
  char* out = static_cast<char*>(w.args->out) + at * (narrow ? 2 : 4);
  const Vec inverse = broadcast(1.0f / sum);
  for (int d = 0; d < w.head_dim; d += kLanes) {
    // Keys of weight zero leave the sign of a zero open: + 0 settles it.
    const Vec result = load(values + d) * inverse + Vec{};
    float some[kLanes];
    if (narrow)
      store_bf16(reinterpret_cast<bf16*>(some), result);
    else
      store(some, result);
    const int count = w.head_dim - d < kLanes ? w.head_dim - d : kLanes;
    std::memcpy(out + d * (narrow ? 2 : 4), some, static_cast<std::size_t>(count) * (narrow ? 2 : 4));
  }
}

const float* accumulator(const Work& w, int row) { return w.accumulators + std::int64_t{row} * w.padded_dim; }

float row_sum(const Work& w, int row) { return sum_of_lanes(load(w.sums + std::int64_t{row} * kLanes)); }

// Partial results hold padded_dim floats, maximum and sum; rows of `partials` are unaligned.
void merge_rows(const Work& w) {
  for (int row = 0; row < w.rows; ++row)
    merge(row_of(w.totals, row, w.padded_dim), accumulator(w, row), w.highest[row], row_sum(w, row));
}

}  // namespace

void attention(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, Scratch scratch) {
  const Work w = make_work(args, span, kv_head, scratch.data);
  load_queries(w);
  const int last_key = visible_end(w, span.num_queries - 1);
  int split = visible_begin(w, 0) / kSplitKeys;
  if (last_key <= (split + 1) * kSplitKeys) {
    // Merged with nothing, a single split would be what it is.
    run_split(w, split, last_key);
    for (int row = 0; row < w.rows; ++row) finish(w, row, accumulator(w, row), row_sum(w, row));
    return;
  }
  for (int row = 0; row < w.rows; ++row) clear(row_of(w.totals, row, w.padded_dim));
  for (; split * kSplitKeys < last_key; ++split) {
    run_split(w, split, last_key);
    merge_rows(w);
  }
  for (int row = 0; row < w.rows; ++row) {
    const Partial total = row_of(w.totals, row, w.padded_dim);
    finish(w, row, total.values, total.sum());
  }
}

void attention_split(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, std::int32_t split,
                     float* partial, Scratch scratch) {
  const Work w = make_work(args, span, kv_head, scratch.data);
  load_queries(w);
  run_split(w, split, visible_end(w, span.num_queries - 1));
  for (int row = 0; row < w.rows; ++row) {
    const Partial out = row_of(partial, row, w.padded_dim);
    std::memcpy(out.values, accumulator(w, row), sizeof(float) * w.padded_dim);
    out.highest() = w.highest[row];
    out.sum() = row_sum(w, row);
  }
}

void merge_splits(const AttentionArgs& args, const AttentionSpan& span, std::int32_t kv_head, std::int32_t num_splits,
                  const float* partials, Scratch scratch) {
  const Work w = make_work(args, span, kv_head, scratch.data);
  for (int row = 0; row < w.rows; ++row) {
    const Partial total = row_of(w.totals, row, w.padded_dim);
    clear(total);
    const float* part = partials + std::int64_t{row} * (w.padded_dim + 2);
    for (int split = 0; split < num_splits; ++split, part += std::int64_t{w.rows} * (w.padded_dim + 2))
      merge(total, part, part[w.padded_dim], part[w.padded_dim + 1]);
    finish(w, row, total.values, total.sum());
  }
}

std::int64_t partial_size(const AttentionArgs& args) {
  return (args.head_dim + kLanes - 1) / kLanes * kLanes + 2;
}

std::size_t attention_scratch(const AttentionArgs& args, std::int32_t num_queries) {
  AttentionSpan span = {};
  span.num_queries = num_queries;
  return make_work(args, span, 0, nullptr).end + 64;
}

}  // namespace EV_ISA
}  // namespace evensong
