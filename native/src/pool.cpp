#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <utility>

#include "waiting.h"

namespace evensong {

namespace {

// Within a step the others are about to arrive; between steps the scheduler has its turn, and may want this processor.
constexpr std::int64_t kSpinInStep = kSpinNs;
constexpr std::int64_t kSpinBetweenSteps = kSpinNs;
constexpr std::size_t kLinesBetweenLooks = 4;

}  // namespace

std::vector<int> usable_processors() {
  std::vector<int> found;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) found.push_back(cpu);
#endif
  return found;
}

void bind_to_processor(int processor) {
#if defined(__linux__)
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
#else
  (void)processor;
#endif
}

Pool::Pool(int threads, const std::vector<int>& processors) : ranges_(static_cast<std::size_t>(threads)) {
  for (int me = 1; me < threads; ++me) {
    const int processor = processors.empty() ? -1 : processors[static_cast<std::size_t>(me)];
    threads_.emplace_back([this, me, processor] {
      if (processor >= 0) bind_to_processor(processor);
      follow(me);
    });
  }
}

Pool::~Pool() {
  stop_.store(true);
  phase_.fetch_add(2);
  wake_all(phase_, false);
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(Job& job) {
  job_ = &job;
  failed_.store(false);
  failure_ = nullptr;
  begin_next_phase(phase_.load());
  for (std::uint32_t phase = phase_.load(); phase & 1; phase = phase_.load()) {
    take_units(0);
    arrive_and_wait(phase, 0);
  }
  // Not kept: it may hold on to what belongs to Python.
  if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

void Pool::follow(int me) {
  std::uint32_t phase = 0;
  while (!stop_.load()) {
    if ((phase & 1) == 0) {
      phase = wait_beyond(phase, kSpinBetweenSteps, Ahead{});
      continue;
    }
    take_units(me);
    arrive_and_wait(phase, me);
    phase = phase_.load(std::memory_order_acquire);
  }
}

void Pool::take_units(int me) {
  const int n = size();
  for (int i = 0; i < n; ++i) {
    Range& range = ranges_[static_cast<std::size_t>((me + i) % n)];
    while (range.next.load(std::memory_order_relaxed) < range.end) {
      const std::int64_t unit = range.next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= range.end || failed_.load(std::memory_order_relaxed)) break;
      try {
        job_->run_unit(unit, me);
      } catch (...) {
        const std::lock_guard<std::mutex> hold(failure_lock_);
        if (!failed_.exchange(true)) failure_ = std::current_exception();
      }
    }
  }
}

void Pool::arrive_and_wait(std::uint32_t phase, int me) {
  // Before it arrives: from then on the job may go on.
  const Ahead ahead = job_->ahead(me);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
    arrived_.store(0, std::memory_order_relaxed);
    begin_next_phase(phase);
  } else {
    wait_beyond(phase, kSpinInStep, ahead);
  }
}

// By one thread, while all others wait or have not begun.
void Pool::begin_next_phase(std::uint32_t phase) {
  std::int64_t units = -1;
  if (!failed_.load()) {
    try {
      units = job_->next_phase();
    } catch (...) {
      const std::lock_guard<std::mutex> hold(failure_lock_);
      failed_.store(true);
      failure_ = std::current_exception();
    }
  }
  const std::int64_t n = size();
  for (std::int64_t i = 0; i < n && units >= 0; ++i) {
    ranges_[static_cast<std::size_t>(i)].next.store(units * i / n, std::memory_order_relaxed);
    ranges_[static_cast<std::size_t>(i)].end = units * (i + 1) / n;
  }
  const std::uint32_t next = ((phase | 1) + 1) | (units >= 0 ? 1 : 0);
  phase_.store(next);
  if (sleepers_.load() > 0) wake_all(phase_, false);
}

std::uint32_t Pool::wait_beyond(std::uint32_t phase, std::int64_t spin_ns, Ahead ahead) {
  for (std::size_t at = 0; at < ahead.bytes; at += kLinesBetweenLooks * 64) {
    const std::uint32_t seen = phase_.load(std::memory_order_acquire);
    if (seen != phase) return seen;
    for (std::size_t line = 0; line < kLinesBetweenLooks; ++line) __builtin_prefetch(ahead.data + at + 64 * line, 0, 2);
  }
  const std::int64_t until = now_ns() + spin_ns;
  do {
    for (int turn = 0; turn < kTurnsBetweenLooks; ++turn) {
      const std::uint32_t seen = phase_.load(std::memory_order_acquire);
      if (seen != phase) return seen;
      rest();
    }
  } while (now_ns() < until);
  sleepers_.fetch_add(1);
  std::uint32_t seen;
  while ((seen = phase_.load()) == phase && !stop_.load()) sleep_while(phase_, phase, false, 0);
  sleepers_.fetch_sub(1);
  return seen;
}

}  // namespace evensong
