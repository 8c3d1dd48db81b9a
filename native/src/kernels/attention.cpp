// Attention of a span's queries over the paged cache, one kv head and its group of query heads at a time.
//
// A query reduces over tiles of kTileKeys keys, anchored at position 0 of its sequence, with a running maximum, sum and
// accumulator (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention,
// 2022). Every kSplitKeys positions the partial result is closed and merged into the total, in order: splits that are
// computed elsewhere and merged later give the same bits.
#include "attention_view.h"

namespace evensong {
namespace EV_ISA {
namespace {

static_assert(kSplitKeys % kTileKeys == 0 && kTileKeys % kKeyStep == 0);
static_assert(kKeyStep % (2 * kLanes) == 0 && kKeyStep % (2 * kGroupTokens) == 0);

// One row's result for some of its keys: accumulator [padded_dim], then maximum and sum.
struct Partial {
  float* values;
  int padded_dim;
  float& highest() const { return values[padded_dim]; }
  float& sum() const { return values[padded_dim + 1]; }
};

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
