// The sampler and log-probabilities of one row. src/evensong/sampling has the same semantics in Python, and
// tests/unit/kernels/cpu/test_sampling.py compares the two.
//
// What is summed for top_p are float exponentials, in whole numbers (select.h). The choice among tokens compares
// doubles of the C library's scalar logarithm, as the Python code does.
#include "ops.h"
#include "philox.h"
#include "select.h"

namespace evensong {
namespace EV_ISA {

namespace {

// All of these are those of sampling/filters.py and sampling/gumbel.py.
constexpr double kDepth = 64.0;        // tokens this many nats below the best are dropped at once
constexpr double kUnity = 4294967295.5;  // 2^32 - 1/2: a word's distance from u = 1 is this less the word
constexpr double kTwo32 = 4294967296.0;
constexpr double kLeastNoise = -3.15, kMostNoise = 22.88;
constexpr double kSlack = 1.001;  // over the errors of what is computed in float
// Below the best by more than this lies little of what top_p and top_k look for.
constexpr double kSpread = 16.0;

double score_of(float x, const Row& row, double temperature) {
  return (static_cast<double>(x) - static_cast<double>(row.best)) / temperature;
}

double noise_of(std::uint32_t word) {
  return -__builtin_log(-__builtin_log1p(-(kUnity - static_cast<double>(word)) / kTwo32));
}

// Tokens that can matter and pass min_p. -inf never does.
Prefix candidates(const Row& row, const SampleParams& params) {
  const double depth = static_cast<double>(row.best) - kDepth * params.temperature;
  const double lowest = -static_cast<double>(__FLT_MAX__);
  float least = static_cast<float>(depth > lowest ? depth : lowest);
  if (params.min_p > 0.0) {
    const double score = __builtin_log(params.min_p);
    const auto passes = [&](float x) { return score_of(x, row, params.temperature) >= score; };
    least = from_key(lowest_key(least, row.best, passes));
  }
  return make_prefix(least, row.count - 1);
}

// The smallest set of best tokens whose probability reaches top_p.
Prefix nucleus(const Row& row, const Prefix& kept, const SampleParams& params, std::uint64_t* sums) {
  const Weights weights{false, Scale(row.best, params.temperature)};
  const double low = static_cast<double>(row.best) - kSpread * params.temperature;
  const LinearBins bins(low > static_cast<double>(kept.least) ? static_cast<float>(low) : kept.least, row.best);
  const std::uint64_t total = fill(row, kept, row.best, weights, bins, sums);
  std::uint64_t wanted = static_cast<std::uint64_t>(__builtin_ceil(params.top_p * static_cast<double>(total)));
  wanted = wanted < 1 ? 1 : wanted;
  return cut(row, kept, weights, bins, wanted < total ? wanted : total, sums);
}

// A token that reaches a total of B has noise of at least B - score; noise is at most -log d, where d is the distance
// of u from 1. So exp(score) >= d exp(B) holds, which is quick to tell for many, and few tokens are looked at closely.
class Draw {
 public:
  Draw(const Row& row, const SampleParams& params)
      : row_(row), params_(params), scale_(row.best, params.temperature), total_(kLeastNoise - 0.05) {
    raise();
  }

  void look(Vec x, Mask mask, UintVec words, std::int64_t start) {
    const Vec distance = distances(words);
    const Vec weight = exp(scale_(x));
    std::uint32_t hits = to_bits(mask & at_least(weight, distance * set1(bound_)));
    for (; hits != 0; hits &= hits - 1) {
      const int lane = __builtin_ctz(hits);
      const std::int64_t id = start + lane;
      const double total = score_of(row_.logits[id], row_, params_.temperature) + noise_of(words[lane]);
      if (total <= total_) continue;  // ids ascend: of equal ones, the lowest stays
      total_ = total;
      token_ = id;
      raise();
    }
  }

  std::int64_t token() const { return token_; }

 private:
  // (2^32 - 1/2 - word) / 2^32, in halves of words because most instruction sets convert signed integers only.
  static Vec distances(UintVec words) {
    const UintVec rest = ~words;
    const Vec high = to_float(reinterpret_cast<IntVec>(rest >> 16));
    const Vec low = to_float(reinterpret_cast<IntVec>(rest & 0xffffu));
    return high * set1(0x1p-16f) + (low + set1(0.5f)) * set1(0x1p-32f);
  }

  void raise() { bound_ = static_cast<float>(__builtin_exp(total_) / kSlack); }

