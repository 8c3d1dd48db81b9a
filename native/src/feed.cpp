#include "feed.h"

namespace evensong {

FeedTable::FeedTable(std::int64_t num_slots)
    : own_(bytes(num_slots)), data_(own_.data()), num_slots_(num_slots) {}

FeedTable::FeedTable(char* data, std::size_t size, std::int64_t num_slots) : data_(data), num_slots_(num_slots) {
  check(size >= bytes(num_slots), "a feed table has 64 bytes and 8 more for each slot");
  check(reinterpret_cast<std::uintptr_t>(data) % 64 == 0, "a feed table is aligned to 64 bytes");
}

void FeedTable::raise(std::atomic<std::uint64_t>& word, std::int64_t step_id) {
  const auto wanted = static_cast<std::uint64_t>(step_id) + 1;
  std::uint64_t seen = word.load();
  while (seen < wanted && !word.compare_exchange_weak(seen, wanted)) {
  }
  // Several may publish: what the bell says does not matter, as long as it changes.
  Signal& bell = head().bell;
  bell.value.fetch_add(1);
  if (bell.sleepers.load() > 0) wake_all(bell.value, true);
}

void FeedTable::publish(std::int64_t step_id) { raise(head().published, step_id); }

void FeedTable::fail(std::int64_t step_id) { raise(head().failed, step_id); }

void FeedTable::wait(std::int64_t step_id, const std::atomic<bool>* cancelled) {
  const auto wanted = static_cast<std::uint64_t>(step_id) + 1;
  bool failed = false;
  wait_for(head().bell, cancelled, [&](std::uint32_t) {
    if (head().published.load(std::memory_order_acquire) >= wanted) return true;
    // Steps are run in order: those before one that failed have ended.
    return failed = head().failed.load(std::memory_order_acquire) >= wanted;
  });
  if (failed) throw std::runtime_error("the step that samples a token of this one has failed");
}

}  // namespace evensong
