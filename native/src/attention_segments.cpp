// Segments that know of sequences: rotary embedding with the cache, attention, sampling.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "program.h"

namespace evensong {

namespace {

class Rope : public Segment {
 public:
  Rope(const Kernels& kernels, const RopeArgs& args, std::int32_t group) : kernels_(kernels), args_(args), group_(group) {}
  const char* name() const override { return "rope_kv"; }
  std::int64_t begin(const Step& step) override { return (step.num_rows() + kRows - 1) / kRows; }
  void run(Step& step, std::int64_t unit, Scratch) override {
    const auto& slots = step.slots[static_cast<std::size_t>(group_)];
    for (std::int64_t row = unit * kRows; row < std::min(step.num_rows(), (unit + 1) * kRows); ++row) {
      const auto index = static_cast<std::size_t>(row);
      kernels_.rope(args_, row, step.positions[index], slots[index]);
    }
  }

 private:
  static constexpr std::int64_t kRows = 4;
  const Kernels& kernels_;
  RopeArgs args_;
  std::int32_t group_;
};

class Attention : public Segment {
 public:
  Attention(const Program& program, const AttentionArgs& args, std::int32_t group)
      : program_(program), kernels_(program.kernels()), args_(args), group_(group) {}
  const char* name() const override { return "attention"; }
  std::int64_t begin(const Step& step) override {
    if (step.num_families > 0) make_room(step);
    return static_cast<std::int64_t>(step.items.size());
  }
  void run(Step& step, std::int64_t unit, Scratch scratch) override {
    const AttentionItem& item = step.items[static_cast<std::size_t>(unit)];
    const auto sequence = static_cast<std::size_t>(item.sequence);
    AttentionSpan span{};
    span.first_row = step.first_row[sequence] + item.first_query;
    span.num_queries = item.num_queries;
    span.first_position = step.starts[sequence] + item.first_query;
    span.blocks = step.blocks[static_cast<std::size_t>(group_)].data() + step.first_block[sequence];
    if (item.split < 0) {
      kernels_.attention(args_, span, item.kv_head, scratch);
      return;
    }
    const std::int64_t size = partial_floats(item.num_queries);
    float* family = partials_.data() + item.family * most_splits_ * most_floats_;
    kernels_.attention_split(args_, span, item.kv_head, item.split, family + item.split * size, scratch);
    // Whoever ends last has all partial results before it, and merges them in order.
    std::atomic<std::int32_t>& pending = step.pending[static_cast<std::size_t>(item.family)];
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernels_.merge_splits(args_, span, item.kv_head, item.num_splits, family, scratch);
      pending.store(item.num_splits, std::memory_order_relaxed);  // for the next layer
    }
  }

 private:
  std::int64_t partial_floats(std::int32_t num_queries) const {
    return kernels_.partial_size(args_) * num_queries * (args_.num_heads / args_.num_kv_heads);
  }
  // By one thread, before the units run.
  void make_room(const Step& step) {
    std::int32_t queries = 1;
    for (const AttentionItem& item : step.items)
      if (item.family >= 0) queries = std::max(queries, item.num_queries);
    most_floats_ = partial_floats(queries);
    most_splits_ = step.most_splits;
    const auto floats = static_cast<std::size_t>(most_floats_ * most_splits_ * step.num_families);
    if (partials_.size() < floats) partials_.resize(floats);
  }

  const Program& program_;
  const Kernels& kernels_;
  AttentionArgs args_;
  std::int32_t group_;
  std::vector<float> partials_;
  std::int64_t most_splits_ = 1;
  std::int64_t most_floats_ = 0;
};

class Sampling : public Segment {
 public:
  Sampling(Program& program, const Buffer& logits) : program_(program), logits_(logits) {}
  const char* name() const override { return "sampling"; }
  std::int64_t begin(const Step& step) override {
    if (logits_.logits != nullptr && step.num_samples() > 0) check_members(step, *logits_.logits);
    return step.num_samples();
  }
  void run(Step& step, std::int64_t unit, Scratch scratch) override {
    const auto i = static_cast<std::size_t>(unit);
    const SampleRow& row = step.samples[i];
    SampleOutput& output = step.output;
    const float* logits = row_of(step, unit);
    const std::int64_t count = program_.limits().vocab_size;
    std::int64_t token = -1;
    if (program_.best_logits(step.bank).used)
      token = best_token(step, unit);
    else if (row.kind == static_cast<std::int32_t>(SampleKind::draw))
      token = program_.kernels().sample(logits, count, row.params, mask_of(step, row), scratch).token;
    else if (row.kind == static_cast<std::int32_t>(SampleKind::given))
      token = row.token;
    output.tokens[i] = token;
    if (token < 0) return;
    if (row.feed_slot >= 0) program_.feed().set_token(row.feed_slot, token);
    if (row.num_best < 0) return;
    const std::int64_t place = unit * output.max_best;
    LogprobArgs args{logits, count, token, row.num_best, output.best_ids.data() + place,
                     output.best_values.data() + place};
    output.logprobs[i] = program_.kernels().logprobs(args, scratch);
  }

 private:
  static const std::uint32_t* mask_of(const Step& step, const SampleRow& row) {
    return row.mask < 0 ? nullptr : step.masks.data() + row.mask * step.mask_words;
  }

  const float* row_of(const Step& step, std::int64_t row) const {
    return reinterpret_cast<const float*>(logits_.bank(step.bank)) + row * logits_.stride;
  }

