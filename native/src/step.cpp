#include "step.h"

#include <algorithm>
#include <numeric>

namespace evensong {

namespace {
// Spans of so few queries are cut along their keys where there would be too few units for all threads.
constexpr std::int32_t kFewQueries = 4;
constexpr int kUnitsPerThread = 4;
}  // namespace

void Step::prepare(const ProgramLimits& limits) {
  const std::size_t sequences = counts.size();
  const std::int64_t block_size = limits.block_size, num_blocks = limits.num_blocks;
  const std::int64_t vocab_size = limits.vocab_size, num_feed_slots = limits.num_feed_slots;
  check(num_rows() <= limits.max_rows, "a step holds more tokens than the program has room for");
  check(num_samples() <= limits.max_samples, "a step samples more rows than the program has room for");
  check(blocks.size() == static_cast<std::size_t>(limits.num_groups), "block tables for every group are needed");
  check(bank >= 0 && bank < limits.num_banks, "a bank does not exist");
  check(step_id >= -1 && feed_after >= -1 && (!publishes || step_id >= 0), "only a step of a plan publishes tokens");
  for (const std::int32_t block : copies) check(block >= 0 && block < num_blocks, "a block to copy does not exist");
  check(starts.size() == sequences && first_block.size() == sequences + 1, "one entry for each sequence is needed");
  check(samples.size() == sample_rows.size(), "one SampleRow for each sampled row is needed");
  const std::size_t rows = token_ids.size();
  first_row.assign(sequences, 0);
  positions.assign(rows, 0);
  slots.assign(blocks.size(), std::vector<std::int64_t>(rows));
  std::size_t row = 0;
  for (std::size_t s = 0; s < sequences; ++s) {
    check(counts[s] > 0 && starts[s] >= 0 && std::int64_t{starts[s]} + counts[s] <= limits.max_positions,
          "a sequence reaches beyond the longest that the model was prepared for");
    check(row + static_cast<std::size_t>(counts[s]) <= rows, "more tokens are counted than given");
    const std::int64_t table = first_block[s], length = first_block[s + 1] - table;
    check(length * block_size >= std::int64_t{starts[s]} + counts[s], "a block table is too short");
    first_row[s] = static_cast<std::int64_t>(row);
    for (std::int32_t i = 0; i < counts[s]; ++i, ++row) {
      const std::int64_t position = std::int64_t{starts[s]} + i;
      positions[row] = position;
      for (std::size_t group = 0; group < blocks.size(); ++group) {
        const std::int64_t block = blocks[group][static_cast<std::size_t>(table + position / block_size)];
        check(block >= 0 && block < num_blocks, "a token has no block");
        slots[group][row] = block * block_size + position % block_size;
      }
    }
  }
  check(row == rows, "more tokens are given than counted");
  for (const auto& tables : blocks)
    for (const std::int32_t block : tables) check(block >= -1 && block < num_blocks, "a block does not exist");
  for (const std::int64_t token : token_ids)
    check(token < vocab_size && token >= -num_feed_slots, "a token id does not exist");
  for (std::size_t i = 0; i < sample_rows.size(); ++i) {
    check(sample_rows[i] >= 0 && sample_rows[i] < num_rows(), "a sampled row does not exist");
    check(samples[i].feed_slot >= -1 && samples[i].feed_slot < num_feed_slots, "a feed slot does not exist");
    check(samples[i].kind >= 0 && samples[i].kind <= 2 && samples[i].token < vocab_size, "a SampleRow is damaged");
    check(samples[i].num_best >= -1 && samples[i].num_best <= vocab_size, "too many log-probabilities");
    check(samples[i].mask >= -1 && (samples[i].mask + std::int64_t{1}) * mask_words <= static_cast<std::int64_t>(masks.size()),
          "a mask does not exist");
    check(samples[i].mask < 0 || mask_words * 32 >= vocab_size, "a mask has too few words");
  }
}

bool Step::wants_best_tokens_only() const {
  return std::all_of(samples.begin(), samples.end(), [](const SampleRow& row) {
    return row.kind == static_cast<std::int32_t>(SampleKind::draw) && row.params.temperature < kGreedyBelow &&
           row.num_best < 0 && row.mask < 0;
  });
}

void Step::prepare_output() {
  output.max_best = 0;
  for (const SampleRow& row : samples) output.max_best = std::max<std::int64_t>(output.max_best, row.num_best);
  output.tokens.assign(samples.size(), -1);
  output.logprobs.assign(samples.size(), LogprobResult{0.0, 0, 0});
  output.best_ids.assign(samples.size() * static_cast<std::size_t>(output.max_best), -1);
  output.best_values.assign(output.best_ids.size(), 0.0);
}

void Step::plan_attention(std::int32_t num_kv_heads, std::int32_t query_block, std::int32_t split_keys, int threads) {
  items.clear();
  num_families = 0;
  most_splits = 1;
  std::int64_t whole_units = 0;
  for (const std::int32_t count : counts) whole_units += (count + query_block - 1) / query_block * num_kv_heads;
  const bool scarce = whole_units < std::int64_t{kUnitsPerThread} * threads;
  // Those with most keys first: the last units are then short ones, and threads end together.
  std::vector<std::int32_t> order(counts.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [this](std::int32_t a, std::int32_t b) { return starts[a] + counts[a] > starts[b] + counts[b]; });
  for (const std::int32_t s : order) {
    const std::int32_t keys = starts[s] + counts[s];
    const std::int32_t splits = scarce && counts[s] <= kFewQueries ? (keys + split_keys - 1) / split_keys : 1;
    for (std::int32_t first = 0; first < counts[s]; first += query_block) {
      const std::int32_t queries = std::min(query_block, counts[s] - first);
      for (std::int32_t head = 0; head < num_kv_heads; ++head) {
        const std::int32_t family = splits > 1 ? num_families++ : -1;
        for (std::int32_t split = 0; split < splits; ++split)
          items.push_back({s, first, queries, head, splits > 1 ? split : -1, splits, family});
      }
    }
    most_splits = std::max(most_splits, splits);
  }
  pending.reset(num_families > 0 ? new std::atomic<std::int32_t>[static_cast<std::size_t>(num_families)] : nullptr);
  for (const AttentionItem& item : items)
    if (item.family >= 0) pending[static_cast<std::size_t>(item.family)].store(item.num_splits);
}

}  // namespace evensong
