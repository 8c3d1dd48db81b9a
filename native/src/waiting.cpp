#include "waiting.h"

#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <climits>

namespace evensong {

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void rest() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value, bool shared, std::int64_t limit_ns) {
#if defined(__linux__)
  constexpr std::int64_t kSecond = 1'000'000'000;
  const timespec limit{static_cast<time_t>(limit_ns / kSecond), static_cast<long>(limit_ns % kSecond)};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value,
          limit_ns > 0 ? &limit : nullptr, nullptr, 0);
#else
  (void)shared, (void)limit_ns;
  timespec moment{0, 50'000};
  if (word.load() == value) nanosleep(&moment, nullptr);
#endif
}

void wake_all(std::atomic<std::uint32_t>& word, bool shared) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX,
          nullptr, nullptr, 0);
#else
  (void)word, (void)shared;
#endif
}

void raise_to(Signal& signal, std::uint32_t value) {
  signal.value.store(value);
  if (signal.sleepers.load() > 0) wake_all(signal.value, true);
}

}  // namespace evensong
