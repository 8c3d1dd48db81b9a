// The best tokens of a row without sorting it.
//
// Order: larger logits first, the lowest id on a tie. (The Python code compares scores; these tie also where logits
// differ by less than 1e-16 of their distance from the best.) Every filter leaves a prefix of this order, so two
// numbers say what is left, and no list of candidates is kept. A cut is found by summing weights in bins of the logits,
// then in bins of the one bin in which the sum is reached, down to a single value. Weights are whole numbers: their sums
// do not depend on the order in which they are added.
#pragma once

#include "lanes.h"

namespace evensong {
namespace EV_ISA {

constexpr int kColumns = 64;

// A row and what one look at it tells.
struct Row {
  const float* logits;
  std::int64_t count;
  bool finite;              // no NaN, and the largest logit is finite
  float best;               // the largest logit
  float columns[kColumns];  // the largest of the logits whose id is c modulo kColumns
};

static inline Row survey(const float* logits, std::int64_t count) {
  constexpr int kVectors = kColumns / kLanes;
  Vec top[kVectors];
  for (int v = 0; v < kVectors; ++v) top[v] = set1(-__builtin_inff());
  Mask nan{};
  std::int64_t start = 0;
  for (; start + kColumns <= count; start += kColumns) {
    for (int v = 0; v < kVectors; v += 2) {
      const Vec a = load(logits + start + v * kLanes);
      const Vec b = load(logits + start + (v + 1) * kLanes);
      nan |= unordered(a, b);
      top[v] = max(a, top[v]);
      top[v + 1] = max(b, top[v + 1]);
    }
  }
  for (int v = 0; v < kVectors && start < count; ++v, start += kLanes) {
    const Vec a = load_part(logits + start, count - start);
    nan |= unordered(a, a);
    top[v] = max(a, top[v]);
  }
  Row row;
  row.logits = logits;
  row.count = count;
  row.best = -__builtin_inff();
  for (int v = 0; v < kVectors; ++v) store(row.columns + v * kLanes, top[v]);
  for (int c = 0; c < kColumns; ++c) row.best = row.columns[c] > row.best ? row.columns[c] : row.best;
  row.finite = to_bits(nan) == 0 && __builtin_fabsf(row.best) <= __FLT_MAX__;
  return row;
}

// Bits of the tokens from `start` on, one a lane; `mask` has 32 a word, the lowest id first.
static inline std::uint32_t allowed_bits(const std::uint32_t* mask, std::int64_t start) {
  static_assert(32 % kLanes == 0, "a vector's tokens lie in one word");
  return mask[start / 32] >> (start % 32) & ((std::uint32_t{1} << kLanes) - 1);
}

// The lowest id of the largest logit whose bit is set; -1 where a NaN or +inf is among them, or nothing but -inf.
static inline std::int64_t best_allowed(const float* logits, std::int64_t count, const std::uint32_t* mask) {
  float best = -__builtin_inff();
  std::int64_t token = -1;
  Mask nan{};
  for (std::int64_t start = 0; start < count; start += kLanes) {
    const std::uint32_t lane_bits = allowed_bits(mask, start);
    if (lane_bits == 0) continue;
    const Vec x = or_never(lanes_of(lane_bits), load_part(logits + start, count - start));
    nan |= unordered(x, x);
    // Few vectors hold a new best: ids ascend, so an equal one is none.
    std::uint32_t hits = to_bits(at_least(x, set1(from_key(to_key(best) + 1))));
    for (; hits != 0; hits &= hits - 1) {
      const int lane = __builtin_ctz(hits);
      if (!(x[lane] > best)) continue;
      best = x[lane];
      token = start + lane;
    }
  }
  return to_bits(nan) == 0 && __builtin_fabsf(best) <= __FLT_MAX__ ? token : -1;
}

// The id of the `number`-th token, from 1, whose logit is `value`; there are that many.
static inline std::int64_t find(const Row& row, float value, std::int64_t number) {
  const Vec wanted = set1(value);
  for (std::int64_t start = 0;; start += kLanes) {
    std::uint32_t hits = to_bits(equal(load_part(row.logits + start, row.count - start), wanted));
    for (; hits != 0; hits &= hits - 1)
      if (--number == 0) return start + __builtin_ctz(hits);
  }
}

// The tokens with a logit above `least`, and those with an equal one up to the id `last`.
struct Prefix {
  float least;
  float above;  // the float that follows `least`
  std::int64_t last;
};

static inline Prefix make_prefix(float least, std::int64_t last) { return {least, from_key(to_key(least) + 1), last}; }

static inline Mask inside(const Prefix& kept, Vec x, std::int64_t start) {
  if (start + kLanes - 1 <= kept.last) return at_least(x, set1(kept.least));
  if (start > kept.last) return at_least(x, set1(kept.above));
  const IntVec tie = lane_numbers() <= set1i(static_cast<std::int32_t>(kept.last - start));
  return at_least(x, select(tie, set1(kept.least), set1(kept.above)));
}

// Part of `kept`, from `least` on.
static inline Prefix narrow(const Row& row, const Prefix& kept, float least) {
  return least > kept.least ? make_prefix(least, row.count - 1) : kept;
}

// The key of the smallest float from `low` to `high` for which `test` holds: for high it does, and above any other too.
template <typename Test>
static inline std::int32_t lowest_key(float low, float high, const Test& test) {
  std::int64_t from = to_key(low), to = to_key(high);
  while (from < to) {
    const std::int64_t middle = (from + to) >> 1;
    if (test(from_key(static_cast<std::int32_t>(middle))))
      to = middle;
    else
      from = middle + 1;
  }
  return static_cast<std::int32_t>(to);
}

// (logit - best) / temperature in float: good to a few units in the last place, and never a NaN for a finite logit.
struct Scale {
  float half_best;  // halves, because a difference of two floats may overflow
  float factor;

