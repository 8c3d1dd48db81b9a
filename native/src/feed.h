// The table through which sampled tokens reach later steps, of this process or of others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common.h"
#include "waiting.h"

namespace evensong {

// Zeros in the beginning: the head below, then an int64 token for each slot.
class FeedTable {
 public:
  // In memory of its own, or in `data` of `bytes`, which outlives it.
  explicit FeedTable(std::int64_t num_slots);
  FeedTable(char* data, std::size_t bytes, std::int64_t num_slots);

  static std::size_t bytes(std::int64_t num_slots) { return sizeof(Head) + 8 * static_cast<std::size_t>(num_slots); }
  std::int64_t num_slots() const { return num_slots_; }

  std::int64_t token(std::int64_t slot) const { return __atomic_load_n(tokens() + slot, __ATOMIC_RELAXED); }
  void set_token(std::int64_t slot, std::int64_t token) { __atomic_store_n(tokens() + slot, token, __ATOMIC_RELAXED); }

  // The last step up to which every sampled token is in the table; -1 before the first.
  std::int64_t published() const { return static_cast<std::int64_t>(head().published.load()) - 1; }
  // Never falls.
  void publish(std::int64_t step_id);
  // No tokens of this step will come.
  void fail(std::int64_t step_id);
  bool failed(std::int64_t step_id) const { return head().failed.load() == static_cast<std::uint64_t>(step_id) + 1; }
  // Until `step_id` is published; raises if it, or a step after it, failed first.
  void wait(std::int64_t step_id, const std::atomic<bool>* cancelled);

 private:
  struct alignas(64) Head {
    std::atomic<std::uint64_t> published;  // one more than the step's id
    Signal bell;                           // changes with each of both
    std::atomic<std::uint64_t> failed;     // one more than the id of the last one
  };
  static_assert(sizeof(Head) == 64 && std::atomic<std::uint64_t>::is_always_lock_free, "processes share it");

  Head& head() const { return *reinterpret_cast<Head*>(data_); }
  std::int64_t* tokens() const { return reinterpret_cast<std::int64_t*>(data_ + sizeof(Head)); }
  void raise(std::atomic<std::uint64_t>& word, std::int64_t step_id);

  Memory own_;
  char* data_;
  std::int64_t num_slots_;
};

}  // namespace evensong
