// Words that threads of several processes wait for: they spin, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace evensong {

// The monotonic clock, which all processes of a machine share.
std::int64_t now_ns();
// A moment's rest for the processor in a loop that spins.
void rest();

// Sleeps while `word` is `value`, at most `limit_ns` (0: without end); may end early. `shared`: with other processes.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value, bool shared, std::int64_t limit_ns);
void wake_all(std::atomic<std::uint32_t>& word, bool shared);

// A word in memory that processes share. Zeros are a good beginning.
struct Signal {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(sizeof(Signal) == 8 && std::atomic<std::uint32_t>::is_always_lock_free, "processes share it");

// What a wait inside a step raises after Engine::cancel.
class Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("cancelled") {}
};

// Counters run on beyond 2^32: whether `value` has come as far as `target`.
inline bool reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// Gives the word a new value: whatever was written before is seen by whoever sees it. Wakes who sleeps.
void raise_to(Signal& signal, std::uint32_t value);

constexpr std::int64_t kSpinNs = 60'000;
constexpr std::int64_t kLookNs = 100'000'000;  // how often a sleeper looks whether it was cancelled
constexpr int kTurnsBetweenLooks = 32;

// Until `ready(value of the word)`, which may also look at what was written before the word was raised.
template <typename Ready>
void wait_for(Signal& signal, const std::atomic<bool>* cancelled, Ready ready) {
  const std::int64_t until = now_ns() + kSpinNs;
  do {
    for (int turn = 0; turn < kTurnsBetweenLooks; ++turn) {
      if (ready(signal.value.load(std::memory_order_acquire))) return;
      rest();
    }
  } while (now_ns() < until);
  // Counted before the last look: whoever raises the word later sees that somebody sleeps.
  signal.sleepers.fetch_add(1);
  struct Leave {
    Signal& signal;
    ~Leave() { signal.sleepers.fetch_sub(1); }
  } const leave{signal};
  for (;;) {
    const std::uint32_t seen = signal.value.load();
    if (ready(seen)) return;
    if (cancelled != nullptr && cancelled->load()) throw Cancelled();
    sleep_while(signal.value, seen, true, kLookNs);
  }
}

}  // namespace evensong