  Scale(float best, double temperature) : half_best(0.5f * best), factor(static_cast<float>(2.0 / temperature)) {}
  Vec operator()(Vec x) const { return (x * set1(0.5f) - set1(half_best)) * set1(factor); }
};

// What a token weighs, in units of 2^-40 of the best one.
struct Weights {
  bool uniform;  // every token weighs the same
  Scale scale;

  // One weight for each lane; 0 where mask does not hold.
  void operator()(Vec x, Mask mask, std::uint64_t* out) const {
    const Vec weight = keep(mask, uniform ? set1(kOne) : exp(scale(x)) * set1(kOne));
    // In 2^52 .. 2^53 the spacing of doubles is 1: adding 2^52 rounds to a whole number, which the low bits hold.
    const DoubleVec magic = DoubleVec{} + 4503599627370496.0;
    const Doubles wide = to_double(weight);
    const LongVec low = reinterpret_cast<LongVec>(wide.low + magic) - reinterpret_cast<LongVec>(magic);
    const LongVec high = reinterpret_cast<LongVec>(wide.high + magic) - reinterpret_cast<LongVec>(magic);
    std::memcpy(out, &low, sizeof low);
    std::memcpy(out + kHalf, &high, sizeof high);
  }

  std::uint64_t of(float x) const {
    std::uint64_t lanes[kLanes];
    (*this)(set1(x), equal(Vec{}, Vec{}), lanes);
    return lanes[0];
  }

  static constexpr float kOne = 1099511627776.0f;  // 2^40
};

constexpr int kBins = 1024;
// Neighbouring tokens add to different copies of a bin: an addition need not wait for the one before.
constexpr int kCopies = 4;
constexpr std::size_t kBinBytes = sizeof(std::uint64_t) * kBins * kCopies;

// Bins of equal width from `high` down to `low`; what lies below is in the last one.
struct LinearBins {
  float half_high;
  float factor;

  LinearBins(float low, float high)
      : half_high(0.5f * high), factor(static_cast<float>(kBins) / (0.5f * high - 0.5f * low)) {}
  // Never rises with x, however it is rounded. A width of 0 makes 0 / 0, which `max` turns into bin 0.
  IntVec operator()(Vec x) const {
    const Vec place = max((set1(half_high) - x * set1(0.5f)) * set1(factor), Vec{});
    return to_int(min(place, set1(kBins - 1)));
  }
};

// Bins of 2^shift neighbouring floats from `high` down.
struct KeyBins {
  std::int32_t high;
  int shift;