  // A step that reads logits needs those of all members.
  void check_members(const Step& step, const LogitsGroup& group) const {
    if (program_.best_logits(step.bank).used) return;
    for (int member = 0; member < group.size(); ++member)
      if (group.columns(step.bank, member).best_only != 0)
        throw std::runtime_error("a member of the output head left out the logits that this step reads");
  }

  // The lowest id of the largest logit; -1 where the kernel's `sample` says so.
  std::int64_t best_token(const Step& step, std::int64_t row) const {
    BestToken best{-std::numeric_limits<float>::infinity(), -1};
    if (logits_.logits == nullptr) {
      best = program_.best_logits(step.bank).of_row(row);
    } else {
      for (int member = 0; member < logits_.logits->size(); ++member) {
        const BestToken found = best_of_member(step, row, member);
        if (std::isnan(found.value)) return -1;
        if (found.value > best.value) best = found;  // columns ascend with the members
      }
    }
    return std::isfinite(best.value) ? best.token : -1;
  }

  BestToken best_of_member(const Step& step, std::int64_t row, int member) const {
    const LogitsGroup::Columns& columns = logits_.logits->columns(step.bank, member);
    if (columns.best_only != 0) return logits_.logits->best(step.bank, member)[row];
    // It was not told that its logits are not needed.
    const float* logits = row_of(step, row);
    BestToken best{-std::numeric_limits<float>::infinity(), -1};
    for (std::int64_t id = columns.first; id < columns.first + columns.count; ++id) {
      if (std::isnan(logits[id])) return {logits[id], -1};
      if (logits[id] > best.value) best = {logits[id], static_cast<std::int32_t>(id)};
    }
    return best;
  }

  Program& program_;
  const Buffer& logits_;
};

void check_cache(const Program& program, const LayerCache& cache) {
  check(cache.num_rows >= program.limits().num_blocks * program.limits().block_size, "a cache has too few rows");
  check(cache.num_kv_heads > 0 && cache.head_dim > 0 && cache.head_dim % 2 == 0, "a cache without heads");
  check(cache.group >= 0 && cache.group < program.limits().num_groups, "no such layer group");
}

}  // namespace

std::unique_ptr<Segment> make_rope(Program& program, const RopeArgs& asked, const LayerCache& cache, int qkv,
                                   int query) {
  check_cache(program, cache);
  RopeArgs args = asked;
  const std::int64_t heads = std::int64_t{args.num_heads} + 2 * cache.num_kv_heads;
  const Buffer& source = program.buffer(qkv, heads * cache.head_dim, DType::f32);
  const Buffer& target = program.buffer(query);
  check(target.width == std::int64_t{args.num_heads} * cache.head_dim, "queries do not fit their buffer");
  check(args.rotary_dim > 0 && args.rotary_dim % 2 == 0 && args.rotary_dim <= cache.head_dim, "a wrong rotary size");
  args.qkv = reinterpret_cast<const float*>(source.fixed());
  args.qkv_stride = source.stride;
  args.query = target.fixed();
  args.query_stride = target.stride;
  args.query_type = target.type;
  args.cache = cache.data;
  args.cache_type = cache.type;
  args.num_kv_heads = cache.num_kv_heads;
  args.head_dim = cache.head_dim;
  args.block_size = program.limits().block_size;
  return std::make_unique<Rope>(program.kernels(), args, cache.group);
}

std::unique_ptr<Segment> make_attention(Program& program, const LayerCache& cache, std::int32_t num_heads, float scale,
                                        float soft_cap, int query, int out) {
  check_cache(program, cache);
  check(num_heads > 0 && num_heads % cache.num_kv_heads == 0, "query heads are shared by whole key heads");
  check(program.num_kv_heads == 0 || program.num_kv_heads == cache.num_kv_heads, "layers differ in their key heads");
  program.num_kv_heads = cache.num_kv_heads;
  program.copies().add(cache);
  const Buffer& source = program.buffer(query);
  const Buffer& target = program.buffer(out, source.width, source.type);
  check(source.width == std::int64_t{num_heads} * cache.head_dim, "queries do not fit their buffer");
  const bool paired = program.kernels().pairs && cache.type == DType::bf16;
  check(source.type == DType::f32 || paired, "bfloat16 queries need a bfloat16 cache and products");
  AttentionArgs args{};
  args.query = source.fixed();
  args.query_stride = source.stride;
  args.out = target.fixed();
  args.out_stride = target.stride;
  args.compute = source.type;
  args.cache = cache.data;
  args.cache_type = cache.type;
  args.num_heads = num_heads;
  args.num_kv_heads = cache.num_kv_heads;
  args.head_dim = cache.head_dim;
  args.block_size = program.limits().block_size;
  args.window = cache.window;
  args.scale = scale;
  args.soft_cap = soft_cap;
  program.need_scratch(program.kernels().attention_scratch(args, program.kernels().query_block));
  return std::make_unique<Attention>(program, args, cache.group);
}

std::unique_ptr<Segment> make_sampling(Program& program, int logits) {
  const Buffer& source = program.buffer(logits);
  check(source.type == DType::f32 && source.width >= program.limits().vocab_size, "logits do not fit their buffer");
  check(source.logits == nullptr || source.logits->reads(), "the reader of shared logits samples, and no other member");
  program.need_scratch(program.kernels().sample_scratch(program.limits().vocab_size));
  return std::make_unique<Sampling>(program, source);
}

}  // namespace evensong