  const Row& row_;
  const SampleParams& params_;
  const Scale scale_;
  double total_;
  float bound_;
  std::int64_t token_ = -1;
};

std::int64_t draw(const Row& row, const Prefix& filtered, const SampleParams& params) {
  // Even with the largest noise, a token this far below the best cannot overtake the best with the smallest.
  const double reach = static_cast<double>(row.best) - (kMostNoise - kLeastNoise + 0.1) * params.temperature;
  const Prefix kept =
      reach > static_cast<double>(filtered.least) ? narrow(row, filtered, static_cast<float>(reach)) : filtered;
  Draw search(row, params);
  for (std::int64_t start = 0; start < row.count; start += kChunk) {
    const std::int64_t middle = start + kLanes;
    const Vec first = load_part(row.logits + start, row.count - start);
    const Vec second =
        middle < row.count ? load_part(row.logits + middle, row.count - middle) : set1(-__builtin_inff());
    const Mask keep_first = inside(kept, first, start);
    const Mask keep_second = inside(kept, second, middle);
    if ((to_bits(keep_first) | to_bits(keep_second)) == 0) continue;
    UintVec words[2];
    random_chunk(params.seed, params.position, start, words);
    search.look(first, keep_first, words[0], start);
    search.look(second, keep_second, words[1], middle);
  }
  return search.token();
}

// Sum of exp(logit - best): exponentials in float, sums in double in one order.
double exp_sum(const Row& row) {
  DoubleVec sums[2] = {DoubleVec{}, DoubleVec{}};
  const Vec best = set1(row.best);
  for (std::int64_t start = 0; start < row.count; start += kLanes) {
    const Doubles wide = to_double(exp(load_part(row.logits + start, row.count - start) - best));
    sums[0] += wide.low;
    sums[1] += wide.high;
  }
  return reduce_add(sums[0] + sums[1]);
}

std::int64_t rank_of(const Row& row, std::int64_t token) {
  const Vec bound = set1(from_key(to_key(row.logits[token]) + 1));
  std::int64_t rank = 1;
  for (std::int64_t start = 0; start < row.count; start += kLanes)
    rank += __builtin_popcount(to_bits(at_least(load_part(row.logits + start, row.count - start), bound)));
  return rank;
}

// True if token a comes before token b, lowest id first on a tie.
bool before(const float* logits, std::int64_t a, std::int64_t b) {
  return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// Moves ids[place] down until it comes after both below it: the worst token is on top of a heap.
void sift(const float* logits, std::int64_t* ids, std::int64_t place, std::int64_t size) {
  for (;;) {
    std::int64_t child = 2 * place + 1;
    if (child >= size) return;
    if (child + 1 < size && before(logits, ids[child], ids[child + 1])) ++child;
    if (before(logits, ids[child], ids[place])) return;
    const std::int64_t moved = ids[place];
    ids[place] = ids[child];
    ids[child] = moved;
    place = child;
  }
}

// Best first.
void sort(const float* logits, std::int64_t* ids, std::int64_t size) {
  for (std::int64_t place = size / 2; place > 0; --place) sift(logits, ids, place - 1, size);
  for (std::int64_t end = size - 1; end > 0; --end) {
    const std::int64_t worst = ids[0];
    ids[0] = ids[end];
    ids[end] = worst;
    sift(logits, ids, 0, end);
  }
}

}  // namespace

SampleResult sample(const float* logits, std::int64_t count, const SampleParams& params, const std::uint32_t* mask,
                    Scratch scratch) {
  if (mask != nullptr) {
    if (params.temperature < kGreedyBelow) return {best_allowed(logits, count, mask)};
    // Behind the bins: a copy in which nothing else can be drawn.
    float* copy = reinterpret_cast<float*>(scratch.data + kBinBytes);
    for (std::int64_t start = 0; start < count; start += kLanes) {
      const Vec x = load_part(logits + start, count - start);
      store(copy + start, or_never(lanes_of(allowed_bits(mask, start)), x));
    }
    logits = copy;
  }
  const Row row = survey(logits, count);
  if (!row.finite) return {-1};
  if (params.temperature < kGreedyBelow) return {find(row, row.best, 1)};
  std::uint64_t* sums = reinterpret_cast<std::uint64_t*>(scratch.data);
  Prefix kept = candidates(row, params);
  if (params.top_k > 0) kept = best_of(row, kept, params.top_k, kSpread * params.temperature, sums);
  if (params.top_p < 1.0) kept = nucleus(row, kept, params, sums);
  return {draw(row, kept, params)};
}

std::size_t sample_scratch(std::int64_t count) {
  return kBinBytes + sizeof(float) * static_cast<std::size_t>((count + kLanes - 1) / kLanes * kLanes);
}

LogprobResult logprobs(const LogprobArgs& args, Scratch scratch) {
  const Row row = survey(args.logits, args.count);
  const std::int64_t rank = rank_of(row, args.token);
  if (!row.finite) return {static_cast<double>(__builtin_nanf("")), rank, 0};
  const double shift = static_cast<double>(row.best) + __builtin_log(exp_sum(row));
  if (args.num_best <= 0) return {shift, rank, 0};
  const Prefix all = make_prefix(-__FLT_MAX__, args.count - 1);
  const Prefix kept = best_of(row, all, args.num_best, kSpread, reinterpret_cast<std::uint64_t*>(scratch.data));
  std::int64_t found = 0;
  for (std::int64_t start = 0; start < args.count; start += kLanes) {
    std::uint32_t hits = to_bits(inside(kept, load_part(args.logits + start, args.count - start), start));
    for (; hits != 0; hits &= hits - 1) args.best_ids[found++] = start + __builtin_ctz(hits);
  }
  sort(args.logits, args.best_ids, found);
  for (std::int64_t i = 0; i < found; ++i)
    args.best_values[i] = static_cast<double>(args.logits[args.best_ids[i]]) - shift;
  return {shift, rank, found};
}

void random_words(std::uint64_t seed, std::uint64_t position, const std::int64_t* ids, std::int64_t count,
                  std::uint32_t* out) {
  UintVec words[2];
  std::int64_t start = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t chunk = ids[i] / kChunk * kChunk;
    if (chunk != start) random_chunk(seed, position, start = chunk, words);
    const std::int64_t place = ids[i] - chunk;
    out[i] = words[place / kLanes][place % kLanes];
  }
}

void exp_row(const float* x, std::int64_t count, float* out) {
  std::int64_t start = 0;
  for (; start + kLanes <= count; start += kLanes) store(out + start, exp(load(x + start)));
  if (start == count) return;
  float lanes[kLanes];
  store(lanes, exp(load_part(x + start, count - start)));
  std::memcpy(out + start, lanes, sizeof(float) * static_cast<std::size_t>(count - start));
}

}  // namespace EV_ISA
}  // namespace evensong