  KeyBins(std::int32_t low, std::int32_t high) : high(high), shift(0) {
    const std::uint32_t range = static_cast<std::uint32_t>(high) - static_cast<std::uint32_t>(low);
    while ((range >> shift) >= kBins) ++shift;
  }
  IntVec operator()(Vec x) const {
    const UintVec distance = static_cast<std::uint32_t>(high) - reinterpret_cast<UintVec>(to_key(x));
    // Tokens outside of the range weigh nothing, but must find a bin.
    return reinterpret_cast<IntVec>((distance >> shift) & (kBins - 1));
  }
};

// Sums in each bin the weights of the tokens of `kept` whose logit is at most `high`. Returns the sum of all bins.
template <typename Bins>
static inline std::uint64_t fill(const Row& row, const Prefix& kept, float high, const Weights& weights,
                                 const Bins& bins, std::uint64_t* sums) {
  std::memset(sums, 0, kBinBytes);
  for (std::int64_t start = 0; start < row.count; start += kLanes) {
    const Vec x = load_part(row.logits + start, row.count - start);
    const Mask mask = inside(kept, x, start) & at_least(set1(high), x);
    if (to_bits(mask) == 0) continue;
    std::uint64_t weight[kLanes];
    std::int32_t bin[kLanes];
    weights(x, mask, weight);
    const IntVec place = bins(x);
    std::memcpy(bin, &place, sizeof place);
    for (int i = 0; i < kLanes; ++i) sums[kBins * (i % kCopies) + bin[i]] += weight[i];
  }
  std::uint64_t total = 0;
  for (int b = 0; b < kBins; ++b) {
    for (int copy = 1; copy < kCopies; ++copy) sums[b] += sums[kBins * copy + b];
    total += sums[b];
  }
  return total;
}

// The bin in which the sum reaches `wanted`, which is reduced by what the bins before weigh.
static inline int reach(const std::uint64_t* sums, std::uint64_t* wanted) {
  int bin = 0;
  for (; bin < kBins - 1 && sums[bin] < *wanted; ++bin) *wanted -= sums[bin];
  return bin;
}

// The shortest prefix of `kept` that weighs at least `wanted` (> 0, and no more than all of it), given the sums of
// linear bins over all of it.
static inline Prefix cut(const Row& row, const Prefix& kept, const Weights& weights, const LinearBins& linear,
                         std::uint64_t wanted, std::uint64_t* sums) {
  const int bin = reach(sums, &wanted);
  const auto low_end = [&](int b) {
    return lowest_key(kept.least, row.best, [&](float x) { return linear(set1(x))[0] <= b; });
  };
  std::int32_t low = low_end(bin);
  std::int32_t high = bin == 0 ? to_key(row.best) : low_end(bin - 1) - 1;
  while (low < high) {
    const KeyBins bins(low, high);
    fill(row, narrow(row, kept, from_key(low)), from_key(high), weights, bins, sums);
    const std::int64_t top = high - (static_cast<std::int64_t>(reach(sums, &wanted)) << bins.shift);
    const std::int64_t bottom = top - (std::int64_t{1} << bins.shift) + 1;
    high = static_cast<std::int32_t>(top);
    low = bottom > low ? static_cast<std::int32_t>(bottom) : low;
  }
  const float least = from_key(low);
  const std::uint64_t each = weights.of(least);
  return make_prefix(least, find(row, least, static_cast<std::int64_t>((wanted + each - 1) / each)));
}

// The k best of `kept`, or all of it. Bins are fine down to `spread` below the best.
static inline Prefix best_of(const Row& row, const Prefix& kept, std::int64_t k, double spread, std::uint64_t* sums) {
  if (k >= row.count) return kept;
  // Where k columns reach a value, k tokens do.
  float bound = -__builtin_inff();
  for (int c = 0; c < kColumns; ++c) {
    std::int64_t reached = 0;
    for (int other = 0; other < kColumns; ++other) reached += row.columns[other] >= row.columns[c];
    if (reached >= k && row.columns[c] > bound) bound = row.columns[c];
  }
  const Prefix some = narrow(row, kept, bound);
  const Weights weights{true, Scale(row.best, 1.0)};
  const double low = static_cast<double>(row.best) - spread;
  const LinearBins bins(low > static_cast<double>(some.least) ? static_cast<float>(low) : some.least, row.best);
  const std::uint64_t wanted = static_cast<std::uint64_t>(k) << 40;
  if (fill(row, some, row.best, weights, bins, sums) <= wanted) return some;
  return cut(row, some, weights, bins, wanted, sums);
}

}  // namespace EV_ISA
}  // namespace evensong
