// One step: what is computed for whom. Made from what the runner hands in, read by the segments of a program.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace evensong {

// What one sampled row asks for; the same bytes as worker/native_rows.py::SAMPLE_ROW.
struct SampleRow {
  SampleParams params;
  std::int64_t token;      // for `given`: the token whose log-probability is wanted
  std::int32_t kind;       // SampleKind
  std::int32_t num_best;   // best tokens whose log-probabilities are wanted; -1: none, not even the token's
  std::int32_t feed_slot;  // where the token goes for a later step that names it; -1: nowhere
  std::int32_t mask;       // which of the step's masks says what may be drawn; -1: anything
};
static_assert(sizeof(SampleRow) == 72, "worker/native_rows.py says the same");

enum class SampleKind : std::int32_t { logits = 0, draw = 1, given = 2 };

// What came out, row by row.
struct SampleOutput {
  std::vector<std::int64_t> tokens;  // -1: none can be sampled, or only logits were asked for
  std::vector<LogprobResult> logprobs;
  std::vector<std::int64_t> best_ids;  // [rows, max_best]
  std::vector<double> best_values;
  std::int64_t max_best = 0;
};

// Queries of one sequence and the heads of one kv head: a unit of attention.
struct AttentionItem {
  std::int32_t sequence;
  std::int32_t first_query;  // within the sequence's rows of this step
  std::int32_t num_queries;
  std::int32_t kv_head;
  std::int32_t split;       // -1: all keys at once
  std::int32_t num_splits;  // of this item's siblings
  std::int32_t family;      // which counter its siblings share
};

struct ProgramLimits {
  std::int64_t max_rows;       // tokens of a step
  std::int64_t max_samples;    // sampled rows of a step
  std::int64_t max_positions;  // tokens of a sequence
  std::int64_t num_blocks;
  std::int32_t block_size;
  std::int32_t num_groups;
  std::int64_t num_feed_slots;
  std::int64_t vocab_size;     // ids that a token may have
  std::int64_t num_banks = 1;  // of logits: so many steps' stay until they are read
};

struct Step {
  // ---- handed in
  std::vector<std::int32_t> counts;                     // new tokens of each sequence
  std::vector<std::int32_t> starts;                     // positions that are computed already
  std::vector<std::vector<std::int32_t>> blocks;        // [group]: the block tables, one after the other
  std::vector<std::int64_t> first_block;                // where a sequence's table starts in these
  std::vector<std::int64_t> token_ids;                  // of each row; -1 - slot: what was sampled into that feed slot
  std::vector<std::int64_t> sample_rows;                // rows whose logits are wanted
  std::vector<SampleRow> samples;                       // one each
  std::vector<std::uint32_t> masks;                     // [mask][mask_words]: a bit for each token id, the lowest first
  std::int64_t mask_words = 0;
  std::vector<std::int32_t> copies;                     // [pair][from, to]: blocks that are copied before all else
  std::int64_t bank = 0;                                // of the logits
  std::int64_t step_id = -1;                            // of the plan; -1: of none
  std::int64_t feed_after = -1;                         // the step that must be published before tokens are read
  bool publishes = false;                               // at its end, that its tokens are in the feed table
  const std::atomic<bool>* cancelled = nullptr;         // by the engine: waits end
  // ---- worked out by `prepare`
  std::vector<std::int64_t> first_row;                  // of each sequence
  std::vector<std::int64_t> positions;                  // of each row
  std::vector<std::vector<std::int64_t>> slots;         // [group][row]: where its keys and values go
  std::vector<AttentionItem> items;
  std::unique_ptr<std::atomic<std::int32_t>[]> pending; // of each family: siblings that are not done
  std::int32_t num_families = 0;
  std::int32_t most_splits = 1;
  SampleOutput output;

  std::int64_t num_rows() const { return static_cast<std::int64_t>(token_ids.size()); }
  std::int64_t num_samples() const { return static_cast<std::int64_t>(sample_rows.size()); }
  // Whether every sampled row wants its largest logit's token and nothing else.
  bool wants_best_tokens_only() const;

  // Checks everything against these limits (std::invalid_argument), then works out the rest.
  void prepare(const ProgramLimits& limits);
  // Room for what the sampled rows ask for.
  void prepare_output();
  // How attention is cut into units, for `num_kv_heads` heads and a pool of `threads`.
  void plan_attention(std::int32_t num_kv_heads, std::int32_t query_block, std::int32_t split_keys, int threads);
};

}  // namespace evensong
